"""A worker's line to its supervisor: it asks for a seat, and says what becomes of it. JSON over a pipe."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from instep.elastic.memory import Copy, Kept, Place
from instep.elastic.page import Page
from instep.elastic.pulse import Pulse

MESSAGE_BYTES = 1 << 20
CONFIRM_S = 1.0


@dataclass(frozen=True)
class Desk:
    """What a new worker is given: its number, the shared page, and its end of the pipe."""

    worker: int
    page: Path
    connection: Connection


@dataclass(frozen=True)
class Seat:
    """A worker's place in one generation of the group.

    ``store`` is the file in which its ranks meet; ``memory`` are the memory copies that there are.
    """

    generation: int
    rank: int
    world_size: int
    store: str
    memory: tuple[Kept, ...] = ()

    def to_bytes(self) -> bytes:
        """As it travels."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Seat:
        """What ``to_bytes`` wrote."""
        fields: dict[str, Any] = json.loads(data)
        memory = fields.pop("memory")
        return Seat(
            **fields, memory=tuple(Kept(**{**kept, "place": Place(**kept["place"])}) for kept in memory)
        )


class Member:
    """One worker, as the supervisor knows it."""

    def __init__(self, desk: Desk) -> None:
        self.page = Page(desk.page)
        self.pulse = Pulse(self.page, desk.worker)
        self.generation = 0
        self._connection = desk.connection

    def sit(self, **why: Any) -> Seat | None:
        """Ask for a seat, saying ``why``, and wait for it; None: this worker is not needed any more."""
        self.say("free", **why)
        try:
            data = self._connection.recv_bytes(MESSAGE_BYTES)
        except (EOFError, OSError):  # the supervisor has ended
            return None
        if not data:
            return None
        seat = Seat.from_bytes(data)
        self.generation = seat.generation
        return seat

    def say(self, what: str, **fields: Any) -> None:
        """Tell the supervisor; nothing happens if it has ended, because then this process ends too."""
        message = {"say": what, "generation": self.generation, **fields}
        with suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def hand_over(self, copy: Copy, rank: int = 0, num_ranks: int = 1, generation: int | None = None) -> None:
        """Let the supervisor hold the memory of ``copy``, which then outlives this process.

        It is that of ``rank``, one of ``num_ranks`` that make up the state, in a set of copies that was begun
        in ``generation``, or now.
        """
        begun = self.generation if generation is None else generation
        self.say("memory", inode=copy.mapping.inode, rank=rank, num_ranks=num_ranks, generation=begun)
        with suppress(OSError):
            reduction.send_handle(self._connection, copy.mapping.fd, None)

    @property
    def is_over(self) -> bool:
        """Whether this generation has lost a member."""
        return self.page.over >= self.generation

    def over_soon(self) -> bool:
        """The same, giving the supervisor a moment to notice what this rank has noticed first."""
        until = time.monotonic() + CONFIRM_S
        while not self.is_over and time.monotonic() < until:
            time.sleep(0.01)
        return self.is_over

    @property
    def regroup(self) -> bool:
        """Whether the supervisor wants this generation to end between two steps."""
        return self.page.regroup >= self.generation
