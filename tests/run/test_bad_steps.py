"""Skipped steps: all ranks skip them alike, and name where a number that is not finite comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.elastic.faults import Fault, FaultInjector
from instep.errors import Diverged, InstepError
from instep.mesh.mesh import Mesh
from tests.run.loops import recorded, summary
from tests.run.placements import PLACEMENTS, Placed, run_of
from tests.world import world


def told(mesh: Mesh, mine: object) -> list[object]:
    """What every rank says of itself."""
    everyone = mesh.world.group.all_gather_bytes(json.dumps(mine).encode(), "what a test compares")
    return [json.loads(said) for said in everyone]


def large_at(*steps: int, factor: float) -> object:
    """A loss whose gradient is multiplied in these steps, on rank 0 alone."""

    def loss(placed: Placed) -> object:
        def of(model: nn.Module, step: int, number: int) -> Tensor:
            value = placed.loss(model, step, number)
            return value * factor if step in steps and placed.run.rank == 0 else value

        return of

    return loss


def end(placed: Placed) -> None:
    placed.run.close()


@pytest.mark.parametrize("kind", PLACEMENTS)
@world(2, by="process", backend="shm")
def test_a_gradient_that_is_not_finite_is_used_on_no_rank(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    placed = run_of(tmp_path / "run", kind)
    loss = large_at(1, factor=float("inf"))(placed)
    assert placed.train(3, loss=loss) == [0, 1, 2]
    last = placed.run._steps.training.last
    health = placed.run._steps.training.health
    assert health.state() == {"skipped": 1, "in_a_row": 0, "norms": []}
    assert len({str(x) for x in told(mesh, [last.norm, last.skipped, health.state()])}) == 1
    lines = recorded(tmp_path / "run")
    assert [line.get("skipped", "") for line in lines] == ["", "gradient norm is nan", ""]
    assert summary(tmp_path / "run")["skipped_steps"] == 1
    assert told(mesh, "done") == ["done"] * 2
    end(placed)


@pytest.mark.parametrize("kind", ["replicas", "stage2"])
@world(2, by="process", backend="shm")
def test_a_spike_is_skipped_on_all_ranks(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    placed = run_of(tmp_path / "run", kind, checks={"spike": 50.0})
    loss = large_at(18, factor=1e6)(placed)
    placed.train(20, loss=loss)
    health = placed.run._steps.training.health
    assert len({str(x) for x in told(mesh, health.state())}) == 1
    assert health.skipped == 1
    assert "spike: norm" in recorded(tmp_path / "run")[18]["skipped"]
    norms = [line["norm"] for line in recorded(tmp_path / "run")]
    assert norms[18] > 1e3 * norms[17] > 0
    assert told(mesh, "done") == ["done"] * 2
    end(placed)


@pytest.mark.parametrize("kind", ["replicas", "stage1", "stage3"])
@world(2, by="process", backend="shm")
def test_steps_on_the_list_have_the_same_bits_on_every_placement(
    mesh: Mesh, kind: str, tmp_path: Path
) -> None:
    placed = run_of(tmp_path / "run", kind, checks={"skip_steps": (1, 2)})
    assert placed.train(4) == [0, 1, 2, 3]
    told(mesh, "summed up")
    end(placed)
    lines = recorded(tmp_path / "run")
    assert [line.get("skipped", "") for line in lines] == [
        "",
        "step 1 is in skip_steps",
        "step 2 is in skip_steps",
        "",
    ]
    assert summary(tmp_path / "run")["skipped_steps"] == 0
    by_hand = run_of(tmp_path / "by hand", "replicas")

    def drop(step: int, module: nn.Module) -> None:
        if step in (1, 2):
            for p in module.parameters():
                p.grad = torch.full_like(p, torch.nan)

    by_hand.train(4, before=drop)
    told(mesh, "summed up")
    end(by_hand)
    hashes = {summary(tmp_path / name)["state_sha256"] for name in ("run", "by hand")}
    assert len(hashes) == 1


END = "Lower the learning rate, or go on from an earlier checkpoint with skip_steps {}, counted from 0"


class _Poison(torch.autograd.Function):
    """Zero, with nan for a gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        return torch.full_like(*ctx.saved_tensors, torch.nan)


def spoiled(placed: Placed, name: str, numbers: set[int], steps: range) -> Callable[..., Tensor]:
    """A loss whose gradient by the parameter ``name`` is nan in these micro-batches of these steps."""

    def loss(model: nn.Module, step: int, number: int) -> Tensor:
        if step not in steps or number not in numbers:
            return placed.loss(model, step, number)
        # A hook, since weights in shards are whole within the forward of their own layer alone.
        path, _, own = name.rpartition(".")
        handle = placed.module.get_submodule(path).register_forward_pre_hook(
            lambda layer, args: args[0] + _Poison.apply(getattr(layer, own))
        )
        try:
            return placed.loss(model, step, number)
        finally:
            handle.remove()

    return loss


def diverged(mesh: Mesh, placed: Placed, **words: object) -> Diverged:
    """The error that ends the training, which is the same on all ranks."""
    with pytest.raises(Diverged) as caught:
        placed.train(6, **words)
    error = caught.value
    assert (isinstance(error, InstepError), getattr(error, "told", False)) == (True, mesh.rank > 0)
    assert error.__suppress_context__
    assert len(set(map(str, told(mesh, [str(error), error.ranks, error.parameter])))) == 1
    placed.run.close()
    return error


@pytest.mark.parametrize("kind", PLACEMENTS)
@world(2, by="process", backend="shm")
def test_a_gradient_is_named_with_its_parameter_and_rank(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    placed = run_of(tmp_path / "run", kind, checks={"max_skipped": 1})
    # Number 1 is the rank's own in an undeclared step. In stages 2 and 3 ranks take turns.
    numbers, rank, where = {1}, 1, "that rank 1 computed"
    if kind != "undeclared":
        numbers, rank = {2, 3}, 0 if kind in ("stage2", "stage3") else 1
        where = f"of micro-batch 2, which rank {rank} computed,"
    error = diverged(mesh, placed, loss=spoiled(placed, "2.weight", numbers, range(2, 6)))
    assert str(error) == (
        "step 3: gradient norm is nan; 2 steps in a row were skipped, and max_skipped is 1. First of all, "
        f"the gradient of '2.weight' {where} is not finite. {END.format('2, 3')}"
    )
    assert (error.ranks, error.parameter) == ((rank,), "2.weight")
    assert [line.get("skipped", "") for line in recorded(tmp_path / "run")] == [
        "",
        "",
        "gradient norm is nan",
    ]


@world(2, by="process", backend="shm")
def test_a_loss_is_known_by_all_the_gradients_that_it_spoils(mesh: Mesh, tmp_path: Path) -> None:
    placed = run_of(tmp_path / "run", "replicas", checks={"max_skipped": 0})

    def loss(model: nn.Module, step: int, number: int) -> Tensor:
        return placed.loss(model, step, number) * (math.inf if number == 1 else 1.0)

    error = diverged(mesh, placed, loss=loss)
    assert (
        "gradients of micro-batch 1, which rank 0 computed, are not finite: that of '0.weight', and others "
        "up to that of '2.bias', where backward came first"
    ) in str(error)


@pytest.mark.parametrize("kind", ["replicas", "stage3"])
@world(2, by="process", backend="shm")
def test_a_weight_goes_before_the_gradients_that_it_spoils(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    """Where it is in slices, one rank has it."""
    placed = run_of(tmp_path / "run", kind, checks={"max_skipped": 0})

    def spoil(step: int, module: nn.Module) -> None:
        entries = dict(placed.run._steps.training.entries())
        if step == 0 and "2.weight" in entries:
            entries["2.weight"].view(-1)[:1].fill_(math.nan)

    error = diverged(mesh, placed, before=spoil)
    assert "the weight '2.weight' itself is not finite on rank" in str(error)
    assert error.parameter == "2.weight"


@world(2, by="process", backend="shm")
def test_what_no_micro_batch_shows_is_laid_on_what_comes_after(mesh: Mesh, tmp_path: Path) -> None:
    placed = run_of(tmp_path / "run", "replicas", checks={"max_skipped": 0})

    def spoil(step: int, module: nn.Module) -> None:
        gradient = dict(module.named_parameters())["2.bias"].grad
        if gradient is not None:
            gradient.fill_(math.inf)

    error = diverged(mesh, placed, before=spoil)
    assert (
        "The gradients of all micro-batches were finite as they were computed, and that of '2.bias' is not "
        "any more: they have overflowed"
    ) in str(error)
    assert (error.ranks, error.parameter) == ((), "2.bias")


@world(2, by="process", backend="shm")
def test_spikes_that_last_end_a_run_without_a_search(mesh: Mesh, tmp_path: Path) -> None:
    placed = run_of(tmp_path / "run", "replicas", checks={"max_skipped": 1, "spike": 10.0})

    def loss(model: nn.Module, step: int, number: int) -> Tensor:
        if step == 1:
            placed.run._steps.training.health.restore({"skipped": 0, "in_a_row": 0, "norms": [1e-6] * 20})
        return placed.loss(model, step, number)

    error = diverged(mesh, placed, loss=loss)
    assert "spike: norm" in str(error)
    assert str(error).endswith(
        "2 steps in a row were skipped, and max_skipped is 1. The norms have risen to stay: lower the "
        "learning rate, or raise spike"
    )
    assert (error.ranks, error.parameter) == ((), "")


@pytest.mark.parametrize("kind", ["undeclared", "stage3"])
@world(2, by="process", backend="shm")
def test_a_fault_makes_the_gradient_of_one_rank_nan(mesh: Mesh, kind: str, tmp_path: Path) -> None:
    placed = run_of(tmp_path / "run", kind, checks={"max_skipped": 0})
    injector = FaultInjector([Fault("nan", rank=1, step=2, name="2.weight")])
    injector.rank = mesh.rank

    def inject(model: nn.Module, step: int, number: int) -> Tensor:
        placed.run._steps.work.injector = injector
        return placed.loss(model, step, number)

    error = diverged(mesh, placed, loss=inject)
    assert "step 2: gradient norm is nan" in str(error)
    assert (error.ranks, error.parameter) == ((1,), "2.weight")
    assert not any(p._backward_hooks for p in placed.module.parameters() if "stage" not in kind)
