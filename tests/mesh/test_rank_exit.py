"""Which of several failures is the one to show, and that its record survives the way to the launcher."""

from __future__ import annotations

import signal

import pytest

from instep.errors import PeerLost
from instep.mesh.rank_exit import (
    MESSAGE_LIMIT,
    RECORD_LIMIT_BYTES,
    TRACEBACK_LIMIT,
    ErrorRecord,
    Exit,
    RankFailed,
    root_cause,
)


def exit_(rank: int, code: int = 1, kind: str = "", at: int = 0) -> Exit:
    return Exit(rank, 100 + rank, code, ErrorRecord(kind, "why", "", at) if kind else None)


DONE = exit_(0, 0)
SILENT = exit_(1, 3)
KILLED = exit_(2, -signal.SIGKILL)
ABORTED = exit_(3, -signal.SIGABRT)
EARLY = exit_(4, kind="ValueError", at=10)
LATE = exit_(5, kind="RuntimeError", at=20)
BEREFT = exit_(6, kind="instep.errors.PeerLost", at=5)

# Best explanation first; whatever is missing, the first of what is left is the cause.
EXPLAINS = [KILLED, EARLY, LATE, ABORTED, SILENT, BEREFT]


@pytest.mark.parametrize("known", range(len(EXPLAINS)))
def test_the_best_explanation_wins_in_any_order(known: int) -> None:
    left = EXPLAINS[known:]
    assert root_cause([DONE, *left]) is left[0]
    assert root_cause([*reversed(left), DONE]) is left[0]


def test_of_equals_the_first_that_was_noticed_wins() -> None:
    second = exit_(7, -signal.SIGSEGV)
    assert root_cause([KILLED, second]) is KILLED
    assert root_cause([second, KILLED]) is second


def test_without_failures_there_is_no_cause() -> None:
    assert root_cause([]) is None
    assert root_cause([DONE, exit_(1, 0)]) is None


@pytest.mark.parametrize(
    ("failed", "message"),
    [
        (exit_(1, kind="ValueError"), "rank 1 of 3 (pid 101) failed with ValueError: why"),
        (exit_(1, 3), "rank 1 of 3 (pid 101) exited with code 3"),
        (exit_(1, -signal.SIGTERM), "rank 1 of 3 (pid 101) was killed by SIGTERM"),
        (exit_(1, -signal.SIGKILL), "rank 1 of 3 (pid 101) was killed by SIGKILL: out of memory? "),
        (exit_(1, -40), "rank 1 of 3 (pid 101) was killed by signal 40"),
    ],
)
def test_the_message_names_the_rank_and_how_it_ended(failed: Exit, message: str) -> None:
    error = RankFailed(failed, 3)
    assert str(error).startswith(message)
    assert error.exit is failed


def caught(error: BaseException) -> ErrorRecord:
    def fails() -> None:
        raise error

    try:
        fails()
    except BaseException as raised:
        return ErrorRecord.of(raised)


def test_a_record_has_the_type_and_the_frames_below_the_one_that_caught() -> None:
    record = caught(ValueError("expected 2, got 3"))
    assert (record.type, record.message) == ("ValueError", "expected 2, got 3")
    assert "in fails" in record.traceback
    assert "in caught" not in record.traceback
    assert caught(PeerLost("gone")).type == "instep.errors.PeerLost"


def test_a_record_survives_being_written_down() -> None:
    record = caught(ValueError("größer \udcff \x00"))
    assert ErrorRecord.from_bytes(record.to_bytes()) == record


def test_a_record_that_was_cut_off_is_none() -> None:
    data = caught(ValueError("why")).to_bytes()
    assert ErrorRecord.from_bytes(b"") is None
    assert ErrorRecord.from_bytes(data[:-1]) is None


def test_the_largest_record_fits() -> None:
    worst = "\x00"  # six bytes in JSON
    record = caught(ValueError(worst * 10 * TRACEBACK_LIMIT))
    assert len(record.message) == MESSAGE_LIMIT
    assert len(record.to_bytes()) <= RECORD_LIMIT_BYTES


def test_an_error_that_another_rank_tells_is_not_the_cause() -> None:
    retold = KeyError("of rank 0")
    retold.told = True  # type: ignore[attr-defined]
    second = ErrorRecord.from_bytes(ErrorRecord.of(retold).to_bytes())
    first = ErrorRecord.of(KeyError("of rank 0"))
    cause = root_cause([Exit(1, 101, 1, second), Exit(0, 100, 1, first)])
    assert cause is not None
    assert cause.rank == 0
