"""A worker as its supervisor sees it."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from instep.elastic.member import MESSAGE_BYTES, Seat
from instep.elastic.memory import Place
from instep.elastic.page import Page
from instep.elastic.stuck import Reading
from instep.mesh.child import STACKS_SIGNAL, Child
from instep.mesh.peers import is_stopped

HANDLE_S = 1.0  # for a descriptor to follow its message
STACKS_S = 0.5  # for a process to write its stacks down


@dataclass
class Worker:
    """One process: ``free`` while it waits for a seat, ``rank`` its last seat's (-1: none so far)."""

    child: Child
    pid: int
    slot: int  # in the page
    connection: Connection
    page: Page
    rank: int = -1
    generation: int = 0
    free: bool = False
    named_since: float | None = None  # when somebody said that it has waited for it in vain
    killed: str = ""  # why the supervisor has killed it
    dismissed: bool = False
    stacks: str = ""
    hung_up: bool = False
    _stopped_since: float | None = field(default=None, repr=False)

    @property
    def number(self) -> int:
        return self.child.number

    @property
    def place(self) -> int:
        """Its rank; before it has one, which of those that were started it is."""
        return self.rank if self.rank >= 0 else self.number

    def hear(self) -> dict[str, Any] | None:
        """Its next message, with the descriptor that it may have sent along; None if it has hung up."""
        try:
            message: dict[str, Any] = json.loads(self.connection.recv_bytes(MESSAGE_BYTES))
            if message["say"] == "memory":
                if not self.connection.poll(HANDLE_S):
                    raise EOFError("it has stopped between a message and what belongs to it")
                fd = reduction.recv_handle(self.connection)
                message["place"] = Place(os.getpid(), fd, message["inode"])
        except (EOFError, OSError, RuntimeError, ValueError):
            self.hung_up = True
            return None
        return message

    def give(self, seat: Seat | None) -> None:
        """Let it sit down, or leave."""
        self.free = False
        if seat is not None:
            self.rank, self.generation = seat.rank, seat.generation
        with suppress(OSError):  # it has died; that is noticed elsewhere
            self.connection.send_bytes(b"" if seat is None else seat.to_bytes())

    def read(self, generation: int, over_s: float) -> Reading:
        """Where it is; ``generation`` is the one that is wanted, all before have been over for ``over_s``."""
        stopped, now = is_stopped(self.pid), time.monotonic()
        if not stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        stopped_s = 0.0 if self._stopped_since is None else now - self._stopped_since
        left_behind = 0 < self.generation < generation and not self.free
        return Reading(self.page.position(self.slot), stopped_s, over_s if left_behind else 0.0)

    def kill(self, why: str, *, ask: bool = True) -> None:
        """End it; ``ask`` it for its stacks first, which it gives whatever holds its interpreter."""
        self.killed = why
        if ask and not is_stopped(self.pid):
            self.stacks = self._ask_stacks()
        self.end()

    def end(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _ask_stacks(self) -> str:
        with suppress(OSError):
            os.kill(self.pid, STACKS_SIGNAL)
            until, before = time.monotonic() + STACKS_S, ""
            while time.monotonic() < until:
                text = self.child.stacks.read_text(errors="replace")
                if "Current thread" in text and text == before:  # it is the last, and it is whole
                    return text
                before = text
                time.sleep(0.01)
        return ""
