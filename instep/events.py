"""What happened when, on which rank: the record that tracing, planning and charts share.

Lower layers emit (``with recorder.span("exchange", lane="communication", ...)``), higher layers read. A span
costs two clock readings and a store into a ring, about two microseconds, so it is always on.

    compute        |forward|backward|forward|backward|             |clip|update|      the training thread
    data          |data|            |data|                                            the same thread
    host           ........................  |gradient sync|...........|loss|...|ledger|  the same thread
    communication                       |queued|wait|agree|exchange|                  the exchange thread
    step          |------------------------------ step 7 --------------------------------|

While the training thread waits for other ranks, it records a span with one of the names in ``WAITS``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple, Protocol

from instep.ring_buffer import Record, RingBuffer

LANES = ("compute", "communication", "data", "host")
STEP = "step"  # the event that spans a step, from its begin to the begin of the next; on lane "host"

# Names of spans in which the training thread waits for other ranks: the causes.
GRADIENT_SYNC = "gradient sync"
PARAMETER_UPDATE = "parameter update"
PARAMETER_GATHER = "parameter gather"
BATCH_NORM = "batch-norm statistics"
BUFFERS = "broadcast of buffers"
GLOBAL_LOSS = "loss over the global batch"
SPLIT_SOFTMAX = "split softmax"
EXPERT_DISPATCH = "expert dispatch"
TENSOR_PARALLEL = "tensor-parallel sums"
PIPELINE = "pipeline fill and drain"
COMPARISON = "comparison of replicas"
WAITS = frozenset({GRADIENT_SYNC, PARAMETER_UPDATE, PARAMETER_GATHER, BATCH_NORM, BUFFERS, GLOBAL_LOSS,
                   SPLIT_SOFTMAX, EXPERT_DISPATCH, TENSOR_PARALLEL, PIPELINE, COMPARISON})  # fmt: skip

# Spans of a run's own work around a step, mostly on rank 0; not counted as host code of the script.
BOOKKEEPING = frozenset({"begin", "snapshot", "ledger", "hash", "save", "timing"})


class Event(NamedTuple):
    """One thing that took time, on one of ``LANES`` (or on "replica 0", "replica 1", ...: threads).

    Times are ``time.monotonic_ns()``, one clock for all ranks of a host. ``bytes`` is the size of the
    message, ``leaf`` the micro-batch, ``peer`` the global rank that was waited for, ``stage`` the pipeline
    stage that was computed or waited for; -1: none.
    """

    rank: int
    lane: str
    name: str
    start_ns: int
    end_ns: int
    bytes: int = 0
    step: int = -1
    leaf: int = -1
    bucket: int = -1
    peer: int = -1
    stage: int = -1

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class Timeline:
    """Events of one or many ranks, recorded or predicted, in the order of their start."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: (event.start_ns, -event.end_ns))
        self._steps: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event in self.events:
            self._steps[event.rank, event.step].append(event)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have events."""
        return sorted({rank for rank, _ in self._steps})

    @property
    def steps(self) -> list[int]:
        """The steps that have events, without -1, which means none."""
        return sorted({step for _, step in self._steps if step >= 0})

    def of(self, rank: int, step: int) -> list[Event]:
        """The events of one rank in one step."""
        return self._steps.get((rank, step), [])

    def window(self, rank: int, step: int) -> Event | None:
        """The event that spans the step, if it has ended; of a repeated step, the last."""
        return next((event for event in reversed(self.of(rank, step)) if event.name == STEP), None)


class DeviceMarks(Protocol):
    """Times work on a device, which continues after Python has issued it (``instep.net.device.Marks``)."""

    def begin(self) -> Any: ...
    def end(self, begun: Any, what: Any) -> None: ...
    def settled(self) -> list[tuple[Any, int, int]]: ...  # what, start_ns, end_ns: each once, when it is done


class Recorder:
    """A rank's last ``capacity`` events, in memory or, from ``keep_in`` on, in a file.

    Events get the current ``step``. A span inside one of the same lane and name is part of it and leaves no
    event, so code that knows more (the training loop) may span what others (the wrapper's hooks) would.
    """

    def __init__(self, rank: int = 0, capacity: int = 16384) -> None:
        self.rank = rank
        self.step = -1
        self.by_optimizer = True  # an optimizer's step ends the step; False: begin_step alone does
        self.marks: DeviceMarks | None = None
        self.watch: Callable[[str, bool], None] | None = None  # called at begin (True) and end of spans
        self.watched: Container[str] = ()  # with these names
        self.optimizer_steps = 0
        self._capacity = capacity
        self._ring = RingBuffer(capacity)
        self._lanes: dict[int, str] = {}  # of the threads in ``as_lane``
        self._open: set[tuple[Any, ...]] = set()  # spans: lane, name and, inside ``as_lane``, the thread
        self._begun_ns = 0  # the open step; 0: none
        self._begun_at = 0  # the number of records then
        self._worked = False  # since the last step of an optimizer

    def keep_in(self, path: Path, capacity: int, head: Mapping[str, Any]) -> None:
        """Record into file ``path`` from now on.

        Raises:
            OSError: the file cannot be created.
        """
        self._ring = RingBuffer(capacity, path, {**head, "rank": self.rank})
        self._begun_at = self._ring.newest

    def keep_in_memory(self) -> None:
        """Record into private memory from now on; the file keeps what it has."""
        self._ring = RingBuffer(self._capacity)
        self._begun_at = 0

    def span(
        self,
        name: str,
        *,
        lane: str,
        num_bytes: int = 0,
        leaf: int = -1,
        bucket: int = -1,
        peer: int = -1,
        stage: int = -1,
    ) -> Span:
        """Record the duration of a block, also when it raises."""
        # Without ``__init__``, whose call takes as long as reading the clock twice.
        span = _new_span(Span)
        span.recorder, span.name, span.lane = self, name, lane
        span.fields = num_bytes, leaf, bucket, peer, stage
        return span

    def put(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        lane: str,
        num_bytes: int = 0,
        leaf: int = -1,
        bucket: int = -1,
        peer: int = -1,
        stage: int = -1,
    ) -> None:
        """Record something that has ended."""
        if self._lanes:
            lane = self._lanes.get(get_ident(), lane)
        self._ring.put(name, lane, start_ns, end_ns, num_bytes, self.step, leaf, bucket, peer, stage)

    def put_all(self, ended: Iterable[tuple[str, int, int, int, int]], *, lane: str, bucket: int) -> None:
        """Record several things that have ended: name, start, end, bytes, peer."""
        if self._lanes:
            lane = self._lanes.get(get_ident(), lane)
        write, step = self._ring.put, self.step
        for name, start_ns, end_ns, num_bytes, peer in ended:
            write(name, lane, start_ns, end_ns, num_bytes, step, -1, bucket, peer)

    def begin_step(self, step: int) -> None:
        """Begin ``step``; ends the open step, if there is one."""
        now = time.monotonic_ns()
        self.end_step(now)
        self.step, self._begun_ns, self._begun_at = step, now, self._ring.newest

    def ensure_step(self) -> None:
        """Begin a step if none is open, unless only the caller of ``begin_step`` does."""
        self._worked = True
        if self.by_optimizer and not self._begun_ns:
            self.begin_step(self.optimizer_steps)

    def stepped(self) -> None:
        """An optimizer has stepped: ends the step if it is the first one since ``ensure_step``."""
        if self.by_optimizer and self._worked:
            self._worked = False
            self.optimizer_steps += 1
            self.begin_step(self.optimizer_steps)

    def end_step(self, now_ns: int | None = None) -> None:
        """End the open step, if there is one."""
        if self._begun_ns:
            if self.marks is not None:
                self.settle()
            self.put(STEP, self._begun_ns, now_ns or time.monotonic_ns(), lane="host")
        self.drop_step()

    def drop_step(self) -> None:
        """Discard the open step: it leaves no event."""
        self.step, self._begun_ns = -1, 0

    def so_far(self) -> list[Event]:
        """The events of the open step, as if it ended now."""
        self.settle()
        if not self._begun_ns:
            return []
        own = [x for x in self._events(self._ring.since(self._begun_at)) if x.step == self.step]
        return [*own, Event(self.rank, "host", STEP, self._begun_ns, time.monotonic_ns(), step=self.step)]

    def last_steps(self, count: int) -> list[Event]:
        """The events of the last ``count`` ended steps and of what came later, in the order of their ends."""
        records, names = self._ring.since(0), self._ring.names
        ends = [i for i, record in enumerate(records) if names[record[8]] == STEP]
        return self._events(records[ends[-count - 1] + 1 :] if len(ends) > count else records)

    @property
    def events(self) -> list[Event]:
        """All events that are kept, in the order of their ends."""
        return self._events(self._ring.since(0))

    @contextmanager
    def as_lane(self, lane: str) -> Iterator[None]:
        """Inside, everything that this thread records is on ``lane``."""
        thread = get_ident()
        before, self._lanes[thread] = self._lanes.get(thread), lane
        try:
            yield
        finally:
            if before is None:
                del self._lanes[thread]
            else:
                self._lanes[thread] = before

    def settle(self) -> None:
        """Record what the device has completed since the last call."""
        if self.marks is not None:
            for (name, lane, step, leaf, stage), start_ns, end_ns in self.marks.settled():
                self._ring.put(name, lane, start_ns, end_ns, 0, step, leaf, -1, -1, stage)

    def _events(self, records: Sequence[Record]) -> list[Event]:
        names, rank = self._ring.names, self.rank
        return [
            _new_event(
                Event,
                (rank, names[lane], names[name], start, end, size, step, leaf, bucket, peer, stages - 1),
            )
            for _, start, end, size, step, leaf, bucket, peer, name, lane, stages in records
        ]


class Span:
    """A timed block; see ``Recorder.span``.

    Its code is inlined: between two spans the caches hold computation, and each further call takes as long as
    a record.
    """

    __slots__ = ("fields", "key", "lane", "name", "on_lane", "recorder", "start_ns", "token")
    recorder: Recorder
    name: str
    lane: str
    fields: tuple[int, int, int, int, int]  # bytes, leaf, bucket, peer, stage
    key: tuple[Any, ...]
    on_lane: str
    start_ns: int  # 0: part of another span
    token: Any

    def __enter__(self) -> Span:
        recorder, name, lane = self.recorder, self.name, self.lane
        self.on_lane, self.key = lane, (lane, name)
        if recorder._lanes and (own := recorder._lanes.get(thread := get_ident())) is not None:
            self.on_lane, self.key = own, (lane, name, thread)
        if self.key in recorder._open:
            self.start_ns = 0
            return self
        if lane != "communication":  # where several threads may do the same at once
            recorder._open.add(self.key)
        marks = recorder.marks
        self.token = marks.begin() if marks is not None and lane == "compute" else None
        self.start_ns = time.monotonic_ns()
        # After the clock: the callback may take time, for instance to inject a delay.
        if name in recorder.watched and recorder.watch is not None:
            recorder.watch(name, True)
        return self

    def __exit__(self, *_: object) -> None:
        start_ns = self.start_ns
        if not start_ns:
            return
        end_ns, recorder, name, lane = time.monotonic_ns(), self.recorder, self.name, self.on_lane
        num_bytes, leaf, bucket, peer, stage = self.fields
        recorder._open.discard(self.key)
        if name in recorder.watched and recorder.watch is not None:
            recorder.watch(name, False)
        if self.token is not None and recorder.marks is not None:
            recorder.marks.end(self.token, (name, self.lane, recorder.step, leaf, stage))
            lane = "host" if lane == self.lane else lane  # where it was issued
        recorder._ring.put(name, lane, start_ns, end_ns, num_bytes, recorder.step, leaf, bucket, peer, stage)

    begin = __enter__
    end = __exit__

    def cancel(self) -> None:
        """End without an event."""
        if self.start_ns:
            self.recorder._open.discard(self.key)
            if self.name in self.recorder.watched and self.recorder.watch is not None:
                self.recorder.watch(self.name, False)


_new_span, _new_event = object.__new__, tuple.__new__
