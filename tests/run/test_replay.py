"""Steps that are made twice: what they depend on beside their state is found; a right loop stays as it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import instep
from instep.errors import ReplicasDiffer
from instep.mesh.mesh import Mesh
from tests.checkpoint.registry import Average
from tests.run.loops import Loop, Loss, bits, recorded, squares, summary
from tests.run.placements import Placed, run_of
from tests.world import world


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    """Makes a loop whose steps are made twice."""
    runs: list[instep.Run] = []

    def make(name: str = "run", *, check_every: int = 1) -> Loop:
        for run in runs:
            run.close()
        runs.append(instep.Run(tmp_path / name, checks={"replay_every": check_every}))
        return Loop(runs[-1])

    yield make
    for run in runs:
        run.close()


def by_the_clock() -> Loss:
    return lambda y: y.square().mean() * float(time.perf_counter_ns() % 1_000_003)


def of(placed: Placed, change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The loss of ``placed``, changed."""
    return lambda model, step, number: change(placed.loss(model, step, number))


def by_a_generator_of_its_own() -> Loss:
    own = torch.Generator().manual_seed(0)
    return lambda y: squares(y + torch.randn(y.shape, generator=own))


def by_a_counter() -> Loss:
    calls = 0

    def counted(y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return squares(y) / calls

    return counted


@pytest.mark.parametrize("loss", [by_the_clock, by_a_generator_of_its_own, by_a_counter])
def test_a_loss_that_depends_on_something_else_is_found(
    loss: Callable[[], Loss], begin: Callable[..., Loop]
) -> None:
    with pytest.raises(ReplicasDiffer, match="step 0 was made twice, from the same state") as error:
        begin().train(loss=loss())
    assert "micro-batch 1, computed twice, by rank 0: 2 different gradients of '0.weight'" in str(error.value)
    assert error.value.parameters == ("0.weight",)
    assert error.value.ranks == (0,)


def test_an_update_that_depends_on_something_else_is_found(begin: Callable[..., Loop]) -> None:
    """A schedule of one's own that was not registered; the gradients are those of a right loop."""
    loop, rates = begin(check_every=2), [0.1, 0.2]

    def by_another_rate(step: instep.Step) -> None:
        loop.optimizer.param_groups[0]["lr"] = rates.pop()

    with pytest.raises(ReplicasDiffer, match=r"twice, .*:\n  rank 0: '0\.weight' after the step"):
        loop.train(before=by_another_rate)


def test_a_right_loop_is_what_it_is_without_the_check(begin: Callable[..., Loop], tmp_path: Path) -> None:
    made = {}
    for name, every in (("once", 0), ("twice", 1), ("sometimes", 2)):
        loop = begin(name, check_every=every)
        plan = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 4)
        average = Average()

        def after(step: instep.Step, loop=loop, plan=plan, average=average) -> None:
            plan.step()
            average.update(loop.model.module)

        made[name] = loop.train(4, after=after, plan=plan, average=average)
    assert made == {"once": [0, 1, 2, 3], "twice": [0, 0, 1, 1, 2, 2, 3, 3], "sometimes": [0, 0, 1, 2, 2, 3]}
    for name in ("twice", "sometimes"):
        assert summary(tmp_path / name)["state_sha256"] == summary(tmp_path / "once")["state_sha256"]
        assert bits(tmp_path / name) == bits(tmp_path / "once")
        assert [x["step"] for x in recorded(tmp_path / name)] == [0, 1, 2, 3]


def test_a_skipped_step_is_made_twice_too(begin: Callable[..., Loop], tmp_path: Path) -> None:
    loop = begin()

    def poison(step: instep.Step) -> None:
        if step == 1:
            loop.model.module[0].weight.grad[0, 0] = torch.inf

    assert loop.train(before=poison) == [0, 0, 1, 1, 2, 2]
    assert summary(tmp_path / "run")["skipped_steps"] == 1


NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


@contextmanager
def differing(run: instep.Run) -> Iterator[pytest.ExceptionInfo[ReplicasDiffer]]:
    try:
        with pytest.raises(ReplicasDiffer) as error:
            yield error
    finally:
        run.close()


@world(2, by="process")
def test_of_two_ranks_that_compute_differently_both_are_named(mesh: Mesh, tmp_path: Path) -> None:
    run = instep.Run(tmp_path / "run", checks={"replay_every": 1})
    with differing(run) as error:
        Loop(run).train(loss=lambda y: squares(y) * (1 + run.rank))
    told = str(error.value)
    assert told.startswith("step 0 was made 4 times, from the same state, and ranks computed different")
    for micro_batch in range(2):
        assert f"micro-batch {micro_batch}, by ranks 0 and 1, all that were asked: '0.weight'" in told
    assert told.splitlines()[-1] == (
        "One of ranks 0 and 1 is wrong and there is no majority to tell which: resume from a checkpoint of "
        "before, on three ranks or more, so that it is named"
    )
    assert (error.value.ranks, error.value.parameters) == ((0, 1), NAMES)


@pytest.mark.parametrize("kind", ["replicas", "stage1", "stage3"])
@world(3, by="process")
def test_of_three_ranks_the_one_that_computes_otherwise_is_named(
    mesh: Mesh, tmp_path: Path, kind: str
) -> None:
    placed = run_of(tmp_path / "run", kind, checks={"replay_every": 1})
    with differing(placed.run) as error:
        placed.train(2, loss=of(placed, lambda value: value * (1.001 if mesh.rank == 1 else 1.0)))
    told = str(error.value).splitlines()
    assert told[0] == (
        "step 0 was made 6 times, from the same state, and ranks computed different gradients of one "
        "micro-batch:"
    )
    blame = "by ranks 0, 1 and 2: rank 1 computed otherwise: '0.weight', '0.bias', '2.weight' and 1 more"
    assert told[1:5] == [f"  micro-batch {i}, {blame}" for i in range(4)]
    assert "the arithmetic or memory of rank 1 is broken" in told[5]
    assert told[-1] == "Leave out the host of rank 1 and resume from a checkpoint of before"
    assert (error.value.ranks, error.value.parameters) == ((1,), NAMES)


@pytest.mark.parametrize("kind", ["replicas", "stage3"])
@world(3, by="process")
def test_a_loss_by_the_clock_is_blamed_on_no_rank(mesh: Mesh, tmp_path: Path, kind: str) -> None:
    placed, factor = run_of(tmp_path / "run", kind, checks={"replay_every": 1}), by_the_clock()
    with differing(placed.run) as error:
        placed.train(2, loss=of(placed, factor))
    told = str(error.value)
    assert "micro-batch 3, computed 6 times, by ranks 0, 1 and 2: 6 different gradients of " in told
    assert "computed otherwise" not in told
    assert "Leave out" not in told
    assert "Look in the loop for a clock" in told.splitlines()[-1]
    assert told.endswith("a rank's arithmetic or memory is broken")


@world(3, by="process")
def test_a_second_update_that_follows_from_a_wrong_first_one_is_blamed_on_no_other_rank(
    mesh: Mesh, tmp_path: Path
) -> None:
    """Rank 1 computes one micro-batch otherwise, so in one of three attempts all have other weights later."""
    run = instep.Run(tmp_path / "run", checks={"replay_every": 1})
    loop, second = Loop(run), Loop(run)
    objects = {"second": second.model, "first": loop.model, "one": loop.optimizer, "two": second.optimizer}
    with differing(run) as error:
        for step in run.steps(1, **objects):
            with step:
                x = torch.ones(3, 4)
                for micro_batch in loop.model.micro_batches(2):
                    wrong = run.rank == 1 and micro_batch.index == 1
                    squares(loop.model(x)).mul(1.001 if wrong else 1.0).backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                for _ in second.model.micro_batches(3):
                    with torch.no_grad():
                        weight = loop.model.module[0].weight.sum()
                    (squares(second.model(x)) * weight).backward()
                second.optimizer.step()
                second.optimizer.zero_grad()
    blame = "micro-batch 1, by ranks 0, 1 and 2: rank 1 computed otherwise: 'first.0.weight'"
    assert blame in str(error.value)
    assert error.value.ranks == (1,)
    assert "second" not in str(error.value)


@world(3, by="process")
def test_what_comes_over_one_rank_once_is_said_of_it(mesh: Mesh, tmp_path: Path) -> None:
    placed, calls = run_of(tmp_path / "run", "replicas", checks={"replay_every": 1}), []

    def slips(value: Tensor) -> Tensor:
        calls.append(value)
        return value * (2 if mesh.rank == 1 and len(calls) == 1 else 1)

    with differing(placed.run) as error:
        placed.train(2, loss=of(placed, slips))
    told = str(error.value)
    assert "6 times, by ranks 0, 1 and 2: 2 different gradients of '0.weight'" in told
    assert told.endswith("rank 1's arithmetic or memory is faulty: only its gradients changed")


@world(2, by="process")
def test_of_a_rank_that_has_data_of_its_own_that_rank_is_told(mesh: Mesh, tmp_path: Path) -> None:
    run = instep.Run(tmp_path / "run", checks={"replay_every": 1})
    loop = Loop(run)
    clock = by_the_clock()
    with differing(run) as error:
        for step in run.steps(1, model=loop.model, optimizer=loop.optimizer):
            with step:
                y = loop.model(torch.randn(3, 4))
                (clock(y) if run.rank else squares(y)).backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    told = str(error.value)
    assert "\n  rank 1's own data, computed twice, by rank 1: 2 different gradients of '0.weight'" in told
    assert "rank 0's own data" not in told
