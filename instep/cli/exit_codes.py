"""The exit codes that scripts rely on, and the one line that reports an error."""

from __future__ import annotations

import os
import sys
import traceback

from instep.errors import CheckpointRejected, ContractBroken, InstepError
from instep.launch.rank_exit import RankFailed, said

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
# Errors that end a program as they should; all others are ours, and want a traceback.
EXPECTED = (ValueError, OSError, InstepError, KeyboardInterrupt)
# Those that are about the run, and read the same whichever rank met them first.
OF_NO_RANK = (*USER_ERRORS, CheckpointRejected, ContractBroken)


def exit_code(error: BaseException) -> int:
    """The code for a command that ended with ``error``."""
    kind = _kind(error)
    if _is_of_users_code(error):
        return FAILED
    if issubclass(kind, KeyboardInterrupt):
        return INTERRUPTED
    if issubclass(kind, CheckpointRejected):
        return REJECTED
    return USAGE if issubclass(kind, USER_ERRORS) else FAILED


def report_error(
    program: str, error: BaseException, expected: tuple[type[BaseException], ...] = EXPECTED
) -> int:
    """Say on stderr why ``program`` ends, and return its exit code.

    One line for what a user can act on. A traceback, that of the rank which failed, comes before it where
    ``error`` is of none of the kinds that are ``expected`` to end a program, and always with
    ``INSTEP_DEBUG=1``. Nothing is said of an error that another rank reports (``error.told``).
    """
    if getattr(error, "told", False):
        return exit_code(error)
    if not issubclass(_kind(error), expected) or os.environ.get("INSTEP_DEBUG") == "1":
        if isinstance(error, RankFailed) and error.rank_traceback:
            sys.stderr.write(error.rank_traceback)
        else:
            traceback.print_exception(error)
    is_interrupted = isinstance(error, KeyboardInterrupt)
    line = f"interrupted {error}".rstrip() if is_interrupted else f"error: {_words(error)}"
    print(f"{program}: {line}", file=sys.stderr)
    return exit_code(error)


def _kind(error: BaseException) -> type:
    """The type of ``error``; of a rank's failure, that of the exception in the rank."""
    if not isinstance(error, RankFailed) or not error.type_name:
        return type(error)
    module, _, name = error.type_name.rpartition(".")
    kind = getattr(sys.modules.get(module or "builtins"), name, None)
    return kind if isinstance(kind, type) else Exception


def _is_of_users_code(error: BaseException) -> bool:
    """Whether user code in a rank raised it: its type then says nothing about instep."""
    return isinstance(error, RankFailed) and error.exit.error is not None and not error.exit.error.is_ours


def _words(error: BaseException) -> str:
    """What ``error`` says, and of the launcher's, where the rank does not matter, what the rank's said."""
    if _is_of_users_code(error):
        return str(error)
    if isinstance(error, RankFailed) and error.exit.error and issubclass(_kind(error), OF_NO_RANK):
        return error.exit.error.message
    return said(error) or type(error).__name__
