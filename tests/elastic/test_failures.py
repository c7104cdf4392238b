"""A run that keeps failing ends, with all that happened; a recovery is timed in parts that add up."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.elastic.failures import FEW_STEPS, MAX_IN_A_ROW, Failure, Recovery, RetryLimit, RunFailed

FAILURE = Failure(1, 4711, 1, 12, "exchange", "was killed by SIGKILL")
MS = 10**6


def message(**at_ms: float) -> dict[str, Any]:
    told = {"step": 13, "source": "a survivor", "generation": 2, "world_size": 3}
    return {**told, **{f"{name}_ns": int(ms * MS) for name, ms in at_ms.items()}}


def test_a_recovery_is_made_of_parts_that_add_up_and_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([100 * MS, 140 * MS])  # noticed, and assigned
    monkeypatch.setattr(time, "monotonic_ns", now.__next__)
    recovery = Recovery(FAILURE)
    recovery.assigned()
    recovery.stepped(message(joined=200, agreed=210, stepped=350))
    told = {name: round(part * 1e3) for name, part in recovery.seconds.items()}
    assert told == {"ready": 40, "join": 60, "state": 10, "step": 140, "total": 250}
    assert str(recovery) == (
        "going on with 3 ranks at step 12, from a survivor: first new step after 0.250 s "
        "(ready 0.040, join 0.060, state 0.010, step 0.140)"
    )
    fields = json.loads(json.dumps(recovery.fields()))
    assert fields == recovery.fields() and fields["event"] == "recovery"
    assert (fields["step"], fields["source"], fields["generation"]) == (13, "a survivor", 2)
    assert (fields["stepped_ns"] - fields["noticed_ns"]) / 1e9 == fields["seconds"]["total"]


def failure(attempt: int, step: int = 3, error: str = "", rank: int = 1) -> Failure:
    return Failure(rank, 100 + attempt, attempt, step, "forward", f"failed as no. {attempt}", error)


def add_all(limit: RetryLimit, *failures: Failure) -> None:
    for one in failures:
        limit.add(one)


def test_a_failure_reads_as_a_sentence_and_travels_as_json() -> None:
    one = Failure(2, 4711, 5, 12, "exchange", "was killed by SIGKILL", "")
    assert str(one) == "rank 2 (pid 4711), in step 12 (exchange), was killed by SIGKILL"
    assert Failure(**json.loads(json.dumps(one.fields()))) == one
    assert str(failure(-3, rank=-1)).startswith("a spare (pid 97), in step 3")


def test_an_exception_is_the_same_whatever_pids_and_addresses_are_in_its_text() -> None:
    limit = RetryLimit()
    limit.add(failure(1, error="ValueError: what is this? in worker 0 (pid 4711), at 0x7f3a"))
    with pytest.raises(RunFailed, match="the same exception came twice at the same step"):
        limit.add(failure(2, error="ValueError: what is this? in worker 0 (pid 97), at 0x55bc"))


def test_the_fifth_failure_in_a_row_ends_the_run_and_all_are_listed() -> None:
    limit = RetryLimit()
    add_all(limit, *map(failure, range(1, MAX_IN_A_ROW)))
    with pytest.raises(RunFailed, match="5 failures in a row with no completed step") as ended:
        limit.add(failure(MAX_IN_A_ROW))
    assert [f.attempt for f in ended.value.failures] == [1, 2, 3, 4, 5]
    assert str(ended.value).splitlines()[1:] == [f"  {failure(i)}" for i in range(1, 6)]


def test_steps_that_are_made_again_are_no_progress() -> None:
    limit = RetryLimit()
    limit.progressed(10)
    for generation in range(1, MAX_IN_A_ROW):
        limit.progressed(generation)
        limit.add(failure(generation))
    limit.progressed(10)
    with pytest.raises(RunFailed, match="in a row"):
        limit.add(failure(MAX_IN_A_ROW))


@pytest.mark.parametrize("distance", [1, FEW_STEPS])
def test_an_exception_that_comes_back_after_each_few_steps_ends_the_run(distance: int) -> None:
    limit = RetryLimit()
    for i in range(1, MAX_IN_A_ROW):
        limit.progressed(i * distance)
        add_all(limit, *(raised(i, i * distance, rank) for rank in range(2)))
    limit.progressed(MAX_IN_A_ROW * distance)
    with pytest.raises(RunFailed, match="the same exception came 5 times, step after step:"):
        limit.add(raised(MAX_IN_A_ROW, MAX_IN_A_ROW * distance, 0))


def test_an_exception_that_comes_back_after_many_steps_is_survived() -> None:
    limit = RetryLimit()
    for i in range(1, 50):
        limit.progressed(i * (FEW_STEPS + 1))
        limit.add(raised(i, i * (FEW_STEPS + 1), 0))


def raised(attempt: int, step: int, rank: int) -> Failure:
    """An exception, always in the same words."""
    return Failure(rank, 97, attempt, step, "script", "failed with ValueError: x", "ValueError: x")


def test_the_same_exception_twice_at_the_same_step_ends_the_run_even_after_other_steps() -> None:
    limit = RetryLimit()
    first = failure(1, step=7, error="ValueError: bad sample")
    limit.add(first)
    limit.progressed(9)
    second = failure(2, step=7, error="ValueError: bad sample", rank=0)
    with pytest.raises(RunFailed, match="the same exception came twice") as ended:
        limit.add(second)
    assert ended.value.failures == (first, second)
    assert str(ended.value).splitlines()[1:] == [f"  {second}"]  # it said the same twice


def test_what_is_not_the_same_does_not_repeat() -> None:
    limit = RetryLimit()
    add_all(
        limit,
        failure(1, error="ValueError: a"),
        failure(1, error="ValueError: a", rank=2),  # of the same generation: it met both
        failure(2, error="ValueError: b"),
        failure(3, step=4, error="ValueError: a"),
    )
    limit.progressed(5)
    add_all(limit, failure(4), failure(5))  # killed, twice at one step: machines are


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=60))
def test_it_ends_the_run_exactly_when_five_generations_in_a_row_made_no_step(
    history: list[tuple[bool, int]],
) -> None:
    """Counted another way: the number of generations since the last step."""
    limit, step, lost = RetryLimit(), 0, 0
    for generation, (steps, failures) in enumerate(history, start=1):
        if steps:
            step, lost = step + 1, 0
            limit.progressed(step)
        if not failures:
            continue
        lost += 1
        if lost == MAX_IN_A_ROW:
            with pytest.raises(RunFailed):
                limit.add(failure(generation))
            return
        add_all(limit, *(failure(generation, rank=rank) for rank in range(failures)))


def test_what_all_ranks_raise_before_a_step_ends_the_run_and_what_they_raise_otherwise_does_not() -> None:
    def raised_by(rank: int, *, step: int = 0, error: str = "ValueError: no") -> Failure:
        return failure(1, step, error, rank)

    limit = RetryLimit()
    limit.add(raised_by(0), 2)
    with pytest.raises(RunFailed, match="all 2 ranks raised the same exception before a step was made"):
        limit.add(raised_by(1), 2)
    for second in (raised_by(1, error="ValueError: another"), raised_by(1, step=4), raised_by(0)):
        limit = RetryLimit()
        limit.add(raised_by(0, step=second.step), 2)
        limit.add(second, 2)
    alone = RetryLimit()
    alone.add(raised_by(0), 1)
