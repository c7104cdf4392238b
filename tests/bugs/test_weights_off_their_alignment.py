"""Weights that began 4 bytes past a vector boundary, or had gaps, gave other bits, and others by stage.

``load_state_dict(assign=True)`` makes tensors of a mapped file the weights, and kernels look at addresses and
strides. Flat memory of the stages aligns what moves there; ``DataParallel``, ``ParameterServer`` and
``ThreadedReplicas`` computed with weights as they came, and no one moved buffers and frozen weights.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.mesh.mesh import Mesh
from instep.state.hash import tensor_digest
from instep.step.micro_batches import MicroBatch
from tests.parity import filled, numbers, world_of_one
from tests.reduce.mapped import off_by
from tests.world import world

WIDTH = 64  # one row times such a matrix has other bits where the matrix is not aligned


class Net(nn.Module):
    """Every weight is a matrix of its own kind: trained, frozen, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("mixing", numbers(WIDTH, WIDTH, key="mixing"))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.frozen(self.trained(x)), self.mixing)


def with_gaps(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


LAYOUTS = {
    "as made": lambda x: x.clone(),
    "4 bytes off": lambda x: off_by(4, x),
    "44 bytes off": lambda x: off_by(44, x),
    "with gaps": with_gaps,
}


def net(layout: str) -> Net:
    module = filled(Net())
    values = {name: LAYOUTS[layout](x) for name, x in module.state_dict().items()}
    module.load_state_dict(values, assign=True)
    return module


def leaf(model: nn.Module, micro_batch: MicroBatch) -> None:
    model(numbers(1, WIDTH, key=str(micro_batch.index))).square().mean().backward()


OPTIONS = {"lr": 0.02, "fused": True}


def by_data_parallel(module: nn.Module) -> nn.Module:
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIONS)  # before the weights move
    model = instep.DataParallel(module, process_group=world_of_one())
    for _ in range(2):
        for micro_batch in model.micro_batches(4):
            leaf(model, micro_batch)
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    return module


def by_server(module: nn.Module) -> nn.Module:
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIONS)
    server = instep.ParameterServer(module, optimizer, world_of_one())
    for _ in range(2):
        for micro_batch in server.micro_batches(4):
            leaf(module, micro_batch)
        server.step()
    server.close()
    return module


def by_threads(module: nn.Module) -> nn.Module:
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIONS)
    replicas = instep.ThreadedReplicas(module, 2)
    for _ in range(2):
        replicas.micro_batches(4, leaf)
        optimizer.step()
        optimizer.zero_grad()
    return module


def by_stage_3(module: nn.Module) -> nn.Module:
    mesh = world_of_one()
    model = instep.fully_shard(module, mesh)
    optimizer = instep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, mesh, **OPTIONS)
    for _ in range(2):
        for micro_batch in model.micro_batches(4):
            leaf(model, micro_batch)
        optimizer.step()
        optimizer.zero_grad()
    whole = instep.full_state_dict(model)
    optimizer.close()
    model.close()
    trained = Net()
    trained.load_state_dict(whole)
    return trained


def by_hand(module: nn.Module) -> nn.Module:
    """The sum in the order of the tree, in memory that torch has aligned."""
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIONS)
    for _ in range(2):
        parts = []
        for i in range(4):
            loss = module(numbers(1, WIDTH, key=str(i))).square().mean()
            parts.append(torch.autograd.grad(loss, list(module.trained.parameters())))
        for p, a, b, c, d in zip(module.trained.parameters(), *parts, strict=True):
            p.grad = ((a + b) + (c + d)) * 0.25
        optimizer.step()
    return module


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("train", [by_data_parallel, by_server, by_threads, by_stage_3])
def test_bits_are_those_of_weights_that_torch_has_made(train, layout: str) -> None:
    expected = by_hand(net("as made")).state_dict()
    for name, x in train(net(layout)).state_dict().items():
        assert tensor_digest(x) == tensor_digest(expected[name])


def test_layers_of_a_pipeline_are_aligned() -> None:
    """Its weights had a home when they were to be aligned, and what has a home stays where it is."""
    layer = net("4 bytes off").trained
    model = instep.Pipeline(nn.Sequential(layer), world_of_one())
    assert layer.weight.data_ptr() % 64 == 0
    model.close()


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("scale", torch.ones(2, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale + x
        return self.weight * self.scale


@world(2)
def test_a_buffer_that_a_graph_holds_is_replaced_by_one_with_its_strides(mesh: Mesh) -> None:
    model = instep.DataParallel(Moving(), process_group=mesh)
    pending, loss = model(torch.tensor(float(mesh.rank))), model(torch.tensor(1.0 + mesh.rank)).sum()
    loss.backward(retain_graph=True)
    assert model.module.scale.stride() == (1, 3)
    del pending
    model.close()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["parameter", "frozen", "buffer"])
def test_stages_refuse_by_name_what_they_would_separate(stage: int, kind: str) -> None:
    module = nn.Module()
    module.layer = nn.Linear(4, 4)
    if kind == "buffer":
        module.register_buffer("tied", module.layer.weight.detach()[:2])
    else:
        module.tied = nn.Parameter(module.layer.weight.detach(), requires_grad=kind == "parameter")
    with pytest.raises(ValueError, match=r"'(layer.weight|tied)' and '(layer.weight|tied)' share memory"):
        instep.fully_shard(module, world_of_one(), stage=stage)


@pytest.mark.parametrize("layout", ["4 bytes off", "with gaps"])
def test_frozen_weights_that_are_assigned_after_wrapping_are_aligned(layout: str) -> None:
    model = instep.DataParallel(net("as made"), process_group=world_of_one())
    loaded = {name: LAYOUTS[layout](x) for name, x in model.module.frozen.state_dict().items()}
    model.module.frozen.load_state_dict(loaded, assign=True)
    leaf(model, next(iter(model.micro_batches(1))))
    weight = model.module.frozen.weight
    assert weight.data_ptr() % 64 == 0
    assert weight.is_contiguous()
    model.close()


def test_trainable_ones_that_are_assigned_after_wrapping_are_refused() -> None:
    module = net("as made")
    model = instep.DataParallel(module, process_group=world_of_one())
    module.trained.load_state_dict(
        {name: x.clone() for name, x in module.trained.state_dict().items()}, assign=True
    )
    loss = model(numbers(1, WIDTH, key="x")).sum()
    with pytest.raises(ValueError, match=r"'trained.weight' was not there .*assign=True"):
        loss.backward()
    model.close()
