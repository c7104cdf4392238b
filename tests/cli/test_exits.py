"""Exit codes and last words."""

import errno
import os

import pytest

from instep.cli.exits import FAILED, INTERRUPTED, REJECTED, USAGE, exit_code, tell
from instep.errors import CheckpointRejected, ContractBroken, Desync, PeerLost

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")


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
        (NO_SPACE, "error: metrics.jsonl: no space left on device"),
        (OSError(errno.EPIPE, os.strerror(errno.EPIPE)), "error: broken pipe"),
        (FileExistsError("runs/a holds another run"), "error: runs/a holds another run"),
        (ValueError(), "error: ValueError"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_what_a_user_can_act_on_is_one_line(error, line, capsys):
    tell("instep train", error)
    assert capsys.readouterr().err == f"instep train: {line}\n"


def test_what_nobody_expected_comes_with_its_traceback(capsys):
    assert tell("instep train", KeyError("a bug")) == FAILED
    err = capsys.readouterr().err
    assert "KeyError: 'a bug'\n" in err
    assert err.endswith("instep train: error: 'a bug'\n")


def test_a_traceback_can_be_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("INSTEP_DEBUG", "1")
    tell("instep train", ValueError("no"))
    assert capsys.readouterr().err == "ValueError: no\ninstep train: error: no\n"
