"""What the trace files tell of a run: the breakdown, the slow rank, the buckets, the advice; and as lines."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instep.timeline.advice import Advice
from instep.timeline.analysis import SAMPLED, analyse, slowness, summary_lines
from instep.timeline.breakdown import PARTS, RankBreakdown
from instep.timeline.run_setting import setting_of
from instep.timeline.straggler import SlowRank
from instep.timeline.trace_files import read_traces
from tests.timeline.made_up_run import DATA, FLIGHT, HOST, UPDATE, MadeUpRun, setting
from tests.timeline.test_trace_files import json_values


def slowed(rank):
    return 1.5 if rank == 2 else 1.0


def test_a_slow_rank_is_in_the_breakdown_of_the_others_and_first_in_the_advice(tmp_path):
    run = MadeUpRun(tmp_path, 3, slower=slowed)
    run.steps(0, 12)
    found = analyse(read_traces(tmp_path))
    late = run.compute_ms / 2
    step = 2 * DATA + run.compute_ms + late + 2 * FLIGHT + UPDATE + HOST
    for row in found.breakdowns:
        waits = 0 if row.rank == 2 else late
        told = {name: seconds * 1e3 for name, seconds in row.parts.items()}
        assert row.steps == 10 and row.wall_s * 1e3 == pytest.approx(step)
        assert told["waiting for a slower rank"] == pytest.approx(waits)
        assert told["compute"] == pytest.approx(run.compute_ms + late - waits)
        assert told["exposed communication"] == pytest.approx(2 * FLIGHT)
    assert (found.slow.rank, found.slow.phase, found.slow.since) == (2, "its own compute", 0)
    assert found.slow.excess_s * 1e3 == pytest.approx(late)
    assert found.advice[0].cause == "slow rank" and found.advice[0].gain_ms == pytest.approx(late)
    assert [row.bucket for row in found.buckets] == [0, 1] and found.buckets[0].slowest == 2
    assert found.buckets[0].skew_ms == pytest.approx(late)


def test_a_healthy_run_has_no_slow_rank(tmp_path):
    MadeUpRun(tmp_path, 3).steps(0, 12)
    assert analyse(read_traces(tmp_path)).slow is None


def test_of_many_steps_what_needs_all_ranks_at_once_looks_at_some_up_to_the_last(tmp_path):
    run = MadeUpRun(tmp_path, 2, micro_batches=1, buckets=1)
    run.steps(0, 150)
    found = analyse(read_traces(tmp_path))
    assert found.buckets[0].steps == SAMPLED and [row.steps for row in found.breakdowns] == [148, 148]
    run.buckets = 2
    run.step(150)
    assert analyse(read_traces(tmp_path)).buckets[1].steps == 1


def test_only_the_steps_that_are_asked_for_are_looked_at(tmp_path):
    MadeUpRun(tmp_path, 2).steps(0, 12)
    found = analyse(read_traces(tmp_path), [7, 8])
    assert [[row.step for row in rows] for rows in found.rows.values()] == [[7, 8], [7, 8]]


def test_a_rank_that_the_run_goes_on_without_is_in_the_rows_and_not_in_the_breakdown(tmp_path):
    run = MadeUpRun(tmp_path, 3, slower=slowed)
    run.steps(0, 8)
    MadeUpRun(tmp_path, 2, begin_ms=run.now / 1e6 + 500).steps(8, 30)
    found = analyse(read_traces(tmp_path, 2))
    assert {rank: len(rows) for rank, rows in found.rows.items()} == {0: 30, 1: 30, 2: 8}
    assert [row.rank for row in found.breakdowns] == [0, 1] and found.slow is None


def test_what_the_ranks_have_told_is_taken_and_a_rank_without_a_step_left_out(tmp_path):
    MadeUpRun(tmp_path, 2).steps(0, 8)
    told = analyse(read_traces(tmp_path)).breakdowns
    far = replace(told[0], rank=5, median_s=1.0)
    none = RankBreakdown(6, 0, 0.0, 0.0, {}, {}, {}, 0.0, 0.0)
    found = analyse(read_traces(tmp_path), breakdowns=[*told, far, none])
    assert found.breakdowns == [*told, far] and found.slow is None
    assert analyse(read_traces(tmp_path / "nothing"), breakdowns=[none]).advice == []


def test_without_files_there_is_nothing_and_no_error(tmp_path):
    found = analyse(read_traces(tmp_path))
    assert found.figures() == {"breakdown": [], "slow_rank": None, "advice": []} and found.buckets == []


def test_without_a_setting_there_is_no_advice(tmp_path):
    MadeUpRun(tmp_path, 3, slower=slowed, head={"setting": None}).steps(0, 12)
    found = analyse(read_traces(tmp_path))
    assert found.advice == [] and found.slow.rank == 2


def test_the_setting_of_a_newer_program_is_read_and_one_of_an_older_one_is_filled_up():
    whole = asdict(setting())
    assert setting_of({**whole, "of tomorrow": 1}) == setting()
    assert setting_of({k: v for k, v in whole.items() if k != "micro_size"}) == replace(
        setting(), micro_size=0
    )
    assert setting_of({**whole, "bucket_mb": 4}) == replace(setting(), bucket_mb=4)
    assert setting_of({k: v for k, v in whole.items() if k != "strategy"}) is None


@pytest.mark.parametrize("found", [None, [], "x", 3, {}, {"strategy": "flat"}])
def test_what_is_no_setting_is_none(found):
    assert setting_of(found) is None


NAMES = [*asdict(setting()), "more"]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.dictionaries(st.sampled_from(NAMES), json_values | st.integers(0, 100), max_size=3),
    head=st.dictionaries(st.sampled_from(["optimizer", "num_parameters"]), json_values),
)
def test_whatever_a_setting_holds_advice_is_given_or_not_but_finite(tmp_path, fields, head):
    MadeUpRun(tmp_path, 2, slower=lambda rank: 1.0 + rank, head=head).steps(0, 7)
    traces = read_traces(tmp_path)
    for trace in traces.traces.values():
        trace.head["setting"] = {**asdict(setting()), **fields}
    for advice in analyse(traces).advice:
        assert 0 < advice.gain_ms < 1e9 and advice.gain_share > 0 and advice.text


SLOW = SlowRank(rank=2, phase="its data", since=40, excess_s=0.0123, share=0.3, steps=9, low_s=0.01)


def row(rank: int = 0, hidden_s: float = 0.0, **parts: float) -> RankBreakdown:
    """``parts`` by the first letters of their names, in seconds."""
    told = {name: parts.get(name.split()[0], 0.0) for name in PARTS}
    wall = sum(told.values())
    return RankBreakdown(rank, 9, wall, wall, told, {}, {}, hidden_s, 0.0)


def test_the_shares_are_means_over_ranks_and_add_up():
    ((label, text),) = summary_lines([row(compute=0.06, exposed=0.04), row(1, compute=0.1)], None, [])
    assert label == "time"
    assert (
        text
        == "100 ms a step on average over 9 = compute 80 ms (80.0%) + exposed communication 20 ms (20.0%)"
    )


def test_a_part_of_next_to_nothing_is_not_said():
    ((_, text),) = summary_lines([row(compute=0.9996, update=0.0004)], None, [])
    assert "update" not in text


def test_hidden_communication_is_said_where_it_is_worth_a_line():
    told = [row(rank, compute=0.1, exposed=0.01, hidden_s=0.02 + 0.02 * rank) for rank in range(2)]
    assert list(summary_lines(told, None, []))[1:] == [
        ("", "75 % of the communication (30 ms) ran while ranks computed")
    ]
    assert len(list(summary_lines([row(compute=0.1, hidden_s=0.0002)], None, []))) == 1


@pytest.mark.parametrize("slowdown", [-0.49, 0.65, 4.14])
def test_no_line_has_a_negative_or_absurd_percentage(slowdown):
    told = [replace(row(compute=0.1, hidden_s=0.02), slowdown=slowdown)]
    shares = re.findall(r"(-?[0-9.]+) ?%", " ".join(text for _, text in summary_lines(told, SLOW, [])))
    assert shares and all(0 <= float(share) <= 100 for share in shares)


def test_the_share_of_hidden_gathers_is_said_where_weights_are_gathered():
    gathers = {"gathers_s": 0.01, "gathers_hidden_s": 0.008}
    told = [replace(row(compute=0.1, hidden_s=0.02), **gathers), row(1, compute=0.1, hidden_s=0.02)]
    said = (
        "100 % of the communication (20 ms) ran while ranks computed, "
        "among it 80 % of the gathers of weights (5.0 ms)"
    )
    assert list(summary_lines(told, None, []))[1] == ("", said)


def test_the_slow_rank_is_named_with_what_in_how_much_and_since_when():
    assert slowness(SLOW) == (
        "rank 2 is slow in its data: 12 ms a step more than the others (30 %), since step 40"
    )
    assert list(summary_lines([row(compute=0.1)], SLOW, []))[1] == ("slow", slowness(SLOW))


def test_each_advice_is_a_line_with_its_gain_and_what_to_try_and_only_the_first_has_the_label():
    advice = [
        Advice("gloo", "Use shared memory.", 4.2, 0.17, "--parallel.backend shm", "measured", 0.5),
        Advice("loader", "Load ahead.", 1.0, 0.04, "", "measured", 1.0),
    ]
    assert list(summary_lines([row(compute=0.1)], None, advice))[1:] == [
        (
            "advice",
            "Use shared memory. Predicted gain: about 17 % (4.2 ms a step, at least 2.1 ms in three of "
            "four steps): --parallel.backend shm",
        ),
        ("", "Load ahead. Predicted gain: about 4 % (1.0 ms a step, at least 1.0 ms in three of four steps)"),
    ]


def test_without_a_breakdown_there_is_nothing_to_say():
    assert list(summary_lines([], SLOW, [])) == []
