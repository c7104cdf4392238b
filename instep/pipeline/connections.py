"""Messages between stages over the connections of a process group: one packet each, posted before it comes.

    | head, end | row per tensor | tensors | time of sending |

A receive is posted with memory for the largest message that steps before this one have had for the same
stage and kind of action; the backend's own thread fills it while this rank computes. The tensors of a larger
message, such as the first one, follow the packet by another tag.

What is on a GPU goes from device to device where the group's backend is NCCL, beside a packet without it. In
NCCL, messages of two ranks in opposite directions would wait for each other on one stream, so each direction
has a group of its own. Over gloo, they travel through the host's memory.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
from numpy import uint8
from numpy.typing import NDArray
from torch import Tensor

from instep.errors import InstepError
from instep.memory import allocate
from instep.mesh.axes import round_up
from instep.net.lane import Handle
from instep.net.messages import awaited, raising
from instep.net.process_group import Group
from instep.pipeline.actions import Action
from instep.pipeline.message_words import (
    ALIGN,
    ENDING,
    HEAD,
    MAX_TENSORS,
    NO_STAGE,
    ROW,
    SENT_NS,
    VALUES,
    WORD,
    MessageHead,
    is_on_device,
    specs_of,
)

SHORT_BYTES = 1 << 18  # of a packet that is kept until the step ends
SHORT_SENDS = 64  # that are under way with nobody to wait for them
PACKETS, TENSORS = range(2)  # tags
MESSAGE = "a message between stages"
LOOKS, LOOK_S = 50, 20e-6
NEWS = Action(NO_STAGE, VALUES, 0)  # what ``tell`` sends: that this rank sends no more

FIRST_BYTES = 1 << ((HEAD + MAX_TENSORS * ROW + 2) * WORD).bit_length()  # of packets without tensors

Route: TypeAlias = tuple[int, str, int, int]
"""What one rank sends another, or receives from it, for one stage and kind of action."""
Wait: TypeAlias = Callable[[], object]
"""For a message that is under way."""
Check: TypeAlias = Callable[[MessageHead], None]
"""Raises if it is not the head that was expected."""


class PacketMemory:
    """Memory of packets, which is used again when the last tensor in it is gone.

    Fresh memory costs more than to send what is in it: the system fills every page with zeros.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[NDArray[uint8]]] = defaultdict(list)  # by size

    def of(self, nbytes: int) -> Tensor:
        free = self._free[nbytes]
        memory = free.pop() if free else allocate(nbytes, ALIGN).tensor.numpy()
        lent = memory[:]
        weakref.finalize(lent, free.append, memory).atexit = False
        return torch.from_numpy(lent)


class Packet:
    """A receive into ``memory`` from group rank ``source``."""

    def __init__(self, pg: Any, source: int, memory: Tensor) -> None:
        self.memory = memory
        self.words = memory.view(torch.int64).numpy()
        self.words[HEAD] = 0
        self.wait = _begun(pg, "recv", memory, source, PACKETS)

    def comes_soon(self) -> bool:
        """Whether it arrives within a millisecond; ``wait`` must still be called.

        The backend's thread writes it into memory. Looking there costs less than being woken by that thread.
        """
        for _ in range(LOOKS):
            end = int(self.words[HEAD]) // WORD  # the last word repeats the time of sending
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
        self._posted: defaultdict[int, deque[tuple[Route, Packet]]] = defaultdict(deque)  # by source
        self._kept: list[tuple[Wait, Tensor]] = []  # under way, with nobody to wait for them
        self._awaited: list[Handle] = []
        self._memory = PacketMemory()
        self._room: defaultdict[Route, int] = defaultdict(lambda: FIRST_BYTES)  # in this step's packets
        self._needed: dict[Route, int] = {}

    def begin(self) -> None:
        """A step begins, for both ends, which have both seen the largest message so far."""
        self._room |= self._needed

    def send(
        self, action: Action, to: int, head: MessageHead, rows: Sequence[int], tensors: Sequence[Tensor]
    ) -> None:
        ways = [self._direction(is_on_device(x), down=to < self.group.rank) for x in tensors]
        own = [x.cpu() if way is None else x for x, way in zip(tensors, ways, strict=True)]
        lengths = [x.nbytes if way is None else 0 for x, way in zip(own, ways, strict=True)]
        route = _route(action, to)
        starts, end = self._places(route, len(rows), lengths)
        has_room = end <= self._room[route]
        if not has_room:
            end = (HEAD + len(rows) + 2) * WORD
        packet = self._memory.of(self._room[route])[:end]
        words = packet.view(torch.int64).numpy()
        words[:HEAD], words[HEAD], words[-1] = head, end, head.sent_ns
        words[HEAD + 1 : HEAD + 1 + len(rows)] = rows
        apart = []
        for x, way, start in zip(own, ways, starts, strict=True):
            if way is None and has_room:
                packet[start : start + x.nbytes].copy_(_bytes(x))
            else:
                apart.append((way or self.group, x))
        self._send(self.group, packet, to, PACKETS)
        for group, x in apart:
            self._send(group, x, to, TENSORS)

    def post(self, action: Action, source: int) -> None:
        """Have memory for the next packet from ``source``."""
        route = _route(action, source)
        packet = Packet(self.group.pg, source, self._memory.of(self._room[route]))
        self._posted[source].append((route, packet))

    def take(self, source: int, label: str, check: Check) -> tuple[MessageHead, list[Tensor | None]]:
        """The message that was posted first."""
        route, packet = self._posted[source].popleft()
        if packet.comes_soon():
            packet.wait()
        else:  # in a thread: a wait of the backend cannot be broken off
            self.group.run(packet.wait, label)
        head = MessageHead(*packet.words[:HEAD].tolist())
        check(head)
        rows = packet.words[HEAD + 1 : HEAD + 1 + head.num_tensors * ROW].tolist()
        specs = specs_of(rows)
        down = source > self.group.rank
        ways = [None if spec is None else self._direction(spec.on_device, down=down) for spec in specs]
        lengths = [
            spec.nbytes if spec is not None and way is None else 0
            for spec, way in zip(specs, ways, strict=True)
        ]
        starts, end = self._places(route, len(rows), lengths)
        found: list[Tensor | None] = []
        for spec, way, start in zip(specs, ways, starts, strict=True):
            if spec is None:
                found.append(None)
                continue
            if way is None and end <= self._room[route]:
                part = packet.memory[start : start + spec.nbytes]
            else:
                part = self._receive(way, source, spec.nbytes, label)
            found.append(spec.of(part, self.device))
        return head, found

    def _direction(self, on_device: bool, *, down: bool) -> Group | None:
        """The group by which devices reach each other; ``down``: from higher ranks to lower ones."""
        return self.directions[down] if on_device and self.directions else None

    def _places(self, route: Route, num_words: int, lengths: Sequence[int]) -> tuple[list[int], int]:
        """Where each tensor of a message begins in a packet, behind so many words of rows, and where the last
        word ends, in bytes. It may be more than there is room for, in this step."""
        starts, end = [], round_up((HEAD + 1 + num_words) * WORD, ALIGN)
        for nbytes in lengths:
            starts.append(end)
            end += round_up(nbytes, ALIGN)
        end += WORD
        if end > self._needed.get(route, FIRST_BYTES):
            self._needed[route] = 1 << (end - 1).bit_length()
        return starts, end

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
                self.send(NEWS, rank, head, (), ())
                self._await_kept(f" to rank {rank}")
        for work in self._awaited:
            with suppress(TimeoutError):
                work.wait(timedelta(seconds=max(0.0, until - time.monotonic())))

    def _receive(self, way: Group | None, source: int, nbytes: int, label: str) -> Tensor:
        """A tensor that is not in its packet."""
        x = torch.empty(nbytes, dtype=torch.uint8, device="cpu" if way is None else self.device)
        if x.numel():
            wait = _begun((way or self.group).pg, "recv", x, source, TENSORS)
            if way is None:
                self.group.run(wait, label)
            else:
                wait()  # the device's stream does
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


def _route(action: Action, rank: int) -> Route:
    return rank, action.kind, action.stage, action.tie


def _wait_for_all(kept: list[tuple[Wait, Tensor]]) -> None:
    while kept:
        wait, _packet = kept.pop(0)  # whose memory may be used again once it is sent
        wait()


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
