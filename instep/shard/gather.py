"""Weights whole just in time: a lane that fetches the slices of units, beside the computation.

    compute         |= unit 1 =|= unit 2 =|= unit 3 =
    communication   |~ 2 ~|     |~ 3 ~|    |~ 4 ~|         "parameter gather"

Where the ranks can read each other's memory (backend "shm"), most units are mapped, and there is nothing to
gather (``unit``). Others, whose values are cast to the dtype of computation, are W copies and no message, and
that of a small unit is made at once, without the lane. Else a rank requests the slices. In no case has
another rank to do anything at that moment. No rank may write to its slices while another may still gather, or
compute with them.

Why requests, and not a collective: a rank skips a unit, runs one twice, evaluates alone, or has no
micro-batch left. A collective would pair with another one, or wait for ever. So every rank has a thread for
each of the others that answers its requests, whatever the rank's own computation does:

    rank 0   |= unit 3 =|= unit 4 ...        computes; its lane has requested unit 4 from all others meanwhile
    rank 1   |= unit 2 =|= unit 5 ...        computes, with other units perhaps
      sends      ^ 4 to 0     ^ ...          its thread for rank 0 waits for requests

A request is two numbers, the answer the slice: S bytes of weights, W ranks, S (W-1)/W bytes received in one
round trip, and as many sent to each rank that asks. The group must have no other user.

Inside a transform of ``torch.func`` weights neither come nor go. What is made inside of ``grad``, ``vjp``,
``jacrev``, ``jvp`` or ``functionalize`` belongs to the transform: a tensor around another one, which no
parameter can show and no unit can free. So a module may be called there whose weights are whole already, and
no other. ``vmap`` alone leaves alone what has nothing to do with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from instep.errors import PeerLost
from instep.events import PARAMETER_GATHER, Recorder
from instep.net.device import Stream
from instep.net.lane import Lane
from instep.net.messages import Messages
from instep.net.process_group import Group
from instep.shard.unit import Unit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ASK, GIVE, HANG_UP = 1, 2, 3  # tags: a request, an answer, what no rank sends
BYE = -1  # in the place of a number: no more requests from this rank
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
FOREVER = timedelta(days=3650)
FAREWELL = timedelta(seconds=3)

QUICK_BYTES = 1 << 20  # are copied in the time that it takes to hand them over to another thread

_functorch: Any = torch._C._functorch
VMAP = _functorch.TransformType.Vmap


class ShardSource(Protocol):
    """Where slices come from. ``fetch`` fills ``parts[r]`` with rank r's slice of a unit, cast."""

    def fetch(self, number: int, parts: Sequence[Tensor], operation: str) -> None: ...

    def close(self) -> None:
        """No more requests; the own slice is there for ranks that still have some."""

    def abandon(self) -> None:
        """``close`` shall not wait for others."""


class MappedShards:
    """Slices in memory that this rank can read: ``slices[r][i]`` is rank r's of unit i."""

    def __init__(self, slices: Sequence[Sequence[Tensor]]) -> None:
        self._slices = slices

    def fetch(self, number: int, parts: Sequence[Tensor], operation: str) -> None:
        for part, own in zip(parts, self._slices, strict=True):
            part.copy_(own[number])

    def close(self) -> None:
        self._slices = []

    def abandon(self) -> None:
        pass


class RequestedShards:
    """The slices of all ranks, by request. Collective; ``slices[i]`` is this one's of number i.

    ``fetch`` any, at any time; ``close`` when no more are needed. A rank goes on to answer until all others
    have closed, or one is gone; a process that ends waits ``FAREWELL`` for that, and no longer.
    """

    def __init__(self, group: Group, slices: Sequence[Tensor]) -> None:
        self._group, self._slices = group, list(slices)
        assert group.pg is not None
        self._pg = group.pg
        self._others = [(group.rank + k) % group.size for k in range(1, group.size)]
        self._requests = Messages(group.pg, group.ranks, tag=ASK)
        self._answers = Messages(group.pg, group.ranks, tag=GIVE)
        self._servers = [
            threading.Thread(
                target=_serve,
                args=(group.pg, self._slices, other),
                name=f"instep slices, rank {group.rank} to {other}",
                daemon=True,
            )
            for other in self._others
        ]
        for server in self._servers:
            server.start()
        self._leaving = _Leaving(group.pg, self._others, self._servers)
        # Of multiprocessing, because atexit knows nothing of the end of a process that it has started. Ranks
        # may be threads of the process that ends: all have said goodbye before one of them waits for it.
        self._ends = [
            Finalize(self, self._leaving.say_goodbye, exitpriority=1),
            Finalize(self, self._leaving.wait, exitpriority=0),
        ]

    def fetch(self, number: int, parts: Sequence[Tensor], operation: str) -> None:
        """``parts[r]`` becomes the slice of rank r, in the dtype of ``parts``."""
        others = [parts[source] for source in self._others]
        on_cpu = parts[0].device.type == "cpu"
        arrived = others if on_cpu else [torch.empty_like(part, device="cpu") for part in others]
        try:
            work = self._group.start(lambda: self._ask(number, arrived), operation)
            parts[self._group.rank].copy_(self._slices[number])
            self._group.wait(work, operation)
        except PeerLost:
            self.abandon()
            raise
        if not on_cpu:  # here, because the thread of messages has another current stream
            for part, came in zip(others, arrived, strict=True):
                part.copy_(came)

    def close(self) -> None:
        """Request no more, and give ranks that are not as far yet the time to close too."""
        for end in self._ends:
            end()

    def abandon(self) -> None:
        """``close`` shall not wait for others: one is lost, or all have closed in some other way."""
        self._leaving.abandoned = True

    def _ask(self, number: int, arrived: Sequence[Tensor]) -> None:
        """Request slice ``number`` of all others, into memory of the host."""
        message = torch.tensor([number, DTYPES.index(arrived[0].dtype)], device="cpu")
        self._requests.together([(message, to) for to in self._others], [])
        self._answers.together([], list(zip(arrived, self._others, strict=True)))


def _serve(pg: ProcessGroup, slices: Sequence[Tensor], other: int) -> None:
    """Answer rank ``other`` until it has said that it has no more requests, or is gone.

    One request from any rank would be one thread, but such a request outlives all the connections.
    """
    message = torch.empty(2, dtype=torch.int64, device="cpu")
    given: tuple[Any, Tensor] | None = None  # what is on its way, with its memory
    with suppress(RuntimeError):  # it is gone: the rank that misses it says so
        while True:
            pg.recv([message], other, ASK).wait(FOREVER)
            number, dtype = message.tolist()
            if number == BYE:
                return
            if given is not None:
                given[0].wait()  # it has arrived: the rank would not ask again before
            answer = slices[number].to("cpu", DTYPES[dtype])
            given = pg.send([answer], other, GIVE), answer


class _Leaving:
    """How a rank ends its service to ``others``, after which its ``servers`` have ended, or nearly always.

    ``say_goodbye``: it requests no more; or, ``abandoned``, it hangs up. ``wait``: until the others have no
    more requests either, or ``FAREWELL`` is over. A server that came back from a wait while the interpreter
    goes would be ended by force, which C++ answers with SIGABRT.
    """

    def __init__(self, pg: ProcessGroup, others: Sequence[int], servers: Sequence[threading.Thread]) -> None:
        self._pg, self._others, self._servers = pg, others, servers
        self.abandoned = False
        self._has_said = False

    def say_goodbye(self) -> None:
        if self._has_said:
            return
        self._has_said = True
        if self.abandoned:
            _hang_up(self._pg, self._others)
            return
        message = torch.tensor([BYE, 0], device="cpu")
        with suppress(RuntimeError):  # a rank that is gone needs no farewell
            for work in [self._pg.send([message], to, ASK) for to in self._others]:
                with suppress(RuntimeError):
                    work.wait(FAREWELL)

    def wait(self) -> None:
        self.say_goodbye()  # both are called when a source is collected, in no order that is promised
        until = time.monotonic() + FAREWELL.total_seconds()
        for server in self._servers:
            if server is not threading.current_thread():
                server.join(max(0.0, until - time.monotonic()))


def _hang_up(pg: ProcessGroup, others: Sequence[int]) -> None:
    """End the servers: two survivors of three would wait for each other's requests for ever.

    gloo gives a message up in one way only: whose wait for one times out, loses its connections, all of them;
    unless it was to a rank whose connection is lost already.
    """
    for other in others:
        with suppress(RuntimeError):
            pg.recv([torch.empty(1, device="cpu")], other, HANG_UP).wait(timedelta(milliseconds=1))


def find_source(group: Group, gather_group: Group, units: Sequence[Unit]) -> ShardSource:
    """The way to the slices of ``units``, which lie in memory of ``group``. Collective.

    ``gather_group`` is over the same ranks, and is used if there have to be messages.
    """
    slices = [unit.slice for unit in units]
    if group.size == 1 or not slices:
        return MappedShards([slices])
    operation = "the exchange of memory"
    to_show = [unit.slice for unit in units if unit.mapped is None]
    shown = group.map_all(to_show, operation) if to_show else [[] for _ in group.ranks]
    if shown is None:
        return RequestedShards(gather_group, slices)
    found = [iter(own) for own in shown]
    by_unit = [[next(own) for own in found] if u.mapped is None else u.mapped.slices for u in units]
    group.barrier(operation)  # all have come: the values are there
    return MappedShards(
        [[own.view(u.dtype) for own, u in zip(x, units, strict=True)] for x in zip(*by_unit, strict=True)]
    )


class Gathers:
    """Fetches units in the order in which they are needed; in a world of one in the caller's thread."""

    def __init__(self, group: Group, source: ShardSource, recorder: Recorder, device: torch.device) -> None:
        name = f"instep gathers, rank {group.rank}"
        self.lane = Lane(name, inline=group.size == 1, profiled_as="exchange")
        self._here = Lane(name, inline=True)
        self._quick_bytes = QUICK_BYTES if isinstance(source, MappedShards) else 0
        self._source, self._recorder = source, recorder
        self._stream = Stream(device, inline=self.lane.inline)

    def begin(self, units: Iterable[Unit]) -> None:
        """Gather those of ``units`` that are not here, and go on meanwhile."""
        for unit in units:
            if unit.is_free:
                require_outside_transform(unit.name, unit.names)
                if unit.open():
                    continue
                operation = f"the gather of unit {unit.name!r}"
                try:
                    run = partial(self._fetch, unit, None, self._stream.computed())
                    if unit.gathered_bytes > self._quick_bytes:
                        unit.work = self.lane.submit(operation, run)
                        continue
                    with self._recorder.span(PARAMETER_GATHER, lane="host"):
                        unit.work = self._here.submit(operation, run)
                except BaseException:  # no thread could be started
                    self.lane.drain()
                    unit.free()
                    raise

    def need(self, units: Sequence[Unit]) -> None:
        """Gather those of ``units`` that are not here, and wait.

        Raises:
            PeerLost: a rank did not give its slice; ``units`` are free then.
        """
        self.begin(units)
        coming = [unit for unit in units if not unit.shown]
        works = [unit.work for unit in coming if unit.work is not None]
        if not all(work.done() for work in works):
            with self._recorder.span(PARAMETER_GATHER, lane="host"):
                for work in works:
                    work.arrive()
        for work in works:
            if work.error is not None:
                error = work.error
                for failed in coming:
                    failed.free()
                raise error
        for unit in coming:
            unit.show()

    def whole(self, unit: Unit) -> list[Tensor]:
        """The master values of the parameters of ``unit``, in new memory."""
        flat = unit.whole()
        parts = list(flat.split(unit.layout.slice_length))
        work = self.lane.run(
            f"the masters of unit {unit.name!r}", partial(self._fetch, unit, parts, self._stream.computed())
        )
        work.wait()
        return unit.values_in(flat)

    def recover(self) -> None:
        """Go on after a gather that failed, unless a rank was lost."""
        for lane in (self.lane, self._here):
            if lane.failed is not None and not isinstance(lane.failed, PeerLost):
                lane.reset()

    def _fetch(self, unit: Unit, parts: Sequence[Tensor] | None, computed: object) -> None:
        """Fill ``parts``, by default the memory of the unit, of which no view outlives this."""
        to_show = parts is None
        parts = unit.parts() if parts is None else parts
        size = sum(part.numel() * part.itemsize for part in parts)
        recorder = self._recorder
        with (
            recorder.span(PARAMETER_GATHER, lane="communication", num_bytes=size, bucket=unit.number),
            self._stream.after(computed),  # type: ignore[arg-type]
            torch.no_grad(),
        ):
            self._source.fetch(unit.number, parts, f"the gather of unit {unit.name!r}")
            if to_show:
                unit.arrange()


def is_inside_transform() -> bool:
    """Whether a transform runs this code that would wrap new tensors; in some 100 ns."""
    levels = _functorch.get_interpreter_stack()
    return levels is not None and any(level.key() != VMAP for level in levels)


def require_outside_transform(unit: str, names: Sequence[str]) -> None:
    """Raise ``RuntimeError`` if the weights of a unit, called ``names``, would come or go in a transform."""
    if is_inside_transform():
        raise RuntimeError(
            f"weights of unit {unit!r} ({', '.join(names)}) were needed inside of a transform of torch.func "
            "(grad, vjp, jacrev, jvp), where they cannot be gathered: use stage=2 without compute_dtype; or "
            "use the transform in the forward of one module that has all weights it needs and is one unit "
            "(units=[...]), with reshard_after_forward=False"
        )
