"""A step with cut layers: what ``verify`` finds in it, what a timeline shows of it, and its state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep import tensor
from instep.checkpoint.contract import module_fields
from instep.events import SPLIT_SOFTMAX, TENSOR_PARALLEL, WAITS, Timeline
from instep.mesh.mesh import Mesh
from instep.models.transformer import GPT
from instep.timeline.bubbles import bubbles
from tests.parity import filled, numbers, world_of_one
from tests.tensor.trained import GPT_CONFIG, Placed, cut_gpt, loss_of, tokens
from tests.world import world

WAIT_S = 0.05


def loss_of_batch(model: Any, batch: Tensor) -> Tensor:
    return loss_of(getattr(model, "module", model), model(batch[:, :-1]), batch[:, 1:])


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=["tp", "dp and tp"])
def test_verify_compares_cut_layers_with_whole_ones(axes: dict[str, int], sequence: bool) -> None:
    world(2 * axes.get("dp", 1), **axes)(verified)(sequence=sequence)


def verified(mesh: Mesh, sequence: bool) -> None:
    net = cut_gpt(mesh, Placed(sequence=sequence))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    model = instep.DataParallel(net, mesh)
    report = model.verify(tokens(mesh.data.rank), loss_of_batch)
    assert report.ok, report
    assert len(report.rows) == len(before)
    for name, p in net.named_parameters():
        assert p.shape == before[name].shape and torch.equal(p, before[name]) and p.grad is None


@world(2, tp=2)
def test_verify_finds_a_layer_whose_sum_is_left_out_on_one_rank(mesh: Mesh) -> None:
    net = cut_gpt(mesh, Placed())
    model = instep.DataParallel(net, mesh)
    ranks = net.blocks[0].feed_forward.down.ranks = tensor.exchange.TensorRanks(net.head.out.ranks.boxes)
    whole_sum = ranks.sum
    if mesh.rank == 1:
        ranks.sum = lambda x: (whole_sum(x), x)[1]
    report = model.verify(tokens(0), loss_of_batch)
    assert not report.ok, report


class Gated(nn.Module):
    """Its gate is between the columns and the rows, and the gradient of a rank is that of its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gate)


GATED = {"up": tensor.Column(), "down": tensor.Row()}


@world(2, tp=2)
def test_verify_finds_a_parameter_between_columns_and_rows(mesh: Mesh) -> None:
    net = filled(Gated())
    model = instep.DataParallel(tensor.shard(net, mesh, GATED, chunks=2), mesh)
    report = model.verify(numbers(4, 32, key="x"), lambda model, x: model(x).square().mean())
    assert [row.name for row in report.rows if not row.ok] == ["gate"]


@world(2, tp=2)
def test_verify_finds_a_norm_between_slices_that_the_plan_leaves_out(mesh: Mesh) -> None:
    net = filled(
        nn.Sequential(nn.Identity(), nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32), nn.Identity())
    )
    plan = {"0": tensor.scatter, "2": tensor.Column(), "3": tensor.Row(), "4": tensor.gather}
    tensor.shard(net, mesh, plan, chunks=2, sequence=True)
    report = instep.DataParallel(net, mesh).verify(
        numbers(2, 4, 32, key="x"), lambda model, x: model(x).square().mean()
    )
    assert [row.name for row in report.rows if not row.ok] == ["1.weight", "1.bias"]


def in_a_plain_loop(model: Any) -> None:
    model(numbers(4, 32, key="x")).square().mean().backward()


def in_a_declared_step(model: Any) -> None:
    for _ in model.micro_batches(1):
        in_a_plain_loop(model)


@world(2, tp=2)
@pytest.mark.parametrize("step", [in_a_plain_loop, in_a_declared_step])
def test_the_first_step_refuses_a_parameter_that_gets_a_part_of_its_gradient(
    mesh: Mesh, step: Callable[[Any], None]
) -> None:
    net = filled(Gated())
    model = instep.DataParallel(tensor.shard(net, mesh, GATED, chunks=2), mesh)
    with pytest.raises(ValueError, match="the gradient of 'gate' differs between ranks along tp, which have"):
        step(model)


@world(2, ep=2)
def test_the_first_step_refuses_another_batch_whose_tokens_choose_the_same_experts(mesh: Mesh) -> None:
    net = filled(nn.Sequential(nn.Linear(8, 32), instep.expert.MoE(32, 32, num_experts=2, top_k=1)))
    layer: Any = net[1]
    layer.balance_bias[0] = 2  # all tokens choose the first one
    model = instep.DataParallel(instep.expert.shard(net, mesh), mesh)
    with pytest.raises(ValueError, match=r"the gradient of .* differs between ranks along ep, which"):
        model(numbers(4, 8, key=f"x of rank {mesh.rank}")).square().mean().backward()


WAITING = threading.Event()


@world(2, tp=2)
def test_the_timeline_shows_exchanges_inside_of_layers_and_who_waited(mesh: Mesh) -> None:
    net = cut_gpt(mesh, Placed())
    model = instep.DataParallel(net, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    WAITING.clear()
    for step in range(2):
        for micro_batch in model.micro_batches(1):
            if step == 1 and mesh.rank == 1:
                assert WAITING.wait(20)  # rank 0 is in a layer
                threading.Event().wait(WAIT_S)
            if step == 1 and mesh.rank == 0:
                mesh.recorder.watch = lambda name, begins: WAITING.set()
                mesh.recorder.watched = (TENSOR_PARALLEL,)
            x = tokens(micro_batch.index)
            loss_of(net, model(x[:, :-1]), x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    events = Timeline(mesh.recorder.events).of(mesh.rank, 1)
    found = bubbles(events)
    assert {TENSOR_PARALLEL, SPLIT_SOFTMAX} <= {event.name for event in events} & WAITS
    assert {TENSOR_PARALLEL, SPLIT_SOFTMAX} <= {bubble.cause for bubble in found}
    longest = max(found, key=lambda bubble: bubble.duration_s)
    assert mesh.rank == 1 or (longest.cause == TENSOR_PARALLEL and longest.duration_s >= WAIT_S)


@world(2, tp=2)
def test_the_contract_has_chunks_and_neither_ranks_nor_slices(mesh: Mesh) -> None:
    one = module_fields(cut_gpt(world_of_one(), Placed()))
    assert module_fields(cut_gpt(mesh, Placed())) == one
    assert module_fields(cut_gpt(mesh, Placed(sequence=True))) == one
    assert module_fields(cut_gpt(mesh, Placed(chunks=2))) != one


@world(2, tp=2)
def test_whole_weights_are_gathered_saved_and_loaded(mesh: Mesh, tmp_path: Path) -> None:
    net = cut_gpt(mesh, Placed())
    whole = filled(GPT(GPT_CONFIG)).state_dict()
    gathered = instep.full_state_dict(net)
    assert gathered.keys() == whole.keys()
    assert all(torch.equal(gathered[name], whole[name]) for name in whole)
    instep.save(tmp_path / "saved", step=1, model=net)
    again = cut_gpt(mesh, Placed(sequence=True))
    for p in again.parameters():
        p.data.zero_()
    assert instep.load(tmp_path / "saved", model=again).step == 1
    gathered = instep.full_state_dict(again)
    assert all(torch.equal(gathered[name], whole[name]) for name in whole)


@world(4, pp=2, tp=2)
def test_verify_of_a_pipeline_compares_stages_with_all_layers(mesh: Mesh) -> None:
    net = cut_gpt(mesh, Placed(sequence=True))
    model = instep.Pipeline(net, mesh, micro_batches=2)
    report = model.verify(
        lambda logits, micro_batch: loss_of(net, logits, tokens(micro_batch.index)[:, 1:]),
        lambda micro_batch: tokens(micro_batch.index)[:, :-1],
        2,
    )
    assert report.ok, report
