"""What the trace files tell of a run: the breakdown, the slow rank, the buckets, the advice; and as lines."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instep.timeline.advice import Advice
from instep.timeline.analysis import analyse, summary_lines
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


def test_a_rank_that_the_run_goes_on_without_is_in_the_rows_and_not_in_the_breakdown(tmp_path):
    run = MadeUpRun(tmp_path, 3, slower=slowed)
    run.steps(0, 8)
    MadeUpRun(tmp_path, 2, begin_ms=run.now / 1e6 + 500).steps(8, 30)
    found = analyse(read_traces(tmp_path, 2))
    assert {rank: len(rows) for rank, rows in found.rows.items()} == {0: 30, 1: 30, 2: 8}
    assert [row.rank for row in found.breakdowns] == [0, 1] and found.slow is None


NAMES = [*asdict(setting()), "more"]


def test_more_stages_than_ranks_are_no_setting():
    """The advice on unequal shares divided by no pipelines at all."""
    assert setting_of({**asdict(setting()), "pp": 3}) is None


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
