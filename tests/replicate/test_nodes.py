"""Tree nodes in smaller formats: each format has bits of its own, the same in every placement."""

from __future__ import annotations

import threading
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import instep
from instep.mesh.mesh import Mesh
from instep.reduce.node_format import BucketNodes, NodeFormat
from instep.reduce.tree import Node
from instep.replicate.server import ParameterServer
from instep.replicate.threads import ThreadedReplicas
from instep.replicate.wrapper import DataParallel
from instep.step.micro_batches import MicroBatch
from tests.parity import _kept as kept
from tests.parity import adamw, assert_same_bits, filled, world_of_one
from tests.reduce.rounded_nodes import FORMATS, by_hand
from tests.replicate.nets import WIDTH, data
from tests.state_oracle import Entry
from tests.world import world

EVERY = pytest.mark.parametrize("nodes", FORMATS, ids=str)
TINY_MB, LARGE_MB = 1e-4, 25
NUM_STEPS = 2


class Wide(nn.Module):
    """A parameter of several blocks, some smaller ones, one that half of the micro-batches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, 130), nn.Linear(130, 70), nn.Linear(70, 3)
        self.sometimes = nn.Linear(3, 3)

    def forward(self, x: Tensor, sometimes: bool) -> Tensor:
        x = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return self.sometimes(x) if sometimes else x


def leaf(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    micro_batch.weight = 1 + micro_batch.index % 2
    model(data(micro_batch, step), micro_batch.index % 2 == 0).square().sum().backward()


def words(nodes: NodeFormat) -> dict[str, Any]:
    name, rounding, seed = astuple(nodes)
    return {"nodes": name, "rounding": rounding, "seed": seed}


def trained(
    mesh: Mesh, nodes: NodeFormat, num_leaves: int = 7, *, in_slices: bool = False, **options: Any
) -> list[Entry]:
    module = filled(Wide())
    model = DataParallel(module, process_group=mesh, find_unused_parameters=True, **words(nodes), **options)
    if in_slices:  # also what is small
        model._reducer.exchange.transport.at_once_bytes = 0
    optimizer = adamw(module.parameters())
    for step in range(NUM_STEPS):
        for micro_batch in model.micro_batches(num_leaves):
            leaf(model, micro_batch, step)
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    return kept(module, optimizer)


def trained_by_hand(nodes: NodeFormat, num_leaves: int = 7) -> list[Entry]:
    """Autograd, and each node of the tree by its definition."""
    module = filled(Wide())
    optimizer = adamw(module.parameters())
    for step in range(NUM_STEPS):
        leaves = [MicroBatch(i, num_leaves) for i in range(num_leaves)]
        gradients = []
        for micro_batch in leaves:
            leaf(module, micro_batch, step)
            gradients.append([None if p.grad is None else p.grad.flatten() for p in module.parameters()])
            module.zero_grad()
        scale = 1.0 / sum(micro_batch.weight for micro_batch in leaves)
        for number, parameter in enumerate(module.parameters()):
            zero = torch.full((parameter.numel(),), -0.0)
            own = [(zero if row[number] is None else row[number]).numpy() for row in gradients]
            total = node_value(own, (0, num_leaves), nodes, step, number)
            parameter.grad = (torch.from_numpy(total) * scale).view_as(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return kept(module, optimizer)


def node_value(
    leaves: list[np.ndarray], node: Node, nodes: NodeFormat, step: int, parameter: int
) -> np.ndarray:
    lo, hi = node
    if hi - lo == 1:
        return by_hand(leaves[lo], nodes, step, node, parameter)
    middle = 1
    while 2 * middle < hi - lo:
        middle *= 2
    left, right = (
        node_value(leaves, x, nodes, step, parameter) for x in ((lo, lo + middle), (lo + middle, hi))
    )
    return by_hand(left + right, nodes, step, node, parameter)


@EVERY
def test_one_process_computes_every_node_and_rounds_it(nodes: NodeFormat) -> None:
    assert_same_bits(trained(world_of_one(), nodes), trained_by_hand(nodes))


def test_every_format_and_rounding_has_bits_of_its_own() -> None:
    found = [
        trained(world_of_one(), nodes)
        for nodes in (NodeFormat(), *FORMATS, NodeFormat("int8", "stochastic", 4))
    ]
    assert len({x[0][1].detach().numpy().tobytes() for x in found}) == len(found)


_alone: dict[NodeFormat, list[Entry]] = {}
_lock = threading.Lock()


def alone(nodes: NodeFormat) -> list[Entry]:
    """What one process comes to, once for all who ask."""
    with _lock:
        if nodes not in _alone:
            _alone[nodes] = trained(world_of_one(), nodes)
        return _alone[nodes]


EVERY_WAY = (("bucketed", TINY_MB), ("bucketed", 0.03), ("flat", LARGE_MB), ("naive", 1))


def gives_the_bits_of_one(mesh: Mesh, nodes: NodeFormat, ways: Any = EVERY_WAY) -> None:
    expected = alone(nodes)
    for strategy, cap in ways:
        for in_slices in (False, True) if strategy in ("bucketed", "flat") else (False,):
            found = trained(mesh, nodes, in_slices=in_slices, strategy=strategy, bucket_cap_mb=cap)
            assert_same_bits(found, expected)


@EVERY
@world(2)
def test_two_ranks_give_the_bits_of_one_in_messages(mesh: Mesh, nodes: NodeFormat) -> None:
    gives_the_bits_of_one(mesh, nodes)


@EVERY
@world(3, backend="shm")
def test_three_ranks_give_the_bits_of_one_in_shared_memory(mesh: Mesh, nodes: NodeFormat) -> None:
    gives_the_bits_of_one(mesh, nodes)


@EVERY
@world(3)
def test_a_server_gives_the_bits_of_one(mesh: Mesh, nodes: NodeFormat) -> None:
    module = filled(Wide())
    optimizer = adamw(module.parameters()) if mesh.rank == 0 else None
    server = ParameterServer(module, optimizer, mesh, find_unused_parameters=True, **words(nodes))
    for step in range(NUM_STEPS):
        for micro_batch in server.micro_batches(7):
            leaf(module, micro_batch, step)
        server.step()
    server.close()
    ours = [(name, p) for name, p in module.named_parameters()]
    assert_same_bits(ours, alone(nodes)[: len(ours)])


@EVERY
def test_threads_give_the_bits_of_one(nodes: NodeFormat) -> None:
    module = filled(Wide())
    replicas = ThreadedReplicas(module, 3, **words(nodes))
    optimizer = adamw(module.parameters())
    for step in range(NUM_STEPS):
        replicas.micro_batches(7, lambda model, micro_batch, step=step: leaf(model, micro_batch, step))
        optimizer.step()
        optimizer.zero_grad()
    replicas.close()
    assert_same_bits(kept(module, optimizer), alone(nodes))


@world(2)
def test_values_that_are_rounded_only_where_they_travel_are_others(mesh: Mesh) -> None:
    """A control: what a format must not be."""
    nodes = NodeFormat("bfloat16")
    module = filled(Wide())
    model = DataParallel(module, process_group=mesh, find_unused_parameters=True, nodes="bfloat16")
    for bucket in model._reducer.buckets:
        bucket.counter._nodes = BucketNodes(bucket.slice_length, 2, bucket.dtype)
    optimizer = adamw(module.parameters())
    for micro_batch in model.micro_batches(7):
        leaf(model, micro_batch, 0)
    optimizer.step()
    model.close()
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(kept(module, optimizer), trained(world_of_one(), nodes))


@world(2)
def test_plain_steps_round_the_nodes_of_all_ranks_gradients(mesh: Mesh) -> None:
    model = DataParallel(filled(Wide()), process_group=mesh, nodes="bfloat16", find_unused_parameters=True)
    x = torch.ones(4, WIDTH) * (mesh.rank + 1)
    for _ in range(2):
        model(x, True).square().mean().backward()
    gradient = model.module.middle.weight.grad
    assert torch.equal(gradient, gradient.bfloat16().float())  # half of a number of bfloat16 is one
    model.close()


@world(2)
def test_a_format_on_one_rank_alone_is_refused_on_all(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="nodes"):
        DataParallel(filled(Wide()), process_group=mesh, nodes=("bfloat16", "float32")[mesh.rank])


def test_what_a_format_does_not_go_with_is_refused() -> None:
    with pytest.raises(ValueError, match="nodes='int8' with ordered=False"):
        instep.DataParallel(Wide(), nodes="int8", ordered=False)
    with pytest.raises(ValueError, match="expected one of float32, bfloat16, int8"):
        instep.DataParallel(Wide(), nodes="half")
    model = instep.DataParallel(Wide(), nodes="int8")
    with pytest.raises(ValueError, match="a communication hook with nodes='int8'"):
        model.register_comm_hook(None, lambda state, bucket: None)
    model.close()


@EVERY
@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_seen_after_the_exchange(nodes: NodeFormat, odd: float) -> None:
    model = instep.DataParallel(filled(Wide()), find_unused_parameters=True, **words(nodes))
    for micro_batch in model.micro_batches(4):
        loss = model(data(micro_batch, 0), True).square().mean()
        (loss * (odd if micro_batch.index == 2 else 1.0)).backward()
    assert not np.isfinite(float(instep.clip_grad_norm_(model.parameters(), 1.0)))
    model.close()


@EVERY
@world(2)
def test_a_comparison_with_one_process_allows_for_rounding(mesh: Mesh, nodes: NodeFormat) -> None:
    model = DataParallel(filled(Wide()), process_group=mesh, find_unused_parameters=True, **words(nodes))
    x = data(MicroBatch(mesh.rank, 2), 0)
    model.verify(x, lambda net, batch: net(batch, True).square().mean()).raise_for_error()
    model.close()
