"""What a training loop may want to catch.

    RuntimeError
    └── InstepError               everything below; the message names rank, operation, cause and fix
        ├── PeerLost              a rank died, or never came to an operation before the deadline
        ├── Desync                the ranks disagree about what happens next, or who takes part in it
        ├── ReplicasDiffer        the ranks hold, or compute, numbers that should be the same and are not
        ├── Diverged              too many steps in a row had a gradient that could not be used
        ├── ContractBroken        the numerical configuration is not the one the run was started with
        └── CheckpointRejected    a checkpoint is missing, incomplete, altered, or of another model

What a user did wrong in one call is a plain ``ValueError`` or ``TypeError``.

    >>> try:
    ...     loss_function(model(x), y).backward()
    ... except instep.errors.PeerLost as lost:
    ...     print("without", lost.ranks, "in", lost.operation)
    ... except instep.errors.InstepError as error:
    ...     print(error)
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from traceback import walk_stack

__all__ = [
    "CheckpointRejected",
    "ContractBroken",
    "Desync",
    "Diverged",
    "InstepError",
    "PeerLost",
    "ReplicasDiffer",
]


class InstepError(RuntimeError):
    """Base of the errors that instep raises while a program runs."""

    __module__ = "instep.errors"


class PeerLost(InstepError):
    """A rank died, or did not come to an operation of all ranks before the deadline.

    Raised by everything that is collective, on the ranks that wait. The group has lost a rank, and is of no
    use any more: let the program end, or ``close`` the wrapper and wrap its module again, over the ranks that
    are left.

    Attributes:
        ranks: the global ranks that are missing; empty where that is not known.
        operation: what this rank was waiting in: "the exchange of bucket 0".
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), operation: str = "") -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.operation = operation


def clear_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of ``error`` and of what caused it, for whoever has told it and keeps it no longer.

    A traceback holds every frame that it names, and a frame all its locals: of a rank that was lost in the
    middle of a step, the group, the buckets and the memory that it shared. And what is in a frame may hold
    the error.
    """
    seen: set[int] = set()
    left = [error]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [other for other in (one.__cause__, one.__context__) if other is not None]


def counted(number: int, what: str) -> str:
    """``1 rank``, ``2 ranks``, for messages."""
    return f"{number} {what}{'s' * (number != 1)}"


def warn(text: str) -> None:
    """Warn at the innermost line that is of neither instep nor torch: the user's."""
    names = (str(frame.f_globals.get("__name__")) for frame, _ in walk_stack(sys._getframe()))
    ours = ("instep.", "torch.", "contextlib")
    users = (level for level, name in enumerate(names, 1) if not name.startswith(ours))
    warnings.warn(text, stacklevel=next(users, 1))


class Desync(InstepError):
    """The ranks came to the same place with different plans; nothing was reduced, no gradient was written.

    Raised on every rank alike: one made another step, left a loop over ``micro_batches``, or raised.
    """


class ReplicasDiffer(InstepError):
    """Numbers that should be the same on all ranks are not: one has written to them, or memory has failed.

    Raised on every rank alike. The weights are not to be trusted, nor are snapshots made since the last
    comparison: load a checkpoint.

    Attributes:
        ranks: the global ranks that are suspected.
        parameters: what differs, by name.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), parameters: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.parameters = tuple(parameters)


class Diverged(InstepError):
    """Too many steps in a row had a gradient that is not finite, or far above those before.

    Raised in the step of an ``instep.Run``, as ``instep train`` is one, on every rank alike; the weights are
    those of before these steps. The message names the first number that is not finite: whether it is a weight
    or a gradient, of which parameter, and which rank computed it, in which micro-batch of a declared step.

    Attributes:
        ranks: the global ranks that computed the first number that is not finite; empty if none is known.
        parameter: whose gradient it was in, by name; "" if that is not known.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), parameter: str = "") -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.parameter = parameter


class ContractBroken(InstepError):
    """A field that the bits depend on is not what it was when the run began. Raised by ``instep.Run``."""


class CheckpointRejected(InstepError):
    """A checkpoint cannot be trusted; the message says what is wrong with which file."""
