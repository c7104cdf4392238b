"""The failure that explains the others, and its record on the way to the launcher."""

from __future__ import annotations

import signal

import pytest

from instep.errors import PeerLost
from instep.launch.rank_exit import (
    MESSAGE_LIMIT,
    RECORD_LIMIT_BYTES,
    TRACEBACK_LIMIT,
    ErrorRecord,
    Exit,
    RankFailed,
    mark_secondary,
    root_cause,
)


def exit_(rank: int, code: int = 1, kind: str = "", at: int = 0, told: bool = False) -> Exit:
    return Exit(rank, 100 + rank, code, ErrorRecord(kind, "why", "", at, told) if kind else None)


DONE = exit_(0, 0)
# Best explanation first; whatever is missing, the first of the rest is the cause.
EXPLAINS = [
    exit_(2, -signal.SIGKILL),
    exit_(4, kind="ValueError", at=10),
    exit_(5, kind="RuntimeError", at=20),
    exit_(3, -signal.SIGABRT),
    exit_(1, 3),
    exit_(6, kind="instep.errors.PeerLost", at=5),
    exit_(7, kind="KeyError", at=6, told=True),
]


def test_the_best_explanation_wins_in_any_order_and_of_equals_the_first() -> None:
    for known in range(len(EXPLAINS)):
        left = EXPLAINS[known:]
        assert root_cause([DONE, *left]) is left[0]
        assert root_cause([*reversed(left), DONE]) is left[0]
    equal = [EXPLAINS[0], exit_(7, -signal.SIGSEGV)]
    assert root_cause(equal) is equal[0] and root_cause(equal[::-1]) is equal[1]
    assert root_cause([]) is root_cause([DONE]) is None


@pytest.mark.parametrize(
    ("failed", "message"),
    [
        (exit_(1, kind="ValueError"), "failed with ValueError: why"),
        (exit_(1, 3), "exited with code 3"),
        (exit_(1, -signal.SIGTERM), "was killed by SIGTERM"),
        (exit_(1, -signal.SIGKILL), "was killed by SIGKILL: out of memory? "),
        (exit_(1, -40), "was killed by signal 40"),
    ],
)
def test_the_message_names_the_rank_and_how_it_ended(failed: Exit, message: str) -> None:
    error = RankFailed(failed, 3)
    assert str(error).startswith(f"rank 1 of 3 (pid 101) {message}")
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
    assert (record.type, record.message, record.told) == ("ValueError", "expected 2, got 3", False)
    assert "in fails" in record.traceback and "in caught" not in record.traceback
    assert caught(PeerLost("gone")).type == "instep.errors.PeerLost"


def test_a_record_survives_being_written_down_whole_and_is_none_if_cut_off() -> None:
    record = caught(mark_secondary(ValueError("größer \udcff \x00")))
    data = record.to_bytes()
    assert record.told and ErrorRecord.from_bytes(data) == record
    assert ErrorRecord.from_bytes(b"") is ErrorRecord.from_bytes(data[:-1]) is None
    largest = caught(ValueError("\x00" * 10 * TRACEBACK_LIMIT))  # six bytes each in JSON
    assert len(largest.message) == MESSAGE_LIMIT
    assert len(largest.to_bytes()) <= RECORD_LIMIT_BYTES
