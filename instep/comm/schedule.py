"""A collective as data: what each rank sends and receives, step by step, without a tensor. Arithmetic only.

An algorithm of this folder is a generator of the steps of one rank. A broadcast as one would first write it:

    def broadcast(rank, size):
        if rank:
            yield receive(0)
        else:
            for other in range(1, size):
                yield send(other)

``perform`` does these steps with memory and messages, ``play`` does those of all ranks with letters, which is
what ``instep show`` prints, and the formulas of ``cost`` are held to what the steps add up to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple


class Piece(NamedTuple):
    """Parts [first, end) of x where it is cut into ``of`` nearly equal parts (``messages.edges``)."""

    first: int
    end: int
    of: int


WHOLE = Piece(0, 1, 1)

# What becomes of what was received: it overwrites what the rank has, or is added to it. Addition of floats
# depends on its nesting, so that is part of the algorithm. "in rank order": ((x0 + x1) + x2) + ..., each when
# its turn has come; the rank's own is one of them.
Then = Literal["copy", "own + received", "received + own", "in rank order"]


class Step(NamedTuple):
    """What a rank does at once: (other rank, what goes over). The next step begins when all of it is done.

    A step that adds receives one message, but for "in rank order".
    """

    sends: Sequence[tuple[int, Piece]] = ()
    receives: Sequence[tuple[int, Piece]] = ()
    then: Then = "copy"


Schedule = Callable[[int, int], Iterator[Step]]  # of a rank, and of how many there are; the root is rank 0


def part(index: int, of: int) -> Piece:
    """One of ``of`` parts."""
    return Piece(index, index + 1, of)


def send(to: int, piece: Piece = WHOLE) -> Step:
    """One message to rank ``to``."""
    return Step(sends=[(to, piece)])


def receive(source: int, piece: Piece = WHOLE, then: Then = "copy") -> Step:
    """One message from rank ``source``."""
    return Step(receives=[(source, piece)], then=then)


def exchange(to: int, sent: Piece, source: int, received: Piece, then: Then = "copy") -> Step:
    """One message out while one comes in."""
    return Step([(to, sent)], [(source, received)], then)
