"""A collective as data: what each rank sends and receives, step by step, without a tensor. Arithmetic only.

An algorithm of this folder is a generator of the steps of one rank. The simplest broadcast:

    def broadcast(rank, size):
        if rank:
            yield receive(0)
        else:
            for other in range(1, size):
                yield send(other)

``perform`` executes these steps on tensors. ``transfers`` matches the sends of all ranks with their receives:
``play`` turns these messages into letters, which ``instep show`` prints, and ``cost`` counts them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Piece(NamedTuple):
    """Parts [first, end) of x when x is cut into ``of`` nearly equal parts (``edges``)."""

    first: int
    end: int
    of: int


WHOLE = Piece(0, 1, 1)

# What happens to received data: it overwrites the rank's own, or is added to it. Floating-point addition
# depends on its nesting, so the order is part of the algorithm. "in rank order": ((x0 + x1) + x2) + ... of
# the rank's own piece and those received in one step.
Then = Literal["copy", "own + received", "received + own", "in rank order"]


class Step(NamedTuple):
    """What a rank sends and receives at once: (other rank, piece). The next step starts when all are done.

    A step that adds receives one message, except "in rank order", which receives one from every rank.
    """

    sends: Sequence[tuple[int, Piece]] = ()
    receives: Sequence[tuple[int, Piece]] = ()
    then: Then = "copy"


Schedule = Callable[[int, int], Iterator[Step]]  # of (rank, number of ranks); the root is rank 0


class Transfer(NamedTuple):
    """One message: ``sent`` in step ``sent_in`` of the sender becomes ``received``; done at ``end``."""

    sender: int
    sent_in: int
    sent: Piece
    receiver: int
    received_in: int
    received: Piece
    then: Then
    end: float


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
    """One message out while another comes in."""
    return Step([(to, sent)], [(source, received)], then)


def edges(num_elements: int, parts: int) -> list[int]:
    """The ``parts + 1`` edges of the parts: part i is [edges[i], edges[i + 1]).

    Lengths differ by at most one element; with fewer elements than parts some are empty.
    """
    return [i * num_elements // parts for i in range(parts + 1)]


def transfers(
    schedule: Schedule, size: int, duration: Callable[[Piece], float] = lambda _: 1
) -> Iterator[Transfer]:
    """Every message of ``schedule`` on ``size`` ranks, in an order that respects all dependencies.

    Each takes ``duration(piece)``, and a rank sends one message and receives one at a time (Hockney's model).

    Raises:
        ValueError: ranks wait for each other.
    """
    ranks = [_Progress(schedule(rank, size)) for rank in range(size)]
    has_moved = True
    while has_moved:
        has_moved = False
        for receiver, own in enumerate(ranks):
            own.advance()
            if not own.receives:
                continue
            sender, received = own.receives[0]
            other = ranks[sender]
            other.advance()
            if other.sends and other.sends[0][0] == receiver:
                own.receives.popleft()
                _, sent = other.sends.popleft()
                own.in_end = other.out_end = end = max(own.in_end, other.out_end) + duration(sent)
                yield Transfer(sender, other.number, sent, receiver, own.number, received, own.then, end)
                has_moved = True
    if waiting := [rank for rank, own in enumerate(ranks) if own.sends or own.receives]:
        raise ValueError(f"ranks {waiting} wait for messages that no rank sends")


@dataclass
class _Progress:
    """One rank's position in its steps, and until when its outgoing and its incoming link are busy."""

    steps: Iterator[Step]
    sends: deque[tuple[int, Piece]] = field(default_factory=deque)
    receives: deque[tuple[int, Piece]] = field(default_factory=deque)
    then: Then = "copy"
    number: int = 0
    out_end: float = 0.0
    in_end: float = 0.0

    def advance(self) -> None:
        """Start the next step if all messages of this one are done."""
        while not (self.sends or self.receives) and (step := next(self.steps, None)) is not None:
            self.sends, self.receives, self.then = deque(step.sends), deque(step.receives), step.then
            self.number += 1
            self.out_end = self.in_end = max(self.out_end, self.in_end)
