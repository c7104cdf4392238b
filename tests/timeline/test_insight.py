"""What the ranks' files tell of a run: the breakdown, the slow rank, the buckets, the advice."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instep.timeline.breakdown import RankBreakdown
from instep.timeline.insight import SAMPLED, look, setting_of
from instep.timeline.tape import read_tapes
from tests.timeline.taped import DATA, FLIGHT, HOST, UPDATE, Taped, setting
from tests.timeline.test_tape import json_values


def slowed(rank):
    return 1.5 if rank == 2 else 1.0


def test_a_slow_rank_is_in_the_breakdown_of_the_others_and_first_in_the_advice(tmp_path):
    run = Taped(tmp_path, 3, slower=slowed)
    run.steps(0, 12)
    found = look(read_tapes(tmp_path))
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
    Taped(tmp_path, 3).steps(0, 12)
    assert look(read_tapes(tmp_path)).slow is None


def test_of_many_steps_what_needs_all_ranks_at_once_looks_at_some_up_to_the_last(tmp_path):
    run = Taped(tmp_path, 2, leaves=1, buckets=1)
    run.steps(0, 150)
    found = look(read_tapes(tmp_path))
    assert found.buckets[0].steps == SAMPLED and [row.steps for row in found.breakdowns] == [148, 148]
    run.buckets = 2
    run.step(150)
    assert look(read_tapes(tmp_path)).buckets[1].steps == 1


def test_only_the_steps_that_are_asked_for_are_looked_at(tmp_path):
    Taped(tmp_path, 2).steps(0, 12)
    found = look(read_tapes(tmp_path), [7, 8])
    assert [[row.step for row in rows] for rows in found.rows.values()] == [[7, 8], [7, 8]]


def test_a_rank_that_the_run_goes_on_without_is_in_the_rows_and_not_in_the_breakdown(tmp_path):
    run = Taped(tmp_path, 3, slower=slowed)
    run.steps(0, 8)
    Taped(tmp_path, 2, begin_ms=run.now / 1e6 + 500).steps(8, 30)
    found = look(read_tapes(tmp_path, 2))
    assert {rank: len(rows) for rank, rows in found.rows.items()} == {0: 30, 1: 30, 2: 8}
    assert [row.rank for row in found.breakdowns] == [0, 1] and found.slow is None


def test_what_the_ranks_have_told_is_taken_and_a_rank_without_a_step_left_out(tmp_path):
    Taped(tmp_path, 2).steps(0, 8)
    told = look(read_tapes(tmp_path)).breakdowns
    far = replace(told[0], rank=5, median_s=1.0)
    none = RankBreakdown(6, 0, 0.0, 0.0, {}, {}, {}, 0.0, 0.0)
    found = look(read_tapes(tmp_path), breakdowns=[*told, far, none])
    assert found.breakdowns == [*told, far] and found.slow is None
    assert look(read_tapes(tmp_path / "nothing"), breakdowns=[none]).advice == []


def test_without_files_there_is_nothing_and_no_error(tmp_path):
    found = look(read_tapes(tmp_path))
    assert found.figures() == {"breakdown": [], "slow_rank": None, "advice": []} and found.buckets == []


def test_without_a_setting_there_is_no_advice(tmp_path):
    Taped(tmp_path, 3, slower=slowed, head={"setting": None}).steps(0, 12)
    found = look(read_tapes(tmp_path))
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


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.dictionaries(st.sampled_from(NAMES), json_values | st.integers(0, 100), max_size=3),
    head=st.dictionaries(st.sampled_from(["optimizer", "num_parameters"]), json_values),
)
def test_whatever_a_setting_holds_advice_is_given_or_not_but_finite(tmp_path, fields, head):
    Taped(tmp_path, 2, slower=lambda rank: 1.0 + rank, head=head).steps(0, 7)
    tapes = read_tapes(tmp_path)
    for tape in tapes.tapes.values():
        tape.head["setting"] = {**asdict(setting()), **fields}
    for advice in look(tapes).advice:
        assert 0 < advice.gain_ms < 1e9 and advice.gain_share > 0 and advice.text
