"""A number that is not finite is found: rank, micro-batch, parameter, and every rank says the same."""

from __future__ import annotations

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
from instep.run.nonfinite import Culprit
from tests.run.loops import ledger
from tests.run.placements import PLACEMENTS, Placed, run_of
from tests.run.test_bad_steps import told
from tests.world import world

END = "Lower the learning rate, or go on from an earlier checkpoint with skip_steps {}, counted from 0"


def test_what_is_found_reads_as_a_sentence() -> None:
    assert str(Culprit((1,), "a", "a", 3)) == (
        "the gradient of 'a' of micro-batch 3, which rank 1 computed, is not finite"
    )
    assert str(Culprit((1,), "a", "c", 3)) == (
        "gradients of micro-batch 3, which rank 1 computed, are not finite: that of 'a', and others up to "
        "that of 'c', where backward came first"
    )
    assert str(Culprit((0,), "a", "a")) == "the gradient of 'a' that rank 0 computed is not finite"
    assert str(Culprit((1, 2), "a", "a", is_weight=True)) == (
        "the weight 'a' itself is not finite on ranks 1 and 2"
    )


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
    assert [line.get("skipped", "") for line in ledger(tmp_path / "run")] == [
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


@pytest.mark.parametrize("kind", PLACEMENTS)
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
