"""torch.distributed's send and receive, matched by tags, over mailboxes.

A send copies its tensor into memory of the sender and is complete (``mailboxes.py``); a receive copies it
from there. There is no thread: a rank that waits takes all messages that have arrived, each for the oldest
receive with its tag; the others stay until a receive asks for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from instep.errors import Desync, InstepError, PeerLost
from instep.net.lane import Work
from instep.shm.group_segment import TORCH
from instep.shm.heap import Heap
from instep.shm.mailboxes import Letter, Mailboxes
from instep.shm.rounds import Arrival, Rounds

FLUSH_S = 10.0  # for messages to be received when their sender leaves: their memory ends with it
DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)


class PointToPoint:
    """Sends and receives of one rank of a group; for any thread."""

    def __init__(self, rounds: Rounds, heap: Heap) -> None:
        self.shared, self.ranks, self.peers = rounds.shared, rounds.ranks, rounds.peers
        self.boxes = Mailboxes(rounds, heap, TORCH)
        self.lock = threading.RLock()
        self._waiting: list[Receive] = []  # the oldest first

    def send(self, x: Tensor, destination: int, tag: int) -> Work:
        """Send ``x``, which may change at once."""
        self._require_peers([destination])
        with self.lock:
            self.boxes.send(destination, tag, [DTYPES.index(x.dtype), x.numel()], [x])
        work = Work(f"send to rank {self.ranks[destination]}, tag {tag}")
        work.end()
        return work

    def receive(self, x: Tensor, sources: Sequence[int], tag: int) -> Receive:
        """Receive into ``x`` the next message with ``tag`` from one of ``sources``."""
        self._require_peers(sources)
        receive = Receive(self, x, sources, tag)
        with self.lock:
            self.shared.require_usable()
            self._waiting.append(receive)
        return receive

    def progress(self) -> None:
        """Copy the messages that have arrived into the receives that wait for them."""
        with self.lock:
            for receive in list(self._waiting):
                for source in receive.sources:
                    while receive in self._waiting and (
                        letter := self.boxes.poll(source, receive.tag, receive.operation)
                    ):
                        # An older one may wait for it, too, for which it had not arrived a moment ago.
                        oldest = next(
                            r for r in self._waiting if r.tag == receive.tag and source in r.sources
                        )
                        self._waiting.remove(oldest)
                        self._deliver(oldest, source, letter)

    def fail(self, receive: Receive, error: PeerLost) -> None:
        """``receive`` ends with ``error``, and so does everything that follows on the group."""
        with self.lock, suppress(ValueError):
            self._waiting.remove(receive)
        self.shared.fail(error)
        if not receive.happened:
            receive.end(error)

    def close(self) -> None:
        """End all receives that wait; the group is closed."""
        with self.lock:
            waiting, self._waiting = self._waiting, []
        for receive in waiting:
            receive.end(self.shared.error)

    def flush(self) -> None:
        """Wait until all messages have been received, at most ``FLUSH_S``."""
        with self.lock, suppress(InstepError):
            self.boxes.flush("the end of a group", min(FLUSH_S, self.peers.timeout_s))

    def _deliver(self, receive: Receive, source: int, letter: Letter) -> None:
        (dtype, count), (data,) = letter.words, letter.parts
        x, receive.source = receive.x, source
        if (DTYPES[dtype], count) != (x.dtype, x.numel()):
            error = Desync(
                f"rank {self.ranks[source]} sends {count} {DTYPES[dtype]} with tag {receive.tag}, rank "
                f"{self.ranks[self.shared.rank]} receives {x.numel()} {x.dtype} with the same tag: give both "
                "the same shape and dtype"
            )
            self.shared.fail(error)
            receive.end(error)
            return
        with torch.inference_mode(x.is_inference()):
            x.detach().copy_(data.view(x.dtype).view(x.shape))
        receive.end()

    def _require_peers(self, ranks: Sequence[int]) -> None:
        self.shared.require_own()
        others = set(range(self.shared.size)) - {self.shared.rank}
        if not ranks or not others.issuperset(ranks):
            me = f"rank {self.shared.rank} of a group of {self.shared.size}"
            raise ValueError(f"{me}: expected another rank, got {', '.join(map(str, ranks)) or 'none'}")


class Receive(Work):
    """A receive of a message for ``x`` from any of ``sources``; ``source`` is the rank that sent it.

    The thread that waits for it, or asks whether it is done, takes the messages that have arrived.
    """

    def __init__(self, owner: PointToPoint, x: Tensor, sources: Sequence[int], tag: int) -> None:
        names = " or ".join(str(owner.ranks[source]) for source in sources)
        super().__init__(f"receive from rank {names}, tag {tag}")
        self.x, self.sources, self.tag, self.source = x, tuple(sources), tag, -1
        self._owner = owner

    def done(self) -> bool:
        if not self.happened:
            self._owner.progress()
        return self.happened

    def arrive(self, timeout_s: float | None = None) -> bool:
        owner = self._owner
        until = float("inf") if timeout_s is None else time.monotonic() + timeout_s

        def is_over() -> bool:
            return self.happened or time.monotonic() >= until

        try:
            while not self.done() and not is_over():
                with owner.lock:
                    awaited = {source: owner.boxes.next_word(source) for source in self.sources}
                Arrival(
                    owner.shared, owner.peers, awaited, self.operation, any_of=True, cancelled=is_over
                ).wait_by_deadline()
        except PeerLost as error:
            owner.fail(self, error)
        return self.happened
