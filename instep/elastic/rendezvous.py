"""The rendezvous of a generation, as a worker takes part in it.

A *generation* is one group of workers, from their rendezvous until one of them is lost. A worker asks for an
assignment, a rank in the next generation, and the supervisor answers when all of its ranks are ready. The two
talk over a control channel, JSON over a pipe; descriptors of memory travel on it too.

    worker       ready ------------>        <--- Assignment(generation 3, rank 1 of 2, store)    meets, trains
    supervisor            waits until all are ready

The ranks then meet in a store (``log_store.py``), where they wait for each other's addresses.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from instep.elastic.heartbeat import Heartbeat, HeartbeatPage
from instep.elastic.snapshot import Snapshot, SnapshotHandle
from instep.launch.memory_file import MemoryFile
from instep.launch.rank_process import exit_now

MESSAGE_BYTES = 1 << 20
CONFIRM_S = 1.0  # for the supervisor to notice what a rank has noticed first


@dataclass(frozen=True)
class WorkerSpec:
    """What a new worker is given: its line of the heartbeat page, and its end of the control channel.

    ``place`` is its local rank of ``num_places``, and with it its GPU; a spare (None) asks for it.
    """

    worker: int
    page: MemoryFile
    connection: Connection
    place: int | None = 0
    num_places: int = 1


@dataclass(frozen=True)
class Assignment:
    """A worker's rank in one generation, and its local rank (``place``), which it keeps for life.

    ``store`` is the memory in which its ranks meet (``LogStore``); ``memory`` are the snapshots that the
    supervisor holds; ``told`` is what it has answered to those that came first (``SuperviseOptions.admit``).
    """

    generation: int
    rank: int
    world_size: int
    store: MemoryFile
    memory: tuple[SnapshotHandle, ...] = ()
    told: str = ""
    place: int = 0

    def to_bytes(self) -> bytes:
        """As it travels."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Assignment:
        """What ``to_bytes`` wrote."""
        fields: dict[str, Any] = json.loads(data)
        store, memory = fields.pop("store"), fields.pop("memory")
        return Assignment(
            **fields,
            store=MemoryFile(**store),
            memory=tuple(
                SnapshotHandle(**{**handle, "place": MemoryFile(**handle["place"])}) for handle in memory
            ),
        )


class ControlChannel:
    """A worker's end of the channel to its supervisor, and its heartbeat.

    ``generation`` is that of the last assignment, 0 before the first.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.page = HeartbeatPage(spec.page)
        self.heartbeat = Heartbeat(self.page, spec.worker)
        self.generation = 0
        self.num_places = spec.num_places
        self._place = spec.place
        self._connection = spec.connection

    def place(self) -> int:
        """The local rank of this worker; a spare waits until it gets that of a lost rank, or ends."""
        if self._place is None:
            self.heartbeat.enter("spare")
            self.say("place")
            try:
                self._place = int(json.loads(self._connection.recv_bytes(MESSAGE_BYTES)))
            except (EOFError, OSError):  # the supervisor has ended
                exit_now(0)
            self.heartbeat.enter("script")
        return self._place

    def next_assignment(self, **why: Any) -> Assignment | None:
        """Say that this worker is ready, and ``why``, and wait for its rank; None: it is not needed more."""
        self.say("ready", **why)
        try:
            data = self._connection.recv_bytes(MESSAGE_BYTES)
        except (EOFError, OSError):  # the supervisor has ended
            return None
        if not data:
            return None
        assignment = Assignment.from_bytes(data)
        self.generation = assignment.generation
        return assignment

    def say(self, what: str, **fields: Any) -> None:
        """Tell the supervisor; nothing happens if it has ended, because then this process ends too."""
        message = {"say": what, "generation": self.generation, **fields}
        with suppress(OSError):
            self._connection.send_bytes(json.dumps(message).encode())

    def hand_over(
        self, snapshot: Snapshot, rank: int = 0, num_ranks: int = 1, generation: int | None = None
    ) -> None:
        """Let the supervisor hold the memory of ``snapshot``, which then outlives this process.

        It is that of ``rank``, one of ``num_ranks`` that make up the state, in a set of snapshots that was
        begun in ``generation``, or now.
        """
        begun = self.generation if generation is None else generation
        self.say("snapshot", inode=snapshot.mapping.inode, rank=rank, num_ranks=num_ranks, generation=begun)
        with suppress(OSError):
            reduction.send_handle(self._connection, snapshot.mapping.fd, None)

    @property
    def is_over(self) -> bool:
        """Whether this generation has lost a rank."""
        return self.page.over >= self.generation

    def is_over_soon(self) -> bool:
        """The same, giving the supervisor a moment to notice what this rank has noticed first."""
        until = time.monotonic() + CONFIRM_S
        while not self.is_over and time.monotonic() < until:
            time.sleep(0.01)
        return self.is_over

    @property
    def regroup(self) -> bool:
        """Whether the supervisor wants this generation to end between two steps."""
        return self.page.regroup >= self.generation
