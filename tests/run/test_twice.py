"""Steps that are made twice: what they depend on beside their state is found; a right loop stays as it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import ReplicasDiffer
from instep.mesh.mesh import Mesh
from tests.run.loops import Loop, Loss, ledger, metrics, squares, summary
from tests.world import world


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    """Makes a loop whose steps are made twice."""
    runs: list[instep.Run] = []

    def make(name: str = "run", *, check_every: int = 1) -> Loop:
        for run in runs:
            run.close()
        runs.append(instep.Run(tmp_path / name, check_every=check_every))
        return Loop(runs[-1])

    yield make
    for run in runs:
        run.close()


def by_the_clock() -> Loss:
    return lambda y: squares(y) * time.perf_counter()


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
    assert "micro-batch 0, by rank 0 and then rank 0: the gradient of '0.weight'" in str(error.value)
    assert error.value.parameters == ("0.weight",)
    assert error.value.ranks == (0,)


def test_an_update_that_depends_on_something_else_is_found(begin: Callable[..., Loop]) -> None:
    """A schedule of one's own that was not registered; the gradients are those of a right loop."""
    loop, rates = begin(check_every=2), [0.1, 0.2]

    def by_another_rate(step: instep.Step) -> None:
        loop.optimizer.param_groups[0]["lr"] = rates.pop()

    with pytest.raises(ReplicasDiffer, match=r"twice, .*:\n  rank 0: '0\.weight' after the step"):
        loop.train(before=by_another_rate)


class Average:
    """Of a model's weights, as it goes on."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.shadow = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.num_updates = 0

    def update(self) -> None:
        self.num_updates += 1
        for name, p in self.module.named_parameters():
            self.shadow[name].lerp_(p.detach(), 1 / (1 + self.num_updates))

    def state_dict(self) -> dict[str, object]:
        return {"shadow": self.shadow, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.shadow, self.num_updates = state["shadow"], state["num_updates"]


def test_a_right_loop_is_what_it_is_without_the_check(begin: Callable[..., Loop], tmp_path: Path) -> None:
    made = {}
    for name, every in (("once", 0), ("twice", 1), ("sometimes", 2)):
        loop = begin(name, check_every=every)
        plan = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 4)
        average = Average(loop.model.module)

        def after(step: instep.Step, plan=plan, average=average) -> None:
            plan.step()
            average.update()

        made[name] = loop.train(4, after=after, plan=plan, average=average)
    assert made == {"once": [0, 1, 2, 3], "twice": [0, 0, 1, 1, 2, 2, 3, 3], "sometimes": [0, 0, 1, 2, 2, 3]}
    for name in ("twice", "sometimes"):
        assert summary(tmp_path / name)["state_sha256"] == summary(tmp_path / "once")["state_sha256"]
        assert ledger(tmp_path / name) == ledger(tmp_path / "once")
        assert [x["step"] for x in metrics(tmp_path / name)] == [1, 2, 3, 4]


def test_a_skipped_step_is_made_twice_too(begin: Callable[..., Loop], tmp_path: Path) -> None:
    loop = begin()

    def poison(step: instep.Step) -> None:
        if step == 1:
            loop.model.module[0].weight.grad[0, 0] = torch.inf

    assert loop.train(before=poison) == [0, 0, 1, 1, 2, 2]
    assert summary(tmp_path / "run")["skipped_steps"] == 1


@world(2, by="process")
def test_other_ranks_make_the_step_the_second_time(mesh: Mesh, tmp_path: Path) -> None:
    run = instep.Run(tmp_path / "run", check_every=1)
    loop = Loop(run)
    try:
        with pytest.raises(ReplicasDiffer) as error:
            loop.train(loss=lambda y: squares(y) * (1 + run.rank))
        told = str(error.value)
        assert "micro-batch 0, by rank 0 and then rank 1: the gradient of '0.weight'" in told
        assert "micro-batch 1, by rank 1 and then rank 0: the gradient of '0.weight'" in told
    finally:
        run.close()


@world(2, by="process")
def test_on_two_ranks_a_right_loop_is_what_it_is_on_one(mesh: Mesh, tmp_path: Path) -> None:
    run = instep.Run(tmp_path / "run", check_every=1)
    assert Loop(run).train() == [0, 0, 1, 1, 2, 2]
    run.close()
    mesh.world.group.all_gather_bytes(b"", "the end of the run")
