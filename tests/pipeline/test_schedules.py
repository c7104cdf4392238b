"""The generated schedules: as drawn in golden/, legal, within their memory, and as long as by formula."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipeline.published import peak_activations as peak_by_formula
from instep.pipeline.actions import Schedule
from instep.pipeline.check import check, peak_activations
from instep.pipeline.closed_forms import cost_s
from instep.pipeline.schedules import NAMES, generate, own
from instep.pipeline.simulate import StageTimes, bubble_rate, makespan_s, simulate
from tests.pipeline.drawn import schedules

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.txt"))


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_a_schedule_is_the_one_that_is_drawn(file):
    """golden/NAME-RANKSxMICROBATCHES.txt, with xCHUNKS where there is a choice."""
    name, _, counts = file.stem.rpartition("-")
    made = generate(name, *map(int, counts.split("x")))
    assert str(made) == file.read_text()
    assert Schedule.parse(file.read_text(), name) == made


def test_every_schedule_is_drawn():
    assert {file.stem.rpartition("-")[0] for file in GOLDEN} == set(NAMES)


@settings(max_examples=120)
@given(schedules())
def test_every_schedule_is_legal_whole_and_within_its_memory(schedule):
    p, m, v = schedule.num_ranks, schedule.num_micro_batches, schedule.num_stages // schedule.num_ranks
    check(schedule)
    most = [peak_by_formula(schedule.name, p, m, v, rank) for rank in range(p)]
    assert all(peak <= by_formula for peak, by_formula in zip(peak_activations(schedule), most, strict=True))
    per_stage = 3 if "I" in {action.kind for action in schedule.rows[0]} else 2
    assert sum(map(len, schedule.rows)) == per_stage * m * schedule.num_stages
    assert max(schedule.stage_ranks) == p - 1


@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 4))
def test_peaks_are_what_the_papers_say(p, m, v):
    """In micro-batches of a whole rank."""

    def peaks(name, chunks=None):
        schedule = generate(name, p, m, chunks)
        return [peak / (schedule.num_stages / p) for peak in peak_activations(schedule)]

    assert peaks("naive") == [1] * p
    assert peaks("gpipe") == [m] * p
    assert peaks("1f1b") == [min(m, p - rank) for rank in range(p)]
    assert peaks("zb-h1") == [min(m, p)] * p
    assert peaks("zb-h2") == [min(m, 2 * p - 1)] * p
    assert max(peaks("zb-v")) <= min(m, p)
    if m % p == 0:
        assert max(peaks("interleaved", v)) == pytest.approx(min(m, p * (1 + (p - 1) / (p * v))))


UNEVEN = (1.0, 1.25, 0.5)  # F, I, W


@given(schedules(), st.sampled_from([(1.0, 1.0, 1.0), UNEVEN]))
def test_without_messages_a_schedule_takes_what_its_formula_says(schedule, times):
    name, p, m = schedule.name, schedule.num_ranks, schedule.num_micro_batches
    v = schedule.num_stages // p
    fewest = {"interleaved": p, "zb-h1": p, "zb-h2": 2 * p - 1, "zb-v": 2 * p - 1}.get(name, 1)
    if m < fewest or (name == "zb-v" and times == UNEVEN):
        return
    timeline = simulate(schedule, StageTimes(*(time / v for time in times)))
    expected = cost_s(
        name, p, m, v, forward_s=times[0], input_gradient_s=times[1], weight_gradient_s=times[2]
    )
    assert m * sum(times) / (1 - bubble_rate(timeline)) == pytest.approx(expected, rel=1e-6)


@given(st.sampled_from(sorted(NAMES)), st.integers(2, 8), st.integers(2, 4), st.integers(1, 4))
def test_messages_cost_what_their_formula_says(name, p, groups, v):
    m, v = p * groups, {"interleaved": v, "zb-v": 2}.get(name, 1)
    timeline = simulate(generate(name, p, m, v), StageTimes(1 / v, 1 / v, 1 / v, 0.002))
    expected = cost_s(name, p, m, v, forward_s=1, input_gradient_s=1, weight_gradient_s=1, message_s=0.002)
    assert 3 * m / (1 - bubble_rate(timeline)) == pytest.approx(expected, rel=1e-6)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(2, 4))
def test_interleaved_waits_no_longer_where_groups_are_uneven(p, more, v):
    """Whether p divides m or not, the bubble is a v-th of 1f1b's."""
    m = p + more
    timeline = simulate(generate("interleaved", p, m, v), StageTimes(1 / v, 1 / v, 1 / v))
    assert makespan_s(timeline) == pytest.approx(3 * (m + (p - 1) / v))


def test_what_is_no_name_is_the_text_of_a_schedule():
    assert own("zb-v") is None
    made = own("0F0 0B0")
    assert made is not None and made.rows == generate("naive", 1, 1).rows
    with pytest.raises(ValueError, match=r"expected a schedule of naive, .*zb-v, or the text.*got '2f2b'"):
        own("2f2b")
    with pytest.raises(ValueError, match=r"'my.txt'.* Pass the text of a file, not its path"):
        own("my.txt")
    with pytest.raises(
        ValueError, match=r"^the schedule of your own: line 2: expected a stage, .*got '1X0'$"
    ):
        own("0F0 0B0\n1F0 1X0")
    with pytest.raises(ValueError, match=r"there is no 0B0 or 0I0: add it to rank 0"):
        own("0F0")
    with pytest.raises(ValueError, match=r"says itself which stages a rank has, got chunks=2"):
        own("0F0 0B0", chunks=2)


def test_unknown_names_and_counts_are_refused():
    with pytest.raises(ValueError, match=r"expected a schedule of naive, gpipe, 1f1b, .*, got 'pipedream'"):
        generate("pipedream", 2, 2)
    with pytest.raises(ValueError, match="expected at least one of each, got 2 ranks, 0 micro-batches"):
        generate("1f1b", 2, 0)
    with pytest.raises(ValueError, match="1f1b has 1 stages per rank, got chunks=2: leave it out, or take"):
        generate("1f1b", 2, 2, 2)
    with pytest.raises(ValueError, match="zb-v has 2 stages per rank, got chunks=1"):
        generate("zb-v", 2, 2, 1)
    with pytest.raises(ValueError, match=r"expected a schedule of .* got 'pipedream'"):
        cost_s("pipedream", 2, 2, forward_s=1, input_gradient_s=1, weight_gradient_s=1)


def test_every_name_has_its_formulas():
    for name in NAMES:
        assert peak_by_formula(name, 1, 1) >= 1
        assert cost_s(name, 1, 1, forward_s=1, input_gradient_s=1, weight_gradient_s=1) == 3
