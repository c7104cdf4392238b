"""Messages from one rank to another, told apart by tags.

Each pair of ranks has a pipe: a ring of bytes in memory of the sender, and two counters.

    read                written          both only grow; their difference is what lies in the ring,
     |---- message ---->|                and either side waits for the other's
    [. . . . . . . . . . . . . . . . ]

A message is a head and its bytes. It may be longer than the ring: then the sender goes on as the receiver
makes room. It is sent when its receiver has taken it, and a receiver takes messages while it waits for any
from that sender: those that it did not ask for yet are kept until it does, so tags may be asked for in any
order. Every sender and every receiver of a pair has a thread, from its first message on.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instep.errors import Desync, PeerLost
from instep.memory import tensor_of
from instep.mesh.axes import round_up
from instep.mesh.peers import Peers
from instep.shm import segment
from instep.shm.arguments import check, dtype_name, flat_bytes, is_plain, plain, require_writable
from instep.shm.call import DTYPES
from instep.shm.futex import Words
from instep.shm.group_segment import LEFT, LINE, PAGE, WORD, GroupSegment
from instep.shm.rounds import Arrival, reaching
from instep.shm.segment import Mapping
from instep.work import Lane, Work

RING_BYTES = 1 << 20
# Sender and receiver work at the same time on different parts of the ring.
STEP_BYTES = RING_BYTES // 4
WRITTEN, READ = 0, LINE // WORD
JOIN_S = 1.0  # a thread may hold what the closing one holds too
_HEAD = struct.Struct("<3q")


class PointToPoint:
    """What one rank sends to, and receives from, the others of its group."""

    def __init__(self, shared: GroupSegment, ranks: Sequence[int], peers: Peers) -> None:
        self.shared = shared
        self.ranks = ranks
        self.peers = peers
        self.lock = threading.Condition()
        self.closed = False
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}

    def send(self, x: Tensor, destination: int, tag: int) -> Work:
        """Send ``x``; it must not be changed before the work has ended."""
        check(x)
        self._require(destination)
        with self.lock:
            if destination not in self._senders:
                self._senders[destination] = Sender(self, destination)
        return self._senders[destination].send(x, tag)

    def receive(self, x: Tensor, sources: Sequence[int], tag: int) -> Request:
        """Receive into ``x`` the next message with ``tag`` from one of ``sources``."""
        check(x)
        require_writable(x)
        for source in sources:
            self._require(source)
        if not sources:
            raise ValueError("there is no other rank in this group to receive from")
        names = " or ".join(str(self.ranks[source]) for source in sources)
        request = Request(x, sources, tag, f"receive from rank {names}, tag {tag}")
        if self.shared.error is not None or self.closed:
            request.work.end(self.shared.error or self.left(request.work.operation))
            return request
        for source in sources:
            with self.lock:
                if source not in self._receivers:
                    self._receivers[source] = Receiver(self, source)
            self._receivers[source].ask(request)
        return request

    def close(self) -> None:
        """End all threads, once they see it."""
        with self.lock:
            self.closed = True
            self.lock.notify_all()
        for sender in self._senders.values():
            sender.lane.close()
        for receiver in self._receivers.values():
            if receiver.thread is not threading.current_thread():  # which may be collecting the group
                receiver.thread.join(JOIN_S)

    def wait(self, words: Words, rank: int, word: int, value: int, label: str) -> None:
        """Block until a word of ``rank`` is at least ``value``."""
        if words[word] < value:
            arrival = Arrival(self.shared, self.peers, words, {rank: word}, value, label)
            self.peers.wait(arrival, label, missing=arrival.missing)

    def left(self, label: str) -> PeerLost:
        """What an operation ends with that was under way when this rank left."""
        return PeerLost(f"rank {self.ranks[self.shared.rank]} left the group during {label}", operation=label)

    def _require(self, rank: int) -> None:
        self.shared.require_own()
        if not 0 <= rank < self.shared.size or rank == self.shared.rank:
            raise ValueError(
                f"rank {self.shared.rank} of a group of {self.shared.size}: expected another rank, got {rank}"
            )


class Request:
    """A receive that waits for a message for ``x`` from any of ``sources``; ``source`` is who sent it."""

    def __init__(self, x: Tensor, sources: Sequence[int], tag: int, label: str) -> None:
        self.x = x
        self.sources = set(sources)
        self.tag = tag
        self.work = Work(label)
        self.source = -1
        self.claimed = False


class Sender:
    """The way from this rank to ``destination``."""

    def __init__(self, owner: PointToPoint, destination: int) -> None:
        self._owner = owner
        self._destination = destination
        self._channel: Channel | None = None
        self._label = f"send to rank {owner.ranks[destination]}"
        self.lane = Lane(f"instep shm {self._label}")

    def send(self, x: Tensor, tag: int) -> Work:
        """Queue a message."""

        def run() -> None:
            self._owner.shared.require()
            if self._channel is None:
                self._open()
            assert self._channel is not None
            try:
                head = MessageHead.of(x, tag)
                self._channel.write(tensor_of(head.to_bytes(), torch.uint8))
                self._channel.write(flat_bytes(plain(x)))
                self._channel.flush()
            except BaseException as error:
                self._owner.shared.fail(error)
                raise

        return self.lane.submit(f"{self._label}, tag {tag}", run)

    def _open(self) -> None:
        shared = self._owner.shared
        channel = Channel.create(self._wait)
        self._channel = channel
        word = shared.channel_word(shared.rank, self._destination)
        shared.words.post(word + 1, channel.inode)  # a descriptor's number may be another file's some day
        shared.words.post(word, channel.fd + 1)

    def _wait(self, word: int, value: int) -> None:
        assert self._channel is not None
        self._owner.wait(self._channel.words, self._destination, word, value, self._label)


class Receiver:
    """The way from ``source`` to this rank: receives that wait, and messages that no receive waits for."""

    def __init__(self, owner: PointToPoint, source: int) -> None:
        self._owner = owner
        self._source = source
        self._channel: Channel | None = None
        self._requests: list[Request] = []
        self._kept: list[tuple[MessageHead, Tensor]] = []
        self._ended: BaseException | None = None
        self._label = f"receive from rank {owner.ranks[source]}"
        self.thread = threading.Thread(target=self._serve, name=f"instep shm {self._label}", daemon=True)
        self.thread.start()

    def ask(self, request: Request) -> None:
        """Give ``request`` the message that was kept for it, or let it wait."""
        with self._owner.lock:
            kept = next((item for item in self._kept if item[0].tag == request.tag), None)
            if request.claimed:
                return
            if kept is None:
                self._requests.append(request)
                self._owner.lock.notify_all()
            else:
                request.claimed = True
                self._kept.remove(kept)
        if kept is not None:
            self._give(request, *kept)
        elif self._ended is not None:
            self._give_up(self._ended)

    def _serve(self) -> None:
        error: BaseException | None = None
        while error is None and (first := self._oldest()) is not None:
            try:
                self._take(first)
            except BaseException as raised:
                error = raised
        self._ended = error or self._owner.left(self._label)
        self._give_up(self._ended)

    def _give_up(self, error: BaseException) -> None:
        """Nothing comes from this source any more: a request without another one ends with ``error``."""
        owner = self._owner
        with owner.lock:
            waiting, self._requests = [r for r in self._requests if not r.claimed], []
            for request in waiting:
                request.sources.discard(self._source)
            lost = [request for request in waiting if not request.sources or owner.closed]
            for request in lost:
                request.claimed = True
        # A rank that has left the group is missed only by those who wait for it alone.
        if not owner.closed and (lost or owner.shared.state(self._source) != LEFT):
            owner.shared.fail(error)
        for request in lost:
            request.work.end(error)

    def _oldest(self) -> Request | None:
        """The first request that still waits; None when the group is closed."""
        with self._owner.lock:
            while not self._owner.closed:
                self._requests = [request for request in self._requests if not request.claimed]
                if self._requests:
                    return self._requests[0]
                self._owner.lock.wait()
        return None

    def _take(self, first: Request) -> None:
        """Read one message, for a request that waits for it; none if another source serves ``first``."""
        if self._channel is None:
            shared = self._owner.shared
            word = shared.channel_word(self._source, shared.rank)
            if not self._await(first, shared.words, word, 1):
                return
            peers = self._owner.peers
            with reaching(shared, peers, self._source, first.work.operation):
                pid, inode = peers.table[self._source].pid, shared.words[word + 1]
                mapping = segment.attach(pid, shared.words[word] - 1, inode)
            self._channel = Channel(mapping, self._wait)
        words = self._channel.words
        if not self._await(first, words, WRITTEN, words[READ] + 1):
            return
        data = bytearray(LINE)
        self._channel.read(torch.frombuffer(data, dtype=torch.uint8))
        head = MessageHead.from_bytes(bytes(data))
        request = self._claim(head, None)
        try:
            self._read(head, request)
        except BaseException as error:
            self._owner.shared.fail(error)
            if request is not None:  # which no other receiver has claimed
                request.work.end(error)
            raise

    def _read(self, head: MessageHead, request: Request | None) -> None:
        """The rest of a message, into the tensor of ``request`` if there is one and it fits."""
        assert self._channel is not None
        if request is not None and head.fits(request.x) and is_plain(request.x):
            with torch.inference_mode(request.x.is_inference()):
                self._channel.read(flat_bytes(request.x.detach()))
            self._give(request, head, None)
            return
        message = torch.empty(head.count, dtype=getattr(torch, head.dtype), device="cpu")
        self._channel.read(flat_bytes(message))
        request = request or self._claim(head, message)
        if request is not None:
            self._give(request, head, message)

    def _claim(self, head: MessageHead, message: Tensor | None) -> Request | None:
        """The request for a message with this tag; a ``message`` that no request waits for is kept."""
        with self._owner.lock:
            for request in self._requests:
                if request.tag == head.tag and not request.claimed:
                    request.claimed = True
                    return request
            if message is not None:
                self._kept.append((head, message))
        return None

    def _give(self, request: Request, head: MessageHead, message: Tensor | None) -> None:
        """``message`` goes to its receiver; None: it is there already."""
        request.source = self._source
        ranks = self._owner.ranks
        if not head.fits(request.x):
            error = Desync(
                f"rank {ranks[self._source]} sends {head}, rank {ranks[self._owner.shared.rank]} receives "
                f"{MessageHead.of(request.x, request.tag)}: give both the same shape and dtype"
            )
            self._owner.shared.fail(error)
            request.work.end(error)
            return
        if message is not None:
            with torch.inference_mode(request.x.is_inference()):
                request.x.detach().copy_(message.view(request.x.shape))
        request.work.end()

    def _await(self, first: Request, words: Words, word: int, value: int) -> bool:
        """Wait for the word of this source on behalf of ``first``; False if that is served meanwhile."""
        owner = self._owner

        def cancelled() -> bool:
            return first.claimed or owner.closed

        label, awaited = first.work.operation, {self._source: word}
        arrival = Arrival(owner.shared, owner.peers, words, awaited, value, label, cancelled)
        owner.peers.wait(arrival, label, missing=arrival.missing)
        return words[word] >= value and not cancelled()

    def _wait(self, word: int, value: int) -> None:
        """In the middle of a message."""
        assert self._channel is not None
        self._owner.wait(self._channel.words, self._source, word, value, self._label)


Wait = Callable[[int, int], None]  # until word i of the channel is at least n


class Channel:
    """One end of the pipe in ``mapping``; ``wait(i, n)`` blocks until the other end's word i is >= n."""

    def __init__(self, mapping: Mapping, wait: Wait) -> None:
        self.words = mapping.words()
        self.fd, self.inode = mapping.fd, mapping.inode
        self._mapping = mapping
        self._ring = mapping.tensor(PAGE, RING_BYTES)
        self._wait = wait

    @staticmethod
    def create(wait: Wait) -> Channel:
        """The sender's end of a new pipe."""
        return Channel(segment.create(PAGE + RING_BYTES), wait)

    def write(self, data: Tensor) -> None:
        """Send bytes; the next ones begin on a line of their own."""
        written, start = self.words[WRITTEN], 0
        while start < data.numel():
            self._wait(READ, written + LINE - RING_BYTES)
            free = RING_BYTES - (written - self.words[READ])
            place = written % RING_BYTES
            step = min(STEP_BYTES, free, RING_BYTES - place, data.numel() - start)
            self._ring[place : place + step].copy_(data[start : start + step])
            start += step
            written += step if start < data.numel() else round_up(step, LINE)
            self.words.post(WRITTEN, written)

    def flush(self) -> None:
        """Wait until everything has been read."""
        self._wait(READ, self.words[WRITTEN])

    def read(self, data: Tensor) -> None:
        """Receive as many bytes as ``data`` has."""
        read, start = self.words[READ], 0
        while start < data.numel():
            self._wait(WRITTEN, read + 1)
            there = self.words[WRITTEN] - read
            place = read % RING_BYTES
            step = min(STEP_BYTES, there, RING_BYTES - place, data.numel() - start)
            data[start : start + step].copy_(self._ring[place : place + step])
            start += step
            read += step if start < data.numel() else round_up(step, LINE)
            self.words.post(READ, read)


@dataclass(frozen=True)
class MessageHead:
    """What a message is: its tag, dtype and number of elements."""

    tag: int
    dtype: str
    count: int

    @staticmethod
    def of(x: Tensor, tag: int) -> MessageHead:
        """That of a message with the contents of ``x``."""
        return MessageHead(tag, dtype_name(x), x.numel())

    def fits(self, x: Tensor) -> bool:
        """Whether the message can be received into ``x``."""
        return (self.dtype, self.count) == (dtype_name(x), x.numel())

    def to_bytes(self) -> bytes:
        return _HEAD.pack(self.tag, DTYPES.index(self.dtype), self.count).ljust(LINE)

    @staticmethod
    def from_bytes(data: bytes) -> MessageHead:
        """The head that ``to_bytes`` wrote."""
        tag, dtype, count = _HEAD.unpack(data[: _HEAD.size])
        return MessageHead(tag, DTYPES[dtype], count)

    def __str__(self) -> str:
        return f"{self.count} {self.dtype} with tag {self.tag}"
