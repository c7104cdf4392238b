"""Exit codes and last words."""

import errno
import os
import signal

import pytest

from instep.cli.exit_codes import FAILED, INTERRUPTED, REJECTED, USAGE, exit_code, report_error
from instep.errors import CheckpointRejected, ContractBroken, Desync, PeerLost
from instep.launch.rank_exit import ErrorRecord, Exit, RankFailed

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "steps.jsonl")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("a setting"), USAGE),
        (FileNotFoundError("data"), USAGE),
        (FileExistsError("run directory"), USAGE),
        (PermissionError("run directory"), USAGE),
        (NotADirectoryError("run directory"), USAGE),
        (CheckpointRejected("truncated"), REJECTED),
        (PeerLost("rank 1"), FAILED),
        (Desync("plans"), FAILED),
        (ContractBroken("fields"), FAILED),
        (NO_SPACE, FAILED),
        (TypeError("ours"), FAILED),
        (RuntimeError("torch's"), FAILED),
        (KeyboardInterrupt(), INTERRUPTED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_its_code(error, code):
    assert exit_code(error) == code


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ValueError("steps: expected a number above 0, got 0"),
            "error: steps: expected a number above 0, got 0",
        ),
        (NO_SPACE, "error: steps.jsonl: no space left on device"),
        (OSError(errno.EPIPE, os.strerror(errno.EPIPE)), "error: broken pipe"),
        (FileExistsError("runs/a holds another run"), "error: runs/a holds another run"),
        (ValueError(), "error: ValueError"),
        (KeyboardInterrupt(), "interrupted"),
        (KeyboardInterrupt("after 3 steps"), "interrupted after 3 steps"),
    ],
)
def test_what_a_user_can_act_on_is_one_line(error, line, capsys):
    report_error("instep train", error)
    assert capsys.readouterr().err == f"instep train: {line}\n"


def test_what_nobody_expected_comes_with_its_traceback(capsys):
    assert report_error("instep train", KeyError("a bug")) == FAILED
    err = capsys.readouterr().err
    assert "KeyError: 'a bug'\n" in err
    assert err.endswith("instep train: error: 'a bug'\n")


def test_a_traceback_can_be_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("INSTEP_DEBUG", "1")
    report_error("instep train", ValueError("no"))
    assert capsys.readouterr().err == "ValueError: no\ninstep train: error: no\n"


def failed(kind: str, message: str, code: int = 1) -> RankFailed:
    """What the launcher raises when rank 1 of 2 has raised ``kind``, or none if that is empty."""
    record = ErrorRecord(kind, message, f"Traceback of rank 1\n{kind}: {message}\n", 0) if kind else None
    return RankFailed(Exit(1, 77, code, record), 2)


@pytest.mark.parametrize(
    ("kind", "code", "line"),
    [
        ("ValueError", USAGE, "why"),
        ("FileNotFoundError", USAGE, "why"),
        ("json.decoder.JSONDecodeError", USAGE, "why"),
        ("instep.errors.CheckpointRejected", REJECTED, "why"),
        ("instep.errors.ContractBroken", FAILED, "why"),
        ("instep.errors.PeerLost", FAILED, "rank 1 of 2 (pid 77) failed with instep.errors.PeerLost: why"),
        ("OSError", FAILED, "rank 1 of 2 (pid 77) failed: why"),
    ],
)
def test_what_a_rank_raised_ends_the_command_as_if_it_were_raised_here(kind, code, line, capsys):
    assert report_error("instep train", failed(kind, "why")) == code
    assert capsys.readouterr().err == f"instep train: error: {line}\n"


def test_a_rank_s_words_have_no_number_of_the_system_s(capsys):
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "Text")
    report_error("instep train", failed("PermissionError", ErrorRecord.of(error).message))
    assert capsys.readouterr().err == "instep train: error: Text: permission denied\n"


@pytest.mark.parametrize("kind", ["KeyError", "somewhere.unheard.OfError"])
def test_what_nobody_expected_of_a_rank_comes_with_the_rank_s_traceback(kind, capsys):
    assert report_error("instep train", failed(kind, "why")) == FAILED
    assert capsys.readouterr().err == (
        f"Traceback of rank 1\n{kind}: why\n"
        f"instep train: error: rank 1 of 2 (pid 77) failed with {kind}: why\n"
    )


def test_a_rank_that_was_killed_is_named_with_its_signal(capsys):
    assert report_error("instep train", failed("", "", code=-signal.SIGTERM)) == FAILED
    assert capsys.readouterr().err == "instep train: error: rank 1 of 2 (pid 77) was killed by SIGTERM\n"


def test_a_rank_s_traceback_can_be_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("INSTEP_DEBUG", "1")
    report_error("instep train", failed("ValueError", "why"))
    assert capsys.readouterr().err.startswith("Traceback of rank 1\n")


@pytest.mark.parametrize(("error", "code"), [(ValueError("no"), USAGE), (CheckpointRejected("no"), REJECTED)])
def test_what_another_rank_tells_is_not_told_again(error, code, capsys):
    error.told = True
    assert report_error("instep train", error) == code
    assert capsys.readouterr().err == ""
