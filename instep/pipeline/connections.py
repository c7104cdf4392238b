"""Messages between stages over the connections of a process group: one packet each, posted before it comes.

A packet is a head, then the tensors; a receive is posted with memory of that size, and the backend's own
thread fills it while this rank computes. Where a route is not known yet (``message_words.py``), the packet
has descriptions instead of tensors, which follow by another tag.

What is on a GPU goes from device to device where the group's backend is NCCL, beside a packet without it. In
NCCL, messages of two ranks in opposite directions would wait for each other on one stream, so each direction
has a group of its own. Over gloo, they travel through the host's memory.
"""

from __future__ import annotations

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
from instep.pipeline.message_words import (
    ENDING,
    NUM_WORDS,
    SENT_NS,
    WORD,
    MessageHead,
    TensorSpec,
    is_on_device,
    places_of,
)

SHORT_BYTES = 1 << 18  # of a packet that is kept until the step ends
SHORT_SENDS = 64  # that are under way with nobody to wait for them
PACKETS, TENSORS = range(2)  # tags
MESSAGE = "a message between stages"
LOOKS, LOOK_S = 50, 20e-6

Wait: TypeAlias = Callable[[], object]
"""For a message that is under way."""
Understand: TypeAlias = Callable[[MessageHead, Sequence[int]], Sequence[TensorSpec]]
"""What tensors come with a head and its rows; raises if it is not the head that was expected."""


class Packet:
    """A receive of so many bytes from group rank ``source``."""

    def __init__(self, pg: Any, source: int, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.words = self.memory.view(torch.int64).numpy()
        self.words[NUM_WORDS - 1] = 0
        self.wait = _begun(pg, "recv", self.memory, source, PACKETS)

    def comes_soon(self) -> bool:
        """Whether it arrives within a millisecond; ``wait`` must still be called.

        The backend's thread writes it into memory. Looking there costs less than being woken by that thread.
        """
        for _ in range(LOOKS):
            end = int(self.words[NUM_WORDS - 1]) // WORD  # the last word repeats the time of sending
            if 0 < end <= len(self.words) and self.words[end - 1] == self.words[SENT_NS]:
                return True
            time.sleep(LOOK_S)
        return False


class Connections:
    """Messages between ranks that only a process group connects.

    ``directions`` are two groups, to higher ranks and to lower ones, whose backend sends what is on a device
    to ``device`` of the receiver; there are none where the host's memory is the only way.
    """

    def __init__(self, group: Group, device: torch.device, directions: Sequence[Group] = ()) -> None:
        self.group, self.device, self.directions = group, device, directions
        self._posted: defaultdict[int, deque[Packet]] = defaultdict(deque)  # by source, in order
        self._kept: list[tuple[Wait, Tensor]] = []  # under way, with nobody to wait for them
        self._awaited: list[Handle] = []

    def send(self, to: int, head: MessageHead, rows: Sequence[int], tensors: Sequence[Tensor]) -> None:
        is_direct = [bool(self.directions) and is_on_device(x) for x in tensors]
        own = [x.cpu() for x, direct in zip(tensors, is_direct, strict=True) if not direct]
        starts, end = places_of([x.nbytes for x in own])
        if rows:
            end = (NUM_WORDS + len(rows) + 1) * WORD
        packet = torch.empty(end, dtype=torch.uint8, device="cpu")
        words = packet.view(torch.int64).numpy()
        words[: NUM_WORDS - 1], words[NUM_WORDS - 1], words[-1] = head, end, head.sent_ns
        if rows:
            words[NUM_WORDS:-1] = rows
        else:
            for x, start in zip(own, starts, strict=True):
                packet[start : start + x.nbytes].copy_(_bytes(x))
        self._send(self.group, packet, to, PACKETS)
        for x, direct in zip(tensors, is_direct, strict=True):
            if direct:
                self._send(self.directions[to < self.group.rank], x, to, TENSORS)
        for x in own if rows else ():
            self._send(self.group, x, to, TENSORS)

    def post(self, source: int, nbytes: int) -> None:
        """Have memory for the next packet from ``source``."""
        self._posted[source].append(Packet(self.group.pg, source, nbytes))

    def take(self, source: int, label: str, understand: Understand) -> list[Tensor]:
        """The bytes of each tensor of the message that was posted first."""
        packet = self._posted[source].popleft()
        if packet.comes_soon():
            packet.wait()
        else:  # in a thread: a wait of the backend cannot be broken off
            self.group.run(packet.wait, label)
        words = packet.words[: packet.words[NUM_WORDS - 1] // WORD].tolist()
        head = MessageHead(*words[: NUM_WORDS - 1])
        specs = understand(head, words[NUM_WORDS:-1])
        is_direct = [bool(self.directions) and spec.on_device for spec in specs]
        lengths = [0 if direct else spec.nbytes for spec, direct in zip(specs, is_direct, strict=True)]
        if not head.num_rows and not any(is_direct):
            starts, _ = places_of(lengths)
            return [packet.memory[a : a + n] for a, n in zip(starts, lengths, strict=True)]
        return [
            self._receive(source, spec, label, is_direct=direct)
            if direct or head.num_rows
            else packet.memory[start : start + spec.nbytes]
            for spec, direct, start in zip(specs, is_direct, places_of(lengths)[0], strict=True)
        ]

    def flush(self) -> None:
        """Wait until what was sent may be changed."""
        self._await_kept()
        awaited_, self._awaited = self._awaited, []
        for work in awaited_:
            self.group.wait(work, ENDING)

    def tell(self, head: MessageHead, seconds: float) -> None:
        """Send all ranks ``head``, and wait so long at most until they have it."""
        self._await_kept()  # which would hold up what follows, if nobody kept what it sends
        self._awaited, until = [], time.monotonic() + seconds
        for rank in range(self.group.size):
            if rank != self.group.rank:
                self.send(rank, head, (), ())
                self._await_kept(f" to rank {rank}")
        for work in self._awaited:
            with suppress(TimeoutError):
                work.wait(timedelta(seconds=max(0.0, until - time.monotonic())))

    def _receive(self, source: int, spec: TensorSpec, label: str, *, is_direct: bool) -> Tensor:
        group = self.directions[source > self.group.rank] if is_direct else self.group
        device = self.device if is_direct else torch.device("cpu")
        x = torch.empty(spec.nbytes, dtype=torch.uint8, device=device)
        if x.numel():
            wait = _begun(group.pg, "recv", x, source, TENSORS)
            if is_direct:
                wait()  # the device's stream does
            else:
                self.group.run(wait, label)
        return x

    def _send(self, group: Group, x: Tensor, to: int, tag: int) -> None:
        """Send ``x``, and keep it until it is sent; what is long no longer."""
        if not x.numel():
            return
        self._kept.append((_begun(group.pg, "send", x, to, tag), x))
        if x.nbytes > SHORT_BYTES or len(self._kept) > SHORT_SENDS:
            self._await_kept(f" to rank {to}")

    def _await_kept(self, line: str = "") -> None:
        kept, self._kept = self._kept, []
        if kept:
            self._awaited.append(self.group.start(partial(_wait_for_all, kept), ENDING, line))


def _wait_for_all(kept: list[tuple[Wait, Tensor]]) -> None:
    while kept:
        kept.pop(0)[0]()


def _begun(pg: Any, verb: str, x: Tensor, rank: int, tag: int) -> Wait:
    """Begin to send or to receive; what is returned waits.

    If the connection has ended already it raises there: what waits for a message names its rank.
    """
    try:
        work = awaited(lambda: getattr(pg, verb)([_bytes(x)], rank, tag), MESSAGE)
    except InstepError as error:
        return raising(error)
    return partial(awaited, work.wait, MESSAGE)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
