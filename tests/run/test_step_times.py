"""What the ranks of a training tell each other of where their time goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.events import GLOBAL_LOSS, GRADIENT_SYNC, Event, Timeline
from instep.mesh.mesh import Mesh
from instep.timeline.breakdown import parts
from instep.timeline.bubbles import bubbles
from instep.timeline.straggler import OwnTimes
from tests.run.text_training import STEPS, tiny, trained
from tests.world import world


def of_step(mesh: Mesh, step: int) -> list[Event]:
    return Timeline(mesh.recorder.events).of(mesh.recorder.rank, step)


@world(2)
def test_in_training_every_rank_hears_of_every_other_one_step_later(mesh: Mesh, data: Path) -> None:
    training = trained(tiny(data), mesh).training
    heard = [OwnTimes.from_list([*figures]) for figures in training.timing._heard]
    assert [(own.step, own.rank) for own in heard] == [(s, r) for s in range(STEPS - 1) for r in range(2)]
    mine = [own for own in heard if own.rank == mesh.rank]
    for step, own in enumerate(mine):
        found = parts(of_step(mesh, step))
        assert found is not None
        whole = OwnTimes.of(found)  # whose end is read some moments after
        assert (own.compute, own.data, own.micro_batches) == (
            whole.compute,
            whole.data,
            whole.micro_batches,
        )
        assert own.wall <= whole.wall and whole.wall - own.wall == pytest.approx(whole.host - own.host)
        assert own.wall >= own.compute + own.data + own.host > 0
        assert own.micro_batches == training.config.batch.num_micro_batches // 2


@world(2)
def test_what_a_step_says_it_waited_is_what_its_bubbles_are(mesh: Mesh, data: Path) -> None:
    training = trained(tiny(data), mesh).training
    training.timing.end()
    made = training.last
    assert made is not None
    found = bubbles(of_step(mesh, STEPS - 1))
    told = sum(bubble.duration_s for bubble in found) * 1e3
    assert made.exposed_ms + made.waiting_ms == pytest.approx(told, rel=1e-6)
    assert {bubble.cause for bubble in found} <= {GRADIENT_SYNC, GLOBAL_LOSS}
    assert training.timing.breakdown().steps == STEPS


@world(2)
def test_a_run_that_takes_no_step_has_a_breakdown_that_can_be_told(mesh: Mesh, data: Path) -> None:
    training = trained(tiny(data), mesh, steps=0).training
    training.timing.end()
    assert training.timing.breakdown().steps == 0
