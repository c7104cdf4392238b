"""Messages from one rank to another, told apart by tags.

A message is sent when its receiver has taken it, and a receiver takes messages while it waits for any from
that sender: those that it did not ask for yet are kept until it does, so tags may be asked for in any order.
Every sender and every receiver of a pair has a thread, from its first message on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from instep.errors import Desync, PeerLost
from instep.mesh.peers import Peers
from instep.shm import segment
from instep.shm.channel import READ, WRITTEN, Channel, Head
from instep.shm.futex import Words
from instep.shm.room import LEFT, LINE, Room
from instep.shm.rounds import Arrival, reaching
from instep.shm.tensors import check, flat_bytes, is_plain, plain, require_writable
from instep.work import Lane, Work

JOIN_S = 1.0  # a thread may hold what the closing one holds too


class Request:
    """Somebody waits for a message for ``x``, from any of ``sources``; ``source`` is who sent it."""

    def __init__(self, x: Tensor, sources: Sequence[int], tag: int, label: str) -> None:
        self.x = x
        self.sources = set(sources)
        self.tag = tag
        self.work = Work(label)
        self.source = -1
        self.claimed = False


class Mail:
    """What one rank sends to, and receives from, the others of its room."""

    def __init__(self, room: Room, ranks: Sequence[int], peers: Peers) -> None:
        self.room = room
        self.ranks = ranks
        self.peers = peers
        self.lock = threading.Condition()
        self.closed = False
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}

    def send(self, x: Tensor, destination: int, tag: int) -> Work:
        """Send ``x``; it must not be changed before the work has ended."""
        check(x)
        self._require(destination)
        with self.lock:
            if destination not in self._outboxes:
                self._outboxes[destination] = Outbox(self, destination)
        return self._outboxes[destination].send(x, tag)

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
        if self.room.error is not None or self.closed:
            request.work.end(self.room.error or self.left(request.work.operation))
            return request
        for source in sources:
            with self.lock:
                if source not in self._inboxes:
                    self._inboxes[source] = Inbox(self, source)
            self._inboxes[source].ask(request)
        return request

    def close(self) -> None:
        """End all threads, once they see it."""
        with self.lock:
            self.closed = True
            self.lock.notify_all()
        for outbox in self._outboxes.values():
            outbox.lane.close()
        for inbox in self._inboxes.values():
            if inbox.thread is not threading.current_thread():  # which may be collecting the group
                inbox.thread.join(JOIN_S)

    def wait(self, words: Words, rank: int, word: int, value: int, label: str) -> None:
        """Block until a word of ``rank`` is at least ``value``."""
        if words[word] < value:
            arrival = Arrival(self.room, self.peers, words, {rank: word}, value, label)
            self.peers.wait(arrival, label, missing=arrival.missing)

    def left(self, label: str) -> PeerLost:
        """What an operation ends with that was under way when this rank left."""
        return PeerLost(f"rank {self.ranks[self.room.rank]} left the group during {label}", operation=label)

    def _require(self, rank: int) -> None:
        if not 0 <= rank < self.room.size or rank == self.room.rank:
            raise ValueError(
                f"rank {self.room.rank} of a group of {self.room.size}: expected another rank, got {rank}"
            )


class Outbox:
    """The way from this rank to ``destination``."""

    def __init__(self, mail: Mail, destination: int) -> None:
        self._mail = mail
        self._destination = destination
        self._channel: Channel | None = None
        self._label = f"send to rank {mail.ranks[destination]}"
        self.lane = Lane(f"instep shm {self._label}")

    def send(self, x: Tensor, tag: int) -> Work:
        """Queue a message."""

        def run() -> None:
            self._mail.room.require()
            if self._channel is None:
                self._open()
            assert self._channel is not None
            try:
                head = Head.of(x, tag)
                self._channel.write(torch.frombuffer(bytearray(head.to_bytes()), dtype=torch.uint8))
                self._channel.write(flat_bytes(plain(x)))
                self._channel.flush()
            except BaseException as error:
                self._mail.room.fail(error)
                raise

        return self.lane.submit(f"{self._label}, tag {tag}", run)

    def _open(self) -> None:
        room = self._mail.room
        channel = Channel.create(self._wait)
        self._channel = channel
        word = room.mail(room.rank, self._destination)
        room.words.post(word + 1, channel.inode)  # a descriptor's number may be another file's some day
        room.words.post(word, channel.fd + 1)

    def _wait(self, word: int, value: int) -> None:
        assert self._channel is not None
        self._mail.wait(self._channel.words, self._destination, word, value, self._label)


class Inbox:
    """The way from ``source`` to this rank, who waits for what comes on it, and what nobody waits for yet."""

    def __init__(self, mail: Mail, source: int) -> None:
        self._mail = mail
        self._source = source
        self._channel: Channel | None = None
        self._requests: list[Request] = []
        self._kept: list[tuple[Head, Tensor]] = []
        self._ended: BaseException | None = None
        self._label = f"receive from rank {mail.ranks[source]}"
        self.thread = threading.Thread(target=self._serve, name=f"instep shm {self._label}", daemon=True)
        self.thread.start()

    def ask(self, request: Request) -> None:
        """Give ``request`` what was kept for it, or keep it in mind."""
        with self._mail.lock:
            kept = next((item for item in self._kept if item[0].tag == request.tag), None)
            if request.claimed:
                return
            if kept is None:
                self._requests.append(request)
                self._mail.lock.notify_all()
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
        self._ended = error or self._mail.left(self._label)
        self._give_up(self._ended)

    def _give_up(self, error: BaseException) -> None:
        """Nothing comes from this source any more: a request without another one ends with ``error``."""
        mail = self._mail
        with mail.lock:
            waiting, self._requests = [r for r in self._requests if not r.claimed], []
            for request in waiting:
                request.sources.discard(self._source)
            lost = [request for request in waiting if not request.sources or mail.closed]
            for request in lost:
                request.claimed = True
        # A rank that has taken its leave is missed only by those who wait for it alone.
        if not mail.closed and (lost or mail.room.state(self._source) != LEFT):
            mail.room.fail(error)
        for request in lost:
            request.work.end(error)

    def _oldest(self) -> Request | None:
        """The first request that nobody serves; None when the group is closed."""
        with self._mail.lock:
            while not self._mail.closed:
                self._requests = [request for request in self._requests if not request.claimed]
                if self._requests:
                    return self._requests[0]
                self._mail.lock.wait()
        return None

    def _take(self, first: Request) -> None:
        """Read one message, for whoever asked for it; nothing if another source serves ``first`` before."""
        if self._channel is None:
            room = self._mail.room
            word = room.mail(self._source, room.rank)
            if not self._await(first, room.words, word, 1):
                return
            peers = self._mail.peers
            with reaching(room, peers, self._source, first.work.operation):
                pid, inode = peers.table[self._source].pid, room.words[word + 1]
                mapping = segment.attach(pid, room.words[word] - 1, inode)
            self._channel = Channel(mapping, self._wait)
        words = self._channel.words
        if not self._await(first, words, WRITTEN, words[READ] + 1):
            return
        data = bytearray(LINE)
        self._channel.read(torch.frombuffer(data, dtype=torch.uint8))
        head = Head.from_bytes(bytes(data))
        request = self._claim(head, None)
        try:
            self._read(head, request)
        except BaseException as error:
            self._mail.room.fail(error)
            if request is not None:  # which is nobody else's by now
                request.work.end(error)
            raise

    def _read(self, head: Head, request: Request | None) -> None:
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

    def _claim(self, head: Head, message: Tensor | None) -> Request | None:
        """Who asked for a message with this tag; a ``message`` that nobody asked for is kept."""
        with self._mail.lock:
            for request in self._requests:
                if request.tag == head.tag and not request.claimed:
                    request.claimed = True
                    return request
            if message is not None:
                self._kept.append((head, message))
        return None

    def _give(self, request: Request, head: Head, message: Tensor | None) -> None:
        """``message`` goes to its receiver; None: it is there already."""
        request.source = self._source
        ranks = self._mail.ranks
        if not head.fits(request.x):
            error = Desync(
                f"rank {ranks[self._source]} sends {head}, rank {ranks[self._mail.room.rank]} receives "
                f"{Head.of(request.x, request.tag)}: give both the same shape and dtype"
            )
            self._mail.room.fail(error)
            request.work.end(error)
            return
        if message is not None:
            with torch.inference_mode(request.x.is_inference()):
                request.x.detach().copy_(message.view(request.x.shape))
        request.work.end()

    def _await(self, first: Request, words: Words, word: int, value: int) -> bool:
        """Wait for the word of this source on behalf of ``first``; False if that is served meanwhile."""
        mail = self._mail

        def cancelled() -> bool:
            return first.claimed or mail.closed

        label, awaited = first.work.operation, {self._source: word}
        arrival = Arrival(mail.room, mail.peers, words, awaited, value, label, cancelled)
        mail.peers.wait(arrival, label, missing=arrival.missing)
        return words[word] >= value and not cancelled()

    def _wait(self, word: int, value: int) -> None:
        """In the middle of a message."""
        assert self._channel is not None
        self._mail.wait(self._channel.words, self._source, word, value, self._label)
