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
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """A rank died, or did not come to ``operation`` before the deadline.

    ``ranks`` are the global ranks that are missing; ``operation`` is what this rank was waiting in.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), operation: str = "") -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.operation = operation


def let_go(error: BaseException) -> None:
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


class Desync(InstepError):
    """The ranks came to the same place with different plans; nothing was reduced, no gradient was written."""


class ReplicasDiffer(InstepError):
    """Numbers that are the same on all ranks by construction are not: memory or arithmetic has failed.

    ``ranks`` are the global ranks that are suspected, ``parameters`` what differs, by name. Raised on every
    rank alike. The weights are not to be trusted, nor are snapshots made since the last comparison.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), parameters: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.parameters = tuple(parameters)


class Diverged(InstepError):
    """Too many steps in a row had a gradient that is not finite, or far above those before.

    Raised on every rank alike; the weights are those of before these steps. ``ranks`` are the global ranks
    that computed the first number that is not finite, ``parameter`` is where; both empty if none is known.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = (), parameter: str = "") -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.parameter = parameter


class ContractBroken(InstepError):
    """A field that the bits depend on is not what it was when the run began."""


class CheckpointRejected(InstepError):
    """A checkpoint cannot be trusted; the message says what is wrong with which file."""
