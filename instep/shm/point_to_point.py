"""torch.distributed's messages from one rank to another, told apart by tags, over mailboxes.

A send copies its tensor into memory of the sender, and has ended (``mailboxes.py``); a receive copies it from
there. No thread is needed: a rank that waits for a message takes all that have come, each for the receive
that was asked for first with its tag; the others stay until they are asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

from instep.errors import Desync, InstepError, PeerLost
from instep.mesh.peers import Peers
from instep.shm.arguments import check, dtype_name, plain, require_writable
from instep.shm.call import DTYPES
from instep.shm.group_segment import HERE, LEFT, GroupSegment
from instep.shm.heap import Heap
from instep.shm.mailboxes import Letter, Mailboxes
from instep.shm.rounds import gone
from instep.work import Work

SLEEP_S = 0.001  # of a rank that waits for any of several others, between two looks
FLUSH_S = 10.0  # for messages to be received when their sender leaves: their memory goes with it


class PointToPoint:
    """What one rank sends to, and receives from, the others of its group; for any thread."""

    def __init__(
        self, shared: GroupSegment, heap: Heap, ranks: Sequence[int], peers: Peers, num_cores: int
    ) -> None:
        self.shared, self.ranks, self.peers = shared, ranks, peers
        self.closed = False
        self.boxes = Mailboxes(shared, heap, peers, num_cores, shared.channel_word)
        self.lock = threading.RLock()
        self._waiting: list[Receive] = []  # the oldest first

    def send(self, x: Tensor, destination: int, tag: int) -> Work:
        """Send ``x``; it may be changed at once."""
        check(x)
        self._require(destination)
        work = Work(f"send to rank {self.ranks[destination]}, tag {tag}")
        words = [DTYPES.index(dtype_name(x)), x.numel()]
        error: InstepError | None = None
        with self.lock:
            try:
                self.boxes.send(destination, tag, words, [plain(x)])
            except InstepError as before:  # the group has failed
                error = before
        work.end(error)
        return work

    def receive(self, x: Tensor, sources: Sequence[int], tag: int) -> Receive:
        """Receive into ``x`` the next message with ``tag`` from one of ``sources``."""
        check(x)
        require_writable(x)
        for source in sources:
            self._require(source)
        if not sources:
            raise ValueError("there is no other rank in this group to receive from")
        receive = Receive(self, x, sources, tag)
        if self.shared.error is not None or self.closed:
            receive.end(self.shared.error or self._left(receive.operation))
            return receive
        with self.lock:
            self._waiting.append(receive)
        return receive

    def progress(self) -> None:
        """Give what has come to the receives that wait for it."""
        with self.lock:
            for receive in list(self._waiting):
                for source in receive.sources:
                    letter = self.boxes.poll(source, receive.tag, receive.operation)
                    if letter is not None:
                        self._waiting.remove(receive)
                        self._give(receive, source, letter)
                        break

    def fail(self, receive: Receive, error: PeerLost) -> None:
        """``receive`` ends with ``error``, and after that nothing of the group works."""
        with self.lock, suppress(ValueError):
            self._waiting.remove(receive)
        if not self.closed:
            self.shared.fail(error)
        if not receive.happened:
            receive.end(error)

    def close(self) -> None:
        """What waits has ended."""
        self.closed = True
        with self.lock:
            waiting, self._waiting = self._waiting, []
        for receive in waiting:
            receive.end(self._left(receive.operation))

    def flush(self) -> None:
        """Wait until all that was sent has been received, ``FLUSH_S`` at most."""
        with self.lock, suppress(InstepError):
            self.boxes.flush("the end of a group", min(FLUSH_S, self.peers.timeout_s))

    def _give(self, receive: Receive, source: int, letter: Letter) -> None:
        (dtype, count), (data,) = letter.words, letter.parts
        x, receive.source = receive.x, source
        if (DTYPES[dtype], count) != (dtype_name(x), x.numel()):
            error = Desync(
                f"rank {self.ranks[source]} sends {count} {DTYPES[dtype]} with tag {receive.tag}, rank "
                f"{self.ranks[self.shared.rank]} receives {x.numel()} {dtype_name(x)} with tag "
                f"{receive.tag}: give both the same shape and dtype"
            )
            self.shared.fail(error)
            receive.end(error)
            return
        with torch.inference_mode(x.is_inference()):
            x.detach().copy_(data.view(getattr(torch, DTYPES[dtype])).view(x.shape))
        receive.end()

    def _left(self, label: str) -> PeerLost:
        return PeerLost(f"rank {self.ranks[self.shared.rank]} left the group during {label}", operation=label)

    def _require(self, rank: int) -> None:
        self.shared.require_own()
        if not 0 <= rank < self.shared.size or rank == self.shared.rank:
            raise ValueError(
                f"rank {self.shared.rank} of a group of {self.shared.size}: expected another rank, got {rank}"
            )


class Receive(Work):
    """A receive that waits for a message for ``x`` from any of ``sources``; ``source`` is who sent it.

    The thread that waits for it, or asks whether it is done, takes what has come.
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
        peers, arrival = self._owner.peers, _Arrival(self, self._owner, timeout_s)
        try:
            peers.wait(arrival, self.operation, missing=arrival.missing)
        except PeerLost as error:
            self._owner.fail(self, error)
        return self.happened


class _Arrival:
    """What ``Peers.wait`` waits for: a receive, or ``timeout_s``."""

    def __init__(self, receive: Receive, owner: PointToPoint, timeout_s: float | None) -> None:
        self._receive, self._owner = receive, owner
        self._until = None if timeout_s is None else time.monotonic() + timeout_s
        self._lost: PeerLost | None = None

    def is_completed(self) -> bool:
        """Whether waiting is over, one way or the other."""
        passed = self._until is not None and time.monotonic() >= self._until
        return self._lost is not None or self._receive.done() or passed

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """Sleep until it is; ``TimeoutError`` after a while."""
        if self._lost is not None:
            raise self._lost
        until = time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            if (left_s := until - time.monotonic()) <= 0:
                raise TimeoutError
            self._sleep(left_s if self._until is None else min(left_s, self._until - time.monotonic()))
        return True

    def missing(self) -> list[int]:
        """The sources that can still send."""
        if self._receive.done():
            return []
        return [source for source in self._receive.sources if self._owner.shared.state(source) != LEFT]

    def _sleep(self, seconds: float) -> None:
        sources, owner = self._receive.sources, self._owner
        with owner.lock:
            places = [owner.boxes.next_word(source) for source in sources]
        if any(words[word] >= value for words, word, value in places):
            return
        states = [owner.shared.state(source) for source in sources]
        stays = [place for place, state in zip(places, states, strict=True) if state == HERE]
        if not stays and not self._receive.done():
            self._lost = gone(owner.shared, owner.peers, sources[0], self._receive.operation)
            raise self._lost
        if stays:
            words, word, value = stays[0]
            words.sleep(word, value, seconds if len(stays) == 1 else min(seconds, SLEEP_S))
