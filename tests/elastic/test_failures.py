"""A run that keeps failing ends, with all that happened; one that gets on does not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.elastic.failures import MAX_IN_A_ROW, Failure, Patience, RunFailed


def failure(attempt: int, step: int = 3, error: str = "", rank: int = 1) -> Failure:
    return Failure(rank, 100 + attempt, attempt, step, "forward", f"failed as no. {attempt}", error)


def add_all(patience: Patience, *failures: Failure) -> None:
    for one in failures:
        patience.add(one)


def test_a_failure_reads_as_a_sentence_and_travels_as_json() -> None:
    one = Failure(2, 4711, 5, 12, "exchange", "was killed by SIGKILL", "")
    assert str(one) == "rank 2 (pid 4711), after step 12 in exchange, was killed by SIGKILL"
    assert Failure(**json.loads(json.dumps(one.fields()))) == one
    assert str(failure(-3, rank=-1)).startswith("a spare (pid 97), after step 3")


def test_the_fifth_failure_in_a_row_ends_the_run_and_all_are_listed() -> None:
    patience = Patience()
    add_all(patience, *map(failure, range(1, MAX_IN_A_ROW)))
    with pytest.raises(RunFailed, match="5 failures in a row, without a step in between") as ended:
        patience.add(failure(MAX_IN_A_ROW))
    assert [f.attempt for f in ended.value.failures] == [1, 2, 3, 4, 5]
    assert str(ended.value).splitlines()[1:] == [f"  {failure(i)}" for i in range(1, 6)]


def test_a_step_makes_it_forget() -> None:
    patience = Patience()
    for generation in range(1, 50):
        patience.progressed(generation // 4)
        patience.add(failure(generation))


def test_steps_that_are_made_again_are_no_progress() -> None:
    patience = Patience()
    patience.progressed(10)
    for generation in range(1, MAX_IN_A_ROW):
        patience.progressed(generation)
        patience.add(failure(generation))
    patience.progressed(10)
    with pytest.raises(RunFailed, match="in a row"):
        patience.add(failure(MAX_IN_A_ROW))


def test_workers_that_fail_together_count_once() -> None:
    patience = Patience()
    add_all(patience, *(failure(1, rank=rank) for rank in range(3 * MAX_IN_A_ROW)))


def test_the_same_exception_twice_at_the_same_step_ends_the_run_even_after_other_steps() -> None:
    patience = Patience()
    first = failure(1, step=7, error="ValueError: bad sample")
    patience.add(first)
    patience.progressed(9)
    second = failure(2, step=7, error="ValueError: bad sample", rank=0)
    with pytest.raises(RunFailed, match="the same exception came twice") as ended:
        patience.add(second)
    assert ended.value.failures == (first, second)


def test_what_is_not_the_same_does_not_repeat() -> None:
    patience = Patience()
    add_all(
        patience,
        failure(1, error="ValueError: a"),
        failure(1, error="ValueError: a", rank=2),  # of the same generation: it met both
        failure(2, error="ValueError: b"),
        failure(3, step=4, error="ValueError: a"),
    )
    patience.progressed(5)
    add_all(patience, failure(4), failure(5))  # killed, twice at one step: machines are


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=60))
def test_it_ends_the_run_exactly_when_five_generations_in_a_row_made_no_step(
    history: list[tuple[bool, int]],
) -> None:
    """Counted another way: the number of generations since the last step."""
    patience, step, lost = Patience(), 0, 0
    for generation, (steps, failures) in enumerate(history, start=1):
        if steps:
            step, lost = step + 1, 0
            patience.progressed(step)
        if not failures:
            continue
        lost += 1
        if lost == MAX_IN_A_ROW:
            with pytest.raises(RunFailed):
                patience.add(failure(generation))
            return
        add_all(patience, *(failure(generation, rank=rank) for rank in range(failures)))
