"""Plays a schedule on all ranks, with letters in the place of numbers: who holds what after each round.

Rank 0's addends are "a", rank 1's "b"; a sum is the letters of its addends, in the order in which they were
added. A message takes one round, and a rank sends one and receives one at a time: the alpha-beta model with
alpha = 1 and beta = 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from instep.comm.schedule import Piece, Schedule, Step, Then

State = list[list[str]]  # [rank][part of x]: the letters of what is there; "" is nothing of any use

MAX_RANKS = len(ascii_lowercase)


@dataclass(frozen=True)
class Message:
    """What went from one rank to another in one round, and what the receiver has in its place afterwards."""

    round: int
    sender: int
    receiver: int
    piece: Piece
    cells: tuple[str, ...]  # of all parts of the piece, in the finest cut of the schedule


@dataclass(frozen=True)
class Played:
    """A schedule that was played to its end, on x cut into ``num_parts``."""

    num_parts: int
    start: State
    messages: list[Message]

    @property
    def num_rounds(self) -> int:
        return max((message.round for message in self.messages), default=0)

    def rounds(self) -> Iterator[tuple[list[Message], State]]:
        """The messages of each round, and who holds what after it."""
        held = [list(cells) for cells in self.start]
        for number in range(1, self.num_rounds + 1):
            sent = [message for message in self.messages if message.round == number]
            for message in sent:
                held[message.receiver][cells_of(message.piece, self.num_parts)] = message.cells
            yield sent, [list(cells) for cells in held]

    def parts_sent(self, rank: int) -> int:
        """How many of the parts of x ``rank`` sends, those that it sends twice counted twice."""
        return sum(len(message.cells) for message in self.messages if message.sender == rank)


def play(collective: str, schedule: Schedule, size: int) -> Played:
    """Every message of ``schedule`` on ``size`` ranks, by rounds.

    Raises:
        ValueError: there are no letters for so many ranks; the ranks wait for each other.
    """
    if not 1 <= size <= MAX_RANKS:
        raise ValueError(f"expected 1 to {MAX_RANKS} ranks, got {size}")
    pieces = [piece for rank in range(size) for step in schedule(rank, size) for _, piece in _all(step)]
    num_parts = math.lcm(*(piece.of for piece in pieces))
    start = [_held_at_first(collective, rank, num_parts) for rank in range(size)]
    players = [_Player(schedule(rank, size), list(cells)) for rank, cells in enumerate(start)]
    messages: list[Message] = []
    while passed := [found for rank in range(size) if (found := _next_into(rank, players, num_parts))]:
        messages += passed
    if waiting := [rank for rank, player in enumerate(players) if not player.done]:
        raise ValueError(f"ranks {waiting} wait for messages that no rank sends")
    return Played(num_parts, start, sorted(messages, key=lambda message: (message.round, message.sender)))


def cells_of(piece: Piece, num_parts: int) -> slice:
    """Where ``piece`` lies in x that is cut more finely."""
    return slice(piece.first * num_parts // piece.of, piece.end * num_parts // piece.of)


class _Player:
    """One rank: its step, how many of the step's messages are out and in, and in which round the last was."""

    def __init__(self, steps: Iterator[Step], held: list[str]) -> None:
        self.steps, self.held = steps, held
        self.step, self.begun_with = Step(), list(held)
        self.num_out = self.num_in = 0
        self.out_round = self.in_round = 0
        self.done = False
        self.go_on()

    def go_on(self) -> None:
        """To the next step, if this one is done."""
        while not self.done and (self.num_out, self.num_in) == (
            len(self.step.sends),
            len(self.step.receives),
        ):
            following = next(self.steps, None)
            self.done = following is None
            self.step, self.begun_with = following or Step(), list(self.held)
            self.num_out = self.num_in = 0
            self.out_round = self.in_round = max(self.out_round, self.in_round)

    @property
    def outgoing(self) -> tuple[int, Piece] | None:
        return self.step.sends[self.num_out] if self.num_out < len(self.step.sends) else None

    @property
    def incoming(self) -> tuple[int, Piece] | None:
        return self.step.receives[self.num_in] if self.num_in < len(self.step.receives) else None


def _next_into(rank: int, players: Sequence[_Player], num_parts: int) -> Message | None:
    """The next message that ``rank`` receives, if both sides have come to it."""
    receiver = players[rank]
    if receiver.incoming is None:
        return None
    source, piece = receiver.incoming
    sender = players[source]
    if sender.outgoing is None or sender.outgoing[0] != rank:
        return None
    place = cells_of(piece, num_parts)
    came = sender.begun_with[cells_of(sender.outgoing[1], num_parts)]
    pairs = zip(receiver.held[place], came, strict=True)
    receiver.held[place] = [_become(own, letters, receiver.step.then) for own, letters in pairs]
    sender.out_round = receiver.in_round = 1 + max(sender.out_round, receiver.in_round)
    sender.num_out += 1
    receiver.num_in += 1
    message = Message(receiver.in_round, source, rank, piece, tuple(receiver.held[place]))
    sender.go_on()
    receiver.go_on()
    return message


def _become(own: str, received: str, then: Then) -> str:
    match then:
        case "copy":
            return received
        case "own + received":
            return own + received
        case "received + own":
            return received + own
        case "in rank order":  # what came before its turn waits; it is shown where it will be added
            return "".join(sorted(own + received))


def _held_at_first(collective: str, rank: int, num_parts: int) -> list[str]:
    """What counts of x: its own part in an all-gather, nothing but the root's in a broadcast."""
    letter = ascii_lowercase[rank]
    match collective:
        case "all_gather":
            return [letter if index == rank else "" for index in range(num_parts)]
        case "broadcast":
            return [letter if rank == 0 else ""] * num_parts
        case _:
            return [letter] * num_parts


def _all(step: Step) -> list[tuple[int, Piece]]:
    return [*step.sends, *step.receives]
