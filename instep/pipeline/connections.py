"""Messages between stages over connections: short ones in one piece, tensors of long ones after their words.

A receive needs memory of its own before anything is there. What is short comes with its words, and the memory
for it is always of one size. The tensors of a long message follow its words; in most models they are as long
as those of the first one of its kind, and then they have memory before the words are there. If not they come
by another tag, after the words, which say how much memory they need:

    post 1RECV_F0      words may come from now on
    take 1RECV_F0      wait for them, then for the tensors
    post 1RECV_F1      words and tensors may come from now on
    take 1RECV_F1      wait until they are there

So no message has to look like the one before. Threads take turns with the one that computes, and each turn
costs time, so they wait only for what is long: once a rank has sent something long, a thread receives from
it while this rank computes, and what is long is let go as soon as it is sent. A short message has come when
its last word is in its memory.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from instep.errors import InstepError
from instep.net.lane import Handle
from instep.net.messages import awaited, raising
from instep.net.process_group import Group
from instep.pipeline.actions import NO_TIE, Action
from instep.pipeline.message_words import (
    ACTION,
    END,
    ENDING,
    FIELDS,
    HEAD_BYTES,
    KINDS,
    LEFT,
    NO_STAGE,
    NUM_WORDS,
    NUMBER,
    SENT_NS,
    STAYS,
    VERSION,
    WORD,
    Check,
    numbers_of,
    places_of,
    sent_for,
    specs_of,
)

SHORT_BYTES = 1 << 18  # of a message, with its words: to copy so much costs less than a second one
SHORT_SENDS = 64  # that are under way with nobody to wait for them
# Tags: of words, and of tensors unlike the first ones of their kind, which has a tag of its own.
WORDS, UNLIKE = range(2)
MESSAGE = "a message between stages"
LOOKS, LOOK_S = 50, 20e-6
MAX_TIES = 1 << 10

Wait: TypeAlias = Callable[[], object]
"""For a message that is under way."""
UnderWay: TypeAlias = tuple[list[Tensor], list[Wait]]
"""Memory for tensors, and what waits for them."""


class Posted:
    """A receive from group rank ``source`` over ``pg``: of ``words`` and ``tensors``, by ``receive``.

    ``memory`` is for a short message, and free again afterwards; by ``tag`` come the tensors of a long one
    that is like the first. ``work`` is what executes that, if it is another thread.
    """

    def __init__(self, pg: Any, source: int, memory: Tensor, tag: int) -> None:
        self.source, self.memory, self.tag = source, memory, tag
        self._seen = self.memory.view(torch.int64).numpy()
        self._seen[:FIELDS] = 0  # of a message that came before, perhaps
        self._first = _begun(pg.recv, memory, source, WORDS)
        self.words: list[int] = []
        self.tensors: list[Tensor] = []
        self.is_long = False
        self.work: Handle | None = None

    def is_short_and_comes_soon(self) -> bool:
        """Whether a short message arrives within a millisecond; ``receive`` must still wait for it.

        The backend's thread writes it into memory. Looking there costs less than being woken by that thread.
        """
        for _ in range(LOOKS):
            end = self._seen[END] // WORD  # its last word repeats the time at which it was sent
            if 0 < end <= len(self._seen) and self._seen[end - 1] == self._seen[SENT_NS]:
                return True
            time.sleep(LOOK_S)
        return False

    def receive(self, long: LongReceives) -> None:
        """Wait until the message is there."""
        self._first()
        self.words = self._seen[:NUM_WORDS].tolist()
        if self.words[: LEFT + 1] != [VERSION, STAYS]:
            return  # no tensors come
        specs, end = specs_of(self.words), self.words[END]
        lengths = [spec.nbytes for spec in specs]
        self.is_long = end < 0
        if self.is_long:
            parts = long.receive(self.source, -end, lengths)
        else:
            starts, _ = places_of(lengths)
            parts = [self.memory[a : a + n].clone() for a, n in zip(starts, lengths, strict=True)]
        self.tensors = [spec.of(part) for spec, part in zip(specs, parts, strict=True)]


class LongReceives:
    """Receives of the tensors of long messages, begun before their words are there if their length is known.

    Several threads use it. What comes from one rank by one tag comes in order.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._lengths: dict[tuple[int, int], Sequence[int]] = {}  # by source and tag: of the first message
        self._under_way: defaultdict[tuple[int, int], deque[UnderWay]] = defaultdict(deque)

    def begin(self, source: int, tag: int, count: int) -> None:
        """``count`` messages are to come from ``source`` by ``tag``."""
        with self._lock:
            lengths, begun = self._lengths.get((source, tag)), self._under_way[source, tag]
            while lengths is not None and len(begun) < count:
                begun.append(self._begin(source, tag, lengths))

    def receive(self, source: int, tag: int, lengths: Sequence[int]) -> list[Tensor]:
        """The bytes of the tensors of the next message, which have these lengths."""
        with self._lock:
            begun = self._under_way[source, tag]
            if tag != UNLIKE:
                self._lengths.setdefault((source, tag), lengths)
            if not begun:
                begun.append(self._begin(source, tag, lengths))
            tensors, waits = begun.popleft()
        _wait_for_all(waits)
        return tensors

    def _begin(self, source: int, tag: int, lengths: Sequence[int]) -> UnderWay:
        assert self.group.pg is not None
        tensors = [torch.empty(nbytes, dtype=torch.uint8, device="cpu") for nbytes in lengths]
        return tensors, [_begun(self.group.pg.recv, x, source, tag) for x in tensors if x.numel()]


class Connections:
    """Messages between ranks that only a process group connects."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._sent: list[Handle] = []
        self._short: list[tuple[Wait, Tensor]] = []  # under way, with nobody to wait for it
        self._posted: dict[Action, Posted] = {}
        self._long: set[int] = set()  # the ranks that have sent something long
        self._free: list[Tensor] = []  # memory for short messages
        self._long_receives = LongReceives(group)
        self._lengths: dict[tuple[int, int], list[int]] = {}  # of the first long ones that were sent, by tag

    def send(self, to: int, words: Sequence[int], tensors: Sequence[Tensor]) -> None:
        whole = [x.detach().contiguous().resolve_conj().resolve_neg() for x in tensors]
        starts, nbytes = places_of([x.nbytes for x in whole])
        is_short = nbytes <= SHORT_BYTES
        packet = torch.empty(nbytes if is_short else HEAD_BYTES, dtype=torch.uint8, device="cpu")
        numbers = packet.view(torch.int64).numpy()
        numbers[: len(words)] = words
        if not is_short:
            tag = self._tag_of(to, words, [x.nbytes for x in whole])
            numbers[END] = -tag
            waits = [_begun(self._pg.send, packet, to, WORDS)]
            waits += [_begun(self._pg.send, x, to, tag) for x in whole if x.numel()]
            self._await(waits, [packet, *whole], f" to rank {to}")
            return
        for x, start in zip(whole, starts, strict=True):
            packet[start : start + x.nbytes].copy_(_bytes(x))
        numbers[END], numbers[-1] = nbytes, words[SENT_NS]
        self._short.append((_begun(self._pg.send, packet, to, WORDS), packet))
        if len(self._short) > SHORT_SENDS:
            self._await_short()

    def tell(self, words: Sequence[int], seconds: float) -> None:
        """Send all ranks ``words``, and wait so long at most until they have them."""
        self._await_short()  # which would hold up what follows, if nobody kept what it sends
        self._sent, until = [], time.monotonic() + seconds
        for rank in range(self.group.size):
            if rank != self.group.rank:
                self.send(rank, words, [])
                self._await_short(f" to rank {rank}")
        for work in self._sent:
            with suppress(TimeoutError):
                work.wait(timedelta(seconds=max(0.0, until - time.monotonic())))

    def post(self, action: Action, source: int) -> None:
        memory = self._free.pop() if self._free else torch.empty(SHORT_BYTES, dtype=torch.uint8, device="cpu")
        tag = _tag(numbers_of(sent_for(action)))
        self._posted[action] = Posted(self._pg, source, memory, tag)
        if source in self._long:
            its = [x for x in self._posted.values() if (x.source, x.tag) == (source, tag) and not x.words]
            self._long_receives.begin(source, tag, len(its))
            self._receive_posted(source)

    def take(self, action: Action, source: int, check: Check) -> tuple[list[int], list[Tensor]]:
        posted = self._posted[action]
        if posted.work is None and posted.is_short_and_comes_soon():
            posted.receive(self._long_receives)
        else:
            self._receive_posted(source, action)
            assert posted.work is not None
            self.group.wait(posted.work, str(action))
        self._free.append(self._posted.pop(action).memory)
        if posted.is_long and source not in self._long:
            self._long.add(source)
            self._receive_posted(source)
        check(posted.words, action)
        return posted.words, posted.tensors

    def flush(self) -> None:
        self._await_short()
        sent, self._sent = self._sent, []
        for work in sent:
            self.group.wait(work, ENDING)

    @property
    def _pg(self) -> Any:
        assert self.group.pg is not None
        return self.group.pg

    def _receive_posted(self, source: int, last: Action | None = None) -> None:
        """A thread receives all that was posted, up to ``last``: what is long, in the order of its sender."""
        for action, posted in self._posted.items():
            if posted.source == source and posted.work is None:
                receive = partial(posted.receive, self._long_receives)
                posted.work = self.group.start(receive, str(action), f" from rank {source}")
            if action == last:
                return

    def _tag_of(self, to: int, words: Sequence[int], lengths: list[int]) -> int:
        """By which tag the tensors of a long message with these ``words`` travel."""
        tag = _tag(words[ACTION:NUMBER])
        is_alike = tag != UNLIKE and self._lengths.setdefault((to, tag), lengths) == lengths
        return tag if is_alike else UNLIKE

    def _await_short(self, line: str = "") -> None:
        short, self._short = self._short, []
        if short:
            self._await([wait for wait, _ in short], [packet for _, packet in short], line)

    def _await(self, waits: Sequence[Wait], kept: Sequence[Tensor], line: str) -> None:
        """Keep tensors until they are sent, and not longer."""

        def wait(kept: Sequence[Tensor] = kept) -> None:
            _wait_for_all(waits)

        self._sent.append(self.group.start(wait, ENDING, line))


def _begun(begin: Callable[..., Any], x: Tensor, rank: int, tag: int) -> Wait:
    """Begin to send or to receive; what is returned waits.

    If the connection has ended already it raises there: what waits for a message names its rank.
    """
    try:
        work = awaited(lambda: begin([_bytes(x)], rank, tag), MESSAGE)
    except InstepError as error:
        return raising(error)
    return partial(awaited, work.wait, MESSAGE)


def _wait_for_all(waits: Sequence[Wait]) -> None:
    for wait in waits:
        wait()


def _tag(numbers: Sequence[int]) -> int:
    """By which the tensors of a long message travel that is of an action with these ``numbers_of``.

    Two kinds may have one tag, if there are more than ``MAX_TIES``: both ends have the same order.
    """
    stage, kind, _, tie = numbers
    return UNLIKE if stage == NO_STAGE else UNLIKE + 1 + (stage * len(KINDS) + kind) * MAX_TIES + tie - NO_TIE


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
