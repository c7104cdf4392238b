"""The simulator is held to published figures; `benchmarks/pipeline` has all of them, side by side."""

from __future__ import annotations

import pytest

from benchmarks.pipeline.published import (
    GPIPE_MICRO_BATCHES,
    GPIPE_SPEED_UPS,
    GPIPE_WITHIN,
    ROWS,
    WITHIN,
    Measured,
)
from instep.pipeline.closed_forms import cost_s
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import StageTimes, bubble_rate, makespan_s, simulate

FEW = [row for row in ROWS if row.micro_batches == 3 * row.ranks and row.ranks < 32]  # the others take long


def work_of(row: Measured) -> tuple[float, float, float]:
    return row.forward_ms / 1e3, row.input_gradient_ms / 1e3, row.weight_gradient_ms / 1e3


def simulated(row: Measured, name: str) -> float:
    v = row.chunks if name == "interleaved" else 1
    times = StageTimes(*(time_s / v for time_s in work_of(row)), row.message_ms / 1e3)
    return bubble_rate(simulate(generate(name, row.ranks, row.micro_batches, v), times))


def by_formula(row: Measured, name: str) -> float:
    v = row.chunks if name == "interleaved" else 1
    work = dict(zip(("forward_s", "input_gradient_s", "weight_gradient_s"), work_of(row), strict=True))
    took_s = cost_s(name, row.ranks, row.micro_batches, v, **work, message_s=row.message_ms / 1e3)
    return 1 - row.micro_batches * sum(work.values()) / took_s


def test_all_rows_are_there():
    assert [row.ranks for row in ROWS] == [8] * 6 + [16] * 3 + [32] * 3
    assert all(set(row.rates) == set(WITHIN) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}-{row.micro_batches}")
def test_1f1b_waits_as_published_to_the_last_digit(row):
    assert simulated(row, "1f1b") == pytest.approx(row.rates["1f1b"], abs=WITHIN["1f1b"])


@pytest.mark.parametrize("name", ["interleaved", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("row", FEW, ids=lambda row: f"{row.model}-{row.micro_batches}")
def test_the_others_wait_as_published_to_half_a_point(row, name):
    assert simulated(row, name) == pytest.approx(row.rates[name], abs=WITHIN[name])


@pytest.mark.parametrize("name", WITHIN)
def test_formulas_give_the_published_rates(name):
    for row in ROWS:
        assert by_formula(row, name) == pytest.approx(row.rates[name], abs=WITHIN[name])


def test_another_order_does_not_give_them():
    """A control: the same times by another schedule."""
    row = FEW[0]
    assert abs(simulated(row, "gpipe") - row.rates["1f1b"]) > 100 * WITHIN["1f1b"]
    assert abs(simulated(row, "zb-h1") - row.rates["zb-h2"]) > 5 * WITHIN["zb-h2"]


def test_messages_that_take_the_senders_time_do_not_give_them():
    """Another control: all stages but the ends compute a message longer, and nothing is under way."""
    for row in FEW:
        p, (forward_s, input_gradient_s, weight_gradient_s) = row.ranks, work_of(row)
        message_s = row.message_ms / 1e3
        longer = StageTimes(
            [forward_s + message_s] * (p - 1) + [forward_s],
            [input_gradient_s] + [input_gradient_s + message_s] * (p - 1),
            weight_gradient_s,
        )
        took_s = makespan_s(simulate(generate("1f1b", p, row.micro_batches), longer))
        rate = 1 - row.micro_batches * sum(work_of(row)) / took_s
        assert rate - row.rates["1f1b"] > 5 * WITHIN["1f1b"]


@pytest.mark.parametrize("ranks", GPIPE_SPEED_UPS)
def test_gpipe_is_as_much_faster_as_published(ranks):
    times = StageTimes(1 / ranks, 1 / ranks, 1 / ranks)
    found = (
        3 * GPIPE_MICRO_BATCHES / makespan_s(simulate(generate("gpipe", ranks, GPIPE_MICRO_BATCHES), times))
    )
    assert found == pytest.approx(GPIPE_SPEED_UPS[ranks], rel=GPIPE_WITHIN)
