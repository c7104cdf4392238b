"""Plays a schedule on all ranks, with letters for numbers: who holds what after each round.

Rank 0's addend is "a", rank 1's "b"; a sum is the letters of its addends, in the order of the additions. A
message takes one round, and a rank sends one and receives one at a time: the alpha-beta model with alpha = 1
and beta = 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_lowercase

from instep.comm.schedule import Piece, Schedule, Then, transfers

State = list[list[str]]  # [rank][part of x]: the letters there; "" where nothing useful is

MAX_RANKS = len(ascii_lowercase)


@dataclass(frozen=True)
class Message:
    """``sent`` of the sender's x lands in ``piece`` of the receiver's, which then contains ``cells``."""

    round: int
    sender: int
    receiver: int
    sent: Piece
    piece: Piece
    cells: tuple[str, ...]  # one per part, in the finest cut of the schedule
    then: Then
    is_first: bool  # the receiver's x was empty


@dataclass(frozen=True)
class Played:
    """A schedule played to its end, on x cut into ``num_parts``."""

    num_parts: int
    start: State
    messages: list[Message]

    def rounds(self) -> Iterator[tuple[list[Message], State]]:
        """The messages of each round, and who holds what after it."""
        held = [list(cells) for cells in self.start]
        for number in range(1, max((message.round for message in self.messages), default=0) + 1):
            sent = [message for message in self.messages if message.round == number]
            for message in sent:
                held[message.receiver][cells_of(message.piece, self.num_parts)] = message.cells
            yield sent, [list(cells) for cells in held]


def play(collective: str, schedule: Schedule, size: int) -> Played:
    """Every message of ``schedule`` on ``size`` ranks, by rounds.

    Raises:
        ValueError: more ranks than letters; the ranks wait for each other.
    """
    if not 1 <= size <= MAX_RANKS:
        raise ValueError(f"expected 1 to {MAX_RANKS} ranks, got {size}")
    sent = list(transfers(schedule, size))
    num_parts = math.lcm(*(piece.of for one in sent for piece in (one.sent, one.received)))
    start = [_held_at_first(collective, rank, num_parts) for rank in range(size)]
    held = [list(cells) for cells in start]
    before = [(0, cells) for cells in start]  # the number of a rank's step, and its cells when that started
    messages = []
    for one in sent:
        for rank, number in ((one.sender, one.sent_in), (one.receiver, one.received_in)):
            if before[rank][0] != number:
                before[rank] = number, list(held[rank])
        place = cells_of(one.received, num_parts)
        content = before[one.sender][1][cells_of(one.sent, num_parts)]
        cells = [
            _combine(own, new, one.then) for own, new in zip(held[one.receiver][place], content, strict=True)
        ]
        is_first = not any(held[one.receiver])
        held[one.receiver][place] = cells
        where = one.sender, one.receiver, one.sent, one.received
        messages.append(Message(int(one.end), *where, tuple(cells), one.then, is_first))
    return Played(num_parts, start, sorted(messages, key=lambda message: (message.round, message.sender)))


def cells_of(piece: Piece, num_parts: int) -> slice:
    """The position of ``piece`` in x that is cut more finely."""
    return slice(piece.first * num_parts // piece.of, piece.end * num_parts // piece.of)


def _combine(own: str, received: str, then: Then) -> str:
    match then:
        case "copy":
            return received
        case "own + received":
            return own + received
        case "received + own":
            return received + own
        case "in rank order":  # an addend that arrives early is shown where it will be added
            return "".join(sorted(own + received))


def _held_at_first(collective: str, rank: int, num_parts: int) -> list[str]:
    """The useful parts of x: a rank's own in a gather, the root's in a broadcast, else all."""
    letter = ascii_lowercase[rank]
    match collective:
        case "all_gather" | "gather":
            return [letter if index == rank else "" for index in range(num_parts)]
        case "broadcast" | "scatter":
            return [letter if rank == 0 else ""] * num_parts
        case _:
            return [letter] * num_parts
