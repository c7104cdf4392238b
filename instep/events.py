"""What happened when, on which rank: the one record that tracing, planning and charts share.

Low layers emit (``with recorder.span("exchange", lane="communication", ...)``), high layers read. A span
costs two clock readings and a store into a ring, some two microseconds, so it stays on for every step.

    compute        |forward|backward|forward|backward|             |clip|update|      the thread that trains
    data          |data|            |data|                                            the same thread
    host           ........................  |gradient sync|...........|loss|...|ledger|  the same thread
    communication                       |queued|wait|agree|exchange|                  the thread of exchanges
    step          |------------------------------ step 7 --------------------------------|

Where it waits for other ranks, the thread that trains records a span with one of the names ``WAITS``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from instep.ring_buffer import RingBuffer

LANES = ("compute", "communication", "data", "host")
STEP = "step"  # the event that spans a step, from its begin to the begin of the next; on lane "host"

# Where one rank has nothing to do because it waits for others: the names of its waits, and their causes.
GRADIENT_SYNC = "gradient sync"
PARAMETER_UPDATE = "parameter update"
PARAMETER_GATHER = "parameter gather"
BATCH_NORM = "batch-norm statistics"
BUFFERS = "broadcast of buffers"
GLOBAL_LOSS = "loss over the global batch"
SPLIT_SOFTMAX = "split softmax"
EXPERT_DISPATCH = "expert dispatch"
PIPELINE = "pipeline fill and drain"
COMPARISON = "comparison of replicas"
WAITS = frozenset(
    {
        GRADIENT_SYNC,
        PARAMETER_UPDATE,
        PARAMETER_GATHER,
        BATCH_NORM,
        BUFFERS,
        GLOBAL_LOSS,
        SPLIT_SOFTMAX,
        EXPERT_DISPATCH,
        PIPELINE,
        COMPARISON,
    }
)


class Event(NamedTuple):
    """One thing that took time, on one of ``LANES`` (or on "replica 0", "replica 1", ...: threads).

    Times are ``time.monotonic_ns()``, the same clock for all ranks of one host. ``bytes`` are those of the
    message, ``leaf`` is the micro-batch, ``peer`` the global rank that was waited for, ``stage`` that of a
    pipeline for which the rank did it, or waited; -1: none.
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
    """Events of one or many ranks, recorded or predicted, by the order of their start."""

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
        """The steps that have events, without -1, which stands for none."""
        return sorted({step for _, step in self._steps if step >= 0})

    def of(self, rank: int, step: int) -> list[Event]:
        """The events of one rank in one step."""
        return self._steps.get((rank, step), [])

    def window(self, rank: int, step: int) -> Event | None:
        """The event that spans the step, if it has ended; of a step made twice, the last."""
        return next((event for event in reversed(self.of(rank, step)) if event.name == STEP), None)

    def whole_steps(self) -> list[int]:
        """The steps that have ended on every rank."""
        ended = {(event.rank, event.step) for event in self.events if event.name == STEP}
        return [step for step in self.steps if all((rank, step) in ended for rank in self.ranks)]


class DeviceMarks(Protocol):
    """What times work on a device that goes on after Python has issued it (``instep.mesh.device.Marks``)."""

    def begin(self) -> Any: ...
    def end(self, begun: Any, what: Any) -> None: ...
    def settled(self) -> list[tuple[Any, int, int]]: ...  # what, start_ns, end_ns: once each, when it is over


class Recorder:
    """A rank's last ``capacity`` events, in memory or, from ``keep_in`` on, in a file.

    ``step`` is given to the events. A span inside one of the same lane and name is a part of it and leaves no
    event, so code that knows more (the training loop) may span what others (the wrapper's hooks) would.
    """

    def __init__(self, rank: int = 0, capacity: int = 16384) -> None:
        self.rank = rank
        self.step = -1
        self.by_optimizer = True  # an optimizer's step ends the step; False: the caller of begin_step says so
        self.marks: DeviceMarks | None = None
        self.watch: Callable[[str, bool], None] | None = None  # told when a span begins (True) and ends,
        self.watched: Container[str] = ()  # of these names
        self._capacity = capacity
        self._ring = RingBuffer(capacity)
        self._lanes: dict[int, str] = {}  # by thread, of those that have one of their own
        self._open: set[tuple[Any, ...]] = set()  # spans: lane, name and, with a lane of its own, the thread
        self._begun_ns = 0  # the step
        self._begun_at = 0  # how many records there were then
        self.optimizer_steps = 0
        self._worked = False  # since the last of them

    def keep_in(self, path: Path, capacity: int, head: Mapping[str, Any]) -> None:
        """Record into file ``path`` from now on.

        Raises:
            OSError: the file cannot be made.
        """
        self._ring = RingBuffer(capacity, path, {**head, "rank": self.rank})
        self._begun_at = self._ring.newest

    def keep_in_memory(self) -> None:
        """The file, if there is one, keeps what it has; later events go into private memory."""
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
        """Record what the block takes, also when it raises."""
        # Filled here: the call of an ``__init__`` takes as long as the clock is read twice.
        span = _new_span(Span)
        span.recorder, span.name, span.lane = self, name, lane
        span.bytes, span.leaf, span.bucket, span.peer, span.stage = num_bytes, leaf, bucket, peer, stage
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

    def put_all(self, told: Iterable[tuple[str, int, int, int, int]], *, lane: str, bucket: int) -> None:
        """Record several things that have ended: name, start, end, bytes, peer."""
        if self._lanes:
            lane = self._lanes.get(get_ident(), lane)
        write, step = self._ring.put, self.step
        for name, start_ns, end_ns, num_bytes, peer in told:
            write(name, lane, start_ns, end_ns, num_bytes, step, -1, bucket, peer)

    def begin_step(self, step: int) -> None:
        """From now on it is ``step``; the one before has ended, if it had begun."""
        now = time.monotonic_ns()
        self.end_step(now)
        self.step, self._begun_ns, self._begun_at = step, now, self._ring.newest

    def ensure_step(self) -> None:
        """A step is under way: if none has begun, and nothing else says when one does, it begins here."""
        self._worked = True
        if self.by_optimizer and not self._begun_ns:
            self.begin_step(self.optimizer_steps)

    def stepped(self) -> None:
        """An optimizer has made its step, the first one since there was something to compute."""
        if self.by_optimizer and self._worked:
            self._worked = False
            self.optimizer_steps += 1
            self.begin_step(self.optimizer_steps)

    def end_step(self, now_ns: int | None = None) -> None:
        """The step has ended, and none begins yet."""
        if self._begun_ns:
            self.settle()
            self.put(STEP, self._begun_ns, now_ns or time.monotonic_ns(), lane="host")
        self.drop_step()

    def drop_step(self) -> None:
        """The open step will not end, and none begins yet."""
        self.step, self._begun_ns = -1, 0

    def of_step(self, step: int) -> list[Event]:
        """The events of ``step``, one of the last, in the order of their ends."""
        found, begun = [], step == self.step
        for event in self._backwards():
            if event.name == STEP:
                if begun and event.step != step:
                    break
                begun = begun or event.step == step
            if event.step == step:
                found.append(event)
        return found[::-1]

    def so_far(self) -> list[Event]:
        """The events of the open step, as if it ended now."""
        self.settle()
        if not self._begun_ns:
            return []
        names, rank, step = self._ring.names, self.rank, self.step
        found = [
            _new_event(
                Event,
                (rank, names[lane], names[name], start, end, size, step, leaf, bucket, peer, stages - 1),
            )
            for _, start, end, size, of, leaf, bucket, peer, name, lane, stages in self._ring.since(
                self._begun_at
            )
            if of == step
        ]
        found.append(Event(rank, "host", STEP, self._begun_ns, time.monotonic_ns(), step=step))
        return found

    def last_steps(self, count: int) -> list[Event]:
        """The events of the last ``count`` steps that have ended, and since, in the order of their ends."""
        found: list[Event] = []
        for event in self._backwards():
            count -= event.name == STEP
            if count < 0:
                break
            found.append(event)
        return found[::-1]

    @property
    def events(self) -> list[Event]:
        """All events that are kept, in the order of their ends."""
        return [*self._backwards()][::-1]

    @contextmanager
    def as_lane(self, lane: str) -> Iterator[None]:
        """In the block, whatever this thread records is on ``lane``."""
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
        """Record what the device has done since the last time."""
        if self.marks is not None:
            for (name, lane, step, leaf, stage), start_ns, end_ns in self.marks.settled():
                self._ring.put(name, lane, start_ns, end_ns, 0, step, leaf, -1, -1, stage)

    def _backwards(self) -> Iterator[Event]:
        names, rank = self._ring.names, self.rank
        for record in self._ring.backwards():
            _, start_ns, end_ns, num_bytes, step, leaf, bucket, peer, name, lane, stages = record
            yield Event(
                rank,
                names[lane],
                names[name],
                start_ns,
                end_ns,
                num_bytes,
                step,
                leaf,
                bucket,
                peer,
                stages - 1,
            )


class Span:
    """A block that is timed; see ``Recorder.span``.

    What it does is written out, and not called: between two spans the processor's caches are computation's,
    and then each further call takes as long as a record.
    """

    __slots__ = (
        "bucket",
        "bytes",
        "key",
        "lane",
        "leaf",
        "name",
        "on_lane",
        "peer",
        "recorder",
        "stage",
        "start_ns",
        "token",
    )
    recorder: Recorder
    name: str
    lane: str
    bytes: int
    leaf: int
    bucket: int
    peer: int
    stage: int
    key: tuple[Any, ...]
    on_lane: str
    start_ns: int
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
        # After the start was noted: who is told may take time, as a fault does that is slow in a phase.
        if name in recorder.watched and recorder.watch is not None:
            recorder.watch(name, True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        start_ns = self.start_ns
        if not start_ns:
            return
        end_ns, recorder, name, lane = time.monotonic_ns(), self.recorder, self.name, self.on_lane
        recorder._open.discard(self.key)
        if name in recorder.watched and recorder.watch is not None:
            recorder.watch(name, False)
        if self.token is not None and recorder.marks is not None:
            recorder.marks.end(self.token, (name, self.lane, recorder.step, self.leaf, self.stage))
            lane = "host" if lane == self.lane else lane  # where it was issued
        recorder._ring.put(
            name,
            lane,
            start_ns,
            end_ns,
            self.bytes,
            recorder.step,
            self.leaf,
            self.bucket,
            self.peer,
            self.stage,
        )

    begin = __enter__
    end = __exit__

    def cancel(self) -> None:
        """It will not end, and leaves no event."""
        if self.start_ns:
            self.recorder._open.discard(self.key)
            if self.name in self.recorder.watched and self.recorder.watch is not None:
                self.recorder.watch(self.name, False)


_new_span = object.__new__
_new_event = tuple.__new__
