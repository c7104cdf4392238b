"""One step of a script: what a rank has of the state when others are lost in it, and its phases."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.checkpoint.state import TrainingState
from instep.events import GLOBAL_LOSS
from instep.mesh.mesh import Mesh
from instep.run.rank_state import Holds
from instep.run.step import SpanPhases, StepWork, share
from tests.run.loops import Loop, squares
from tests.world import world


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """As of a supervised process, which survives the loss of another."""
    monkeypatch.setattr("instep.run.loop.StepWork", lambda training, injector, recovers: StepWork(training))
    run = instep.Run(tmp_path / "run")
    yield Loop(run)
    run.close()


def held(loop: Loop) -> Holds:
    """What this rank could give to others if a rank were lost now."""
    work = loop.run._steps.work
    state = work.training.rank_state
    before = state.holds
    work.recover()
    found, state.holds = state.holds, before
    return found


def test_before_the_update_a_rank_has_all_and_after_it_nothing(loop: Loop) -> None:
    found = []

    def loss(y: Tensor) -> Tensor:
        found.append(held(loop))
        return squares(y)

    loop.train(2, loss=loss, after=lambda step: found.append(held(loop)))
    assert found == [Holds.EVERYTHING, Holds.EVERYTHING, Holds.NOTHING] * 2


def test_a_tensor_that_the_script_writes_to_counts(loop: Loop) -> None:
    found = []

    def write(step: instep.Step) -> None:
        with torch.no_grad():
            loop.model.module[0].weight.mul_(1.0)
        found.append(held(loop))

    loop.train(1, before=write)
    assert found == [Holds.NOTHING]


def test_running_statistics_of_a_step_count(loop: Loop) -> None:
    """They are written to before the update: a rank that is lost then leaves none that has the state."""
    found = []
    model = instep.DataParallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), loop.run.mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in loop.run.steps(1, model=model, sgd=sgd):
        with step:
            for _ in model.micro_batches(2):
                model(torch.randn(3, 4)).square().mean().backward()
                found.append(held(loop))
            found.append(held(loop))
            sgd.step()
            sgd.zero_grad()
    assert found == [Holds.EVERYTHING, Holds.EVERYTHING, Holds.NOTHING]


class Counter:
    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_an_object_that_has_changed_counts(loop: Loop) -> None:
    found, counter = [], Counter()

    def loss(y: Tensor) -> Tensor:
        found.append(held(loop))
        counter.count += 1
        return squares(y)

    loop.train(2, loss=loss, counter=counter)
    assert found == [Holds.EVERYTHING, Holds.NOTHING] * 2


def test_one_of_two_updates_counts(loop: Loop) -> None:
    """In a GAN: a rank is lost between them. A fused optimizer writes past torch's count of writes."""
    found = []
    critic = instep.DataParallel(nn.Linear(2, 1), loop.run.mesh)
    c_adam = torch.optim.Adam(critic.parameters(), lr=0.05, fused=True)
    models = {"model": loop.model, "critic": critic}
    for step in loop.run.steps(1, **models, optimizer=loop.optimizer, c_adam=c_adam):
        with step:
            critic(loop.model(torch.randn(3, 4))).square().mean().backward()
            for optimizer in (c_adam, loop.optimizer):
                found.append(held(loop))
                optimizer.step()
                optimizer.zero_grad()
    assert found == [Holds.EVERYTHING, Holds.NOTHING]


def test_phases_are_those_of_the_steps_own_thread() -> None:
    told: list[str] = []
    phases = SpanPhases(told.append)
    phases.watch("forward", True)  # between two steps
    phases.begin()
    phases.watch("backward", True)
    other = threading.Thread(target=phases.watch, args=("update", True))
    other.start()
    other.join()
    phases.watch("a span of another kind", True)
    phases.watch("backward", False)
    phases.watch("update", True)
    phases.end()
    phases.watch("update", False)
    assert told == ["script", "backward", "script", "update"]


def test_phases_of_a_backward_are_told_from_its_thread() -> None:
    """Autograd executes that of a GPU's tensors in a thread of its own, and told nobody of it."""
    told: list[str] = []
    phases = SpanPhases(told.append)
    phases.begin()
    x = torch.ones((), requires_grad=True)

    def reached(gradient: torch.Tensor) -> None:
        phases.watch("backward", True)
        phases.watch("backward", False)

    y = x * 2
    y.register_hook(reached)
    engine = threading.Thread(target=y.backward)
    engine.start()
    engine.join()
    assert told == ["script", "backward", "script"]


def test_in_another_phase_waits_alone_are_told() -> None:
    """A forward of an evaluation may take longer than any of training, and is not stuck."""
    told: list[str] = []
    phases = SpanPhases(told.append)
    phases.begin("evaluate")
    for name in ("forward", GLOBAL_LOSS):
        phases.watch(name, True)
        phases.watch(name, False)
    phases.end()
    assert told == ["evaluate", "exchange", "evaluate"]


def test_who_waits_in_a_mean_or_an_evaluation_says_so(loop: Loop) -> None:
    """Else it would be taken for stuck beside the rank that is."""
    told: list[list[str]] = []

    def mean(step: object = None) -> float:
        told.append([])
        loop.run._steps.work.phases._enter = told[-1].append
        found = instep.mean(1.0)
        loop.run._steps.work.phases._enter = lambda phase: None
        return found

    loop.run.evaluate_with(mean)
    loop.train(1, before=mean)
    assert told == [["exchange", "evaluate"], ["exchange", "script"], ["exchange", "evaluate"]]


@pytest.mark.parametrize("drops", [False, True])
def test_gradients_that_are_left_for_another_step_are_refused(drops: bool, loop: Loop) -> None:
    """A rank that takes another's place has none of them."""
    made = []

    def accumulate() -> None:
        for step in loop.run.steps(4, model=loop.model, optimizer=loop.optimizer):
            with step:
                loop.model(torch.randn(3, 4)).square().mean().backward()
                if step % 2:
                    loop.optimizer.step()
                if step % 2 or drops:
                    loop.optimizer.zero_grad()
            made.append(int(step))

    if drops:
        accumulate()
    else:
        with pytest.raises(
            ValueError, match=r"step 0 has left the gradient of '0\.weight', and no optimizer"
        ):
            accumulate()
    assert made == [0, 1, 2, 3] * drops


def loader(num_samples: int = 5) -> instep.Loader:
    return instep.Loader([torch.ones(4) * i for i in range(num_samples)], batch_size=4, micro_batch_size=2)


def read(loop: Loop, source: instep.Loader, **registered: object) -> None:
    for step in loop.run.steps(2, model=loop.model, optimizer=loop.optimizer, **registered):
        with step:
            for micro_batch in loop.model.micro_batches(source):
                loop.model(micro_batch.data).square().mean().backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def test_a_loader_that_is_not_registered_is_noticed(loop: Loop) -> None:
    data = loader()
    with pytest.raises(ValueError, match=r"step 0 has read from an instep\.Loader that is not registered"):
        read(loop, data)


class Holder:
    """An object whose state is another's."""

    def __init__(self, data: instep.Loader) -> None:
        self.state_dict, self.load_state_dict, self.data = data.state_dict, data.load_state_dict, data


@pytest.mark.parametrize("held", [False, True])
def test_a_loader_that_is_carried_is_not(held: bool, loop: Loop) -> None:
    data, idle = loader(), loader()
    read(loop, data, data=Holder(data) if held else data)
    assert (data.position, idle.position) == (8, 0)


def test_where_no_process_survives_no_state_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take time in every step."""
    mark = mock.Mock()
    monkeypatch.setattr(TrainingState, "mark", mark)
    run = instep.Run(tmp_path / "run")
    assert Loop(run).train(2) == [0, 1]
    assert not mark.called
    run.close()


@world(3)
def test_wishes_are_added_and_figures_reach_every_rank_unrounded(mesh: Mesh) -> None:
    figures = [[math.pi, -0.1], [1e300, 5e-324], [1 / 3, 0.0]]
    told = share({"votes": 1.0 + mesh.rank, "norm": 0.5 * mesh.rank}, figures[mesh.rank], mesh.world.group)
    assert told == ({"norm": 1.5, "votes": 6.0}, figures)
    assert share({}, [], mesh.world.group) == ({}, [[], [], []])
