"""Which steps are skipped, and that the answer goes on unchanged in another process."""

from __future__ import annotations

import json
import math
import random

import pytest

from instep.errors import CheckpointRejected
from instep.run.health import ENOUGH, WINDOW, Health
from instep.run.settings import ChecksConfig


def guarded(norms: list[float], spike: float = 2.0) -> Health:
    """A guard that has accepted ``norms``."""
    health = Health(ChecksConfig(spike=spike))
    assert not any(map(health.judge, norms))
    return health


@pytest.mark.parametrize("max_skipped", [0, 1, 5])
def test_one_more_than_the_allowed_number_in_a_row_is_too_many(max_skipped):
    health = Health(ChecksConfig(max_skipped=max_skipped))
    for count in range(1, 4):  # an accepted step ends the row, but not the count
        for _ in range(max_skipped):
            assert health.judge(math.nan) == "gradient norm is nan"
            assert not health.exhausted
        assert health.skipped == count * max_skipped
        assert [health.judge(norm) for norm in (0.0, 1.0, 1e308)] == [None] * 3
    for norm in [math.inf] * (max_skipped + 1):
        assert health.judge(norm) == "gradient norm is inf" and health.in_a_row
    assert health.exhausted


def test_steps_on_the_list_are_skipped_and_not_counted():
    health = Health(ChecksConfig(skip_steps=(3, 17)))
    reasons = {step: health.planned(step) for step in range(20)}
    assert {step for step, reason in reasons.items() if reason} == {3, 17}
    assert reasons[17] == "step 17 is in skip_steps"
    assert (health.skipped, health.in_a_row) == (0, 0)


# Median 8.5. Distances from it 0.5, 0.5, 1.5, 1.5 ... 7.5, 7.5: their median is 4.
ONE_TO_SIXTEEN = [float(norm) for norm in range(1, 17)]


def test_a_spike_is_above_the_median_by_so_many_median_deviations():
    assert guarded(ONE_TO_SIXTEEN).judge(8.5 + 2 * 4.0) is None
    assert guarded(ONE_TO_SIXTEEN).judge(16.6) == "spike: norm 16.6, median 8.5 + 2 x 4"


def test_too_few_norms_make_no_spike():
    assert len(ONE_TO_SIXTEEN) == ENOUGH
    assert guarded(ONE_TO_SIXTEEN[1:]).judge(1e9) is None
    assert guarded(ONE_TO_SIXTEEN).judge(1e9) is not None
    assert guarded(ONE_TO_SIXTEEN * 4, spike=0.0).judge(1e9) is None  # no guard


def test_what_was_skipped_does_not_move_the_measure():
    health = guarded(ONE_TO_SIXTEEN)
    for norm in [1e9, math.nan] * 20:
        assert health.judge(norm)
    assert health.judge(16.6) == "spike: norm 16.6, median 8.5 + 2 x 4"
    assert health.judge(16.5) is None


def test_norms_that_hardly_change_make_no_hair_trigger():
    health = guarded([3.0] * ENOUGH)
    assert health.judge(3.05) is None
    assert health.judge(3.07) == "spike: norm 3.07, median 3 + 2 x 0.03"


def test_norms_that_fall_and_scatter_as_in_training_never_alarm():
    draw = random.Random(0)
    health = Health(ChecksConfig(spike=20.0))
    for step in range(2000):
        assert health.judge((0.3 + 2.0 * math.exp(-step / 200)) * draw.lognormvariate(0.0, 0.2)) is None


@pytest.mark.parametrize("cut", [0, 10, 40, 41, 120])
def test_a_run_that_goes_on_elsewhere_decides_as_one_that_was_never_interrupted(cut):
    draw = random.Random(1)
    norms = [draw.choice([1.0, 1.1, 0.9, 1.3, 7.0, math.nan]) for _ in range(200)]
    checks = ChecksConfig(spike=10.0, max_skipped=3)
    whole, before, after = (Health(checks) for _ in range(3))
    expected = [(whole.judge(norm), whole.exhausted) for norm in norms]
    reasons = [(before.judge(norm), before.exhausted) for norm in norms[:cut]]
    after.restore(json.loads(json.dumps(before.state())))
    reasons += [(after.judge(norm), after.exhausted) for norm in norms[cut:]]
    assert reasons == expected
    assert {reason[:5] for reason, _ in reasons if reason} == {"spike", "gradi"}
    assert after.state() == whole.state()


GOOD = {"skipped": 3, "in_a_row": 1, "norms": [1.0]}


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        "norms",
        {},
        {**GOOD, "more": 1},
        {**GOOD, "in_a_row": 4},
        {**GOOD, "in_a_row": -1},
        {**GOOD, "skipped": True},
        {**GOOD, "skipped": "3"},
        {**GOOD, "norms": {}},
        {**GOOD, "norms": ["1.0"]},
        {**GOOD, "norms": [1]},
        {**GOOD, "norms": [-1.0]},
        {**GOOD, "norms": [math.nan]},
        {**GOOD, "norms": [math.inf]},
        {**GOOD, "norms": [1.0] * (WINDOW + 1)},
    ],
)
def test_a_state_that_was_tampered_with_is_rejected_and_changes_nothing(state):
    health = Health(ChecksConfig(spike=1.0))
    health.restore(GOOD)
    with pytest.raises(CheckpointRejected, match=r"^the state of the step checks: expected "):
        health.restore(state)
    assert health.state() == GOOD
