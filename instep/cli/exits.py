"""How a command ends: the exit codes that scripts rely on, and the one line that says what went wrong."""

from __future__ import annotations

import os
import sys
import traceback

from instep.errors import CheckpointRejected, InstepError

DONE = 0
FAILED = 1
USAGE = 2
REJECTED = 3  # a checkpoint
PREEMPTED = 75  # sysexits.h EX_TEMPFAIL: run me again
INTERRUPTED = 130  # as a shell says it of SIGINT

# What the user wrote, or a path that they named.
USER_ERRORS = (
    ValueError,
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def exit_code(error: BaseException) -> int:
    """The code for a command that ended with ``error``."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, CheckpointRejected):
        return REJECTED
    return USAGE if isinstance(error, USER_ERRORS) else FAILED


def tell(program: str, error: BaseException) -> int:
    """Say on stderr why ``program`` ends, and return its exit code.

    One line for what a user can act on. A traceback comes before it where ``error`` is of none of the
    kinds that are expected to end a program, and always with ``INSTEP_DEBUG=1``.
    """
    expected = isinstance(error, ValueError | OSError | InstepError | KeyboardInterrupt)
    if not expected or os.environ.get("INSTEP_DEBUG") == "1":
        traceback.print_exception(error)
    line = "interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {_words(error)}"
    print(f"{program}: {line}", file=sys.stderr)
    return exit_code(error)


def _words(error: BaseException) -> str:
    """``str(error)``, but what the operating system says without its number."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join([*([str(error.filename)] if error.filename else []), error.strerror.lower()])
    return str(error) or type(error).__name__
