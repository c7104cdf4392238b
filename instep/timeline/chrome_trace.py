"""A timeline as files for other people's viewers: chrome traces for Perfetto, and one per rank for HTA.

    trace.json.gz          all ranks, to be opened in ui.perfetto.dev or chrome://tracing
        rank 0 (host)      a process per rank
            host           a track per lane; what overlaps without nesting goes to a track of its own
            ...
            queued         when gradient buckets were whole but not on their way yet
            bubbles        what ``instep.timeline.bubbles`` finds, by cause
        arrows             from a send to what it arrives in, and from the slow rank to those that waited

    hta/rank-0.json.gz     one per rank, as torch.profiler writes them: the folder for ``TraceAnalysis``

Holistic Trace Analysis (github.com/facebookresearch/HolisticTraceAnalysis, 0.5) reads GPU traces: it takes
events with a "stream" for kernels, and kernels for communication if their name begins with "nccl" and has
"Kernel" in it (``hta.utils.utils.is_comm_kernel``). So what a rank computed is a kernel on stream 7, and what
it exchanged is one on stream 20 called ``ncclKernel_instep_exchange``, *whatever the backend was*, gloo or
shared memory too. A kernel counts only if something on a thread has the same "correlation", and lies in a
"ProfilerStep#N": where no device was in use the kernel's double on the thread that trains. HTA leaves out the
last step (by default) and rounds to microseconds. All files of a folder must be of ranks: one
without "rank" would stand for rank 0, which is why these have a folder of their own.

Times are in microseconds, with the nanoseconds as decimals, since the first event; "otherData" has its time.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from instep.events import LANES, STEP, Event, Timeline
from instep.regular_files import create_over
from instep.timeline.bubbles import ISSUED, QUEUED, WAIT, Bubble, bubbles

ALL_PAIRS = 8  # ranks; where there are more, arrows go from each rank to the next only
MAX_ARROWS = 20_000  # as well where there would be more than these
TRACKS = ("host", "data", "compute", "communication", QUEUED, "bubbles")  # from the top down
COMPUTE_STREAM, COMMUNICATION_STREAM, THREADS_STREAM = 7, 20, 30
COMMUNICATION_KERNEL = "ncclKernel_instep_"
TRAINS, EXCHANGES = "the thread that trains", "the thread of exchanges"
LINES_AT_ONCE = 4096

Arrow = tuple[Event, int, Event, int, str]  # from, at; to, at; name


def write_traces(
    timeline: Timeline,
    folder: Path,
    *,
    world_size: int,
    hosts: Mapping[int, str] | None = None,
    backend: str = "unknown",
) -> list[Path]:
    """Write ``timeline`` into ``folder``, which is made: the trace of all ranks, and one for each rank.

    ``hosts`` are names by rank, ``backend`` is for HTA. The files are written event by event; an older one is
    written over.

    Raises:
        OSError: a file cannot be written.
    """
    events = timeline.events
    base_ns = min((event.start_ns for event in events), default=0)
    chosen = sorted({event.step for event in events if event.step >= 0})
    ranks = sorted({event.rank for event in events})
    kind: dict[str, Any] = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "otherData": {"clock": "monotonic", "base_ns": base_ns, "steps": [*chosen[:1], *chosen[-1:]]},
    }
    (folder / "hta").mkdir(parents=True, exist_ok=True)
    paths = [folder / "trace.json.gz"]
    processes = {rank: _Process(rank + 1, _title(rank, hosts), base_ns, TRACKS) for rank in ranks}
    _write(paths[0], kind, _all_ranks(timeline, events, chosen, processes))
    digits = len(str(max([world_size - 1, *ranks])))
    for rank in ranks:
        paths.append(folder / "hta" / f"rank-{rank:0{digits}d}.json.gz")
        info = {"backend": backend, "rank": rank, "world_size": world_size}
        own = (event for event in events if event.rank == rank)
        _write(paths[-1], {**kind, "distributedInfo": info}, _one_rank(own, _title(rank, hosts), base_ns))
    return paths


def _title(rank: int, hosts: Mapping[int, str] | None) -> str:
    host = (hosts or {}).get(rank)
    return f"rank {rank} ({host})" if host else f"rank {rank}"


def _write(path: Path, head: Mapping[str, Any], lines: Iterator[str]) -> None:
    """The head comes first and on one line, where HTA looks for the rank."""
    with (
        os.fdopen(create_over(path), "wb") as raw,
        gzip.GzipFile(path, "wb", compresslevel=3, fileobj=raw, mtime=0) as file,
    ):
        file.write(f'{json.dumps(head)[:-1]}, "traceEvents": [\n'.encode())
        between = b""
        while block := list(islice(lines, LINES_AT_ONCE)):
            file.write(between + ",\n".join(block).encode())
            between = b",\n"
        file.write(b"\n]}\n")


class _Process:
    """A process of a trace, and its tracks: made when the first slice comes, named when all have come.

    Slices of one track must lie in each other or apart, else viewers show them wrongly.
    """

    def __init__(self, number: int, title: str, base_ns: int, order: Iterable[str]) -> None:
        self.number, self.title, self.base_ns = number, title, base_ns
        self._order = {name: place for place, name in enumerate(order)}
        self._open: dict[str, list[list[int]]] = defaultdict(list)  # for each track: ends, the innermost last
        self._numbers: dict[tuple[str, int], int] = {}
        self._elsewhere: dict[int, int] = {}  # id of an event that is not on the first track of its name

    def slice(
        self, track: str, category: str, name: str, start_ns: int, end_ns: int, args: Mapping[str, int]
    ) -> str:
        """One line, for a slice on ``track``; slices come by their start, the longer ones first."""
        return self._line(track, self._place(track, start_ns, end_ns), category, name, start_ns, end_ns, args)

    def event(self, event: Event) -> str:
        """The line for an event on the track of its lane."""
        track = _track(event)
        place = self._place(track, event.start_ns, event.end_ns)
        if place:
            self._elsewhere[id(event)] = place
        return self._line(track, place, event.lane, event.name, event.start_ns, event.end_ns, _details(event))

    def arrow(self, phase: str, number: int, name: str, event: Event, at_ns: int) -> str:
        """One end of an arrow, within ``event``, whose line has been written."""
        tid = self._tid(_track(event), self._elsewhere.get(id(event), 0))
        enclosing = ', "bp": "e"' if phase == "f" else ""  # else it would bind to the next slice
        return (
            f'{{"ph": "{phase}", "id": {number}, "cat": "arrow", "name": {_text(name)}, '
            f'"pid": {self.number}, "tid": {tid}, "ts": {_micros(at_ns - self.base_ns)}{enclosing}}}'
        )

    def names(self) -> Iterator[str]:
        """What the process and its tracks are called, and their order."""
        if not self._numbers:
            return
        yield self._metadata("process_name", 0, name=self.title)
        yield self._metadata("process_sort_index", 0, sort_index=self.number)
        for (track, place), tid in self._numbers.items():
            yield self._metadata("thread_name", tid, name=f"{track} ({place + 1})" if place else track)
            yield self._metadata("thread_sort_index", tid, sort_index=self._order[track] * 1000 + place)

    def _line(
        self,
        track: str,
        place: int,
        category: str,
        name: str,
        start_ns: int,
        end_ns: int,
        args: Mapping[str, int],
    ) -> str:
        ts, dur = _micros(start_ns - self.base_ns), _micros(max(end_ns - start_ns, 0))
        details = ", ".join([f'"{key}": {value}' for key, value in args.items()])
        return (
            f'{{"ph": "X", "cat": {_text(category)}, "name": {_text(name)}, "pid": {self.number}, '
            f'"tid": {self._tid(track, place)}, "ts": {ts}, "dur": {dur}, "args": {{{details}}}}}'
        )

    def _place(self, track: str, start_ns: int, end_ns: int) -> int:
        tracks = self._open[track]
        for place, ends in enumerate(tracks):
            while ends and ends[-1] <= start_ns:
                ends.pop()
            if not ends or end_ns <= ends[-1]:
                ends.append(end_ns)
                return place
        tracks.append([end_ns])
        return len(tracks) - 1

    def _tid(self, track: str, place: int) -> int:
        tid = self._numbers.get((track, place))
        if tid is None:
            self._order.setdefault(track, len(self._order))
            tid = self._numbers[track, place] = self.number * 1000 + len(self._numbers)
        return tid

    def _metadata(self, what: str, tid: int, **args: object) -> str:
        return json.dumps({"ph": "M", "name": what, "pid": self.number, "tid": tid, "args": args})


def _all_ranks(
    timeline: Timeline, events: Iterable[Event], steps: list[int], processes: Mapping[int, _Process]
) -> Iterator[str]:
    for event in events:
        yield processes[event.rank].event(event)
    found = (bubble for step in steps for rank in processes for bubble in bubbles(timeline.of(rank, step)))
    for bubble in found:
        details = _known({"step": bubble.step, "peer": bubble.peer})
        yield processes[bubble.rank].slice(
            "bubbles", "bubble", _cause(bubble), bubble.start_ns, bubble.end_ns, details
        )
    numbers = count(1)
    for start, left_ns, end, arrived_ns, name in _arrows(timeline, steps, list(processes)):
        number = next(numbers)
        yield processes[start.rank].arrow("s", number, name, start, left_ns)
        yield processes[end.rank].arrow("f", number, name, end, arrived_ns)
    for process in processes.values():
        yield from process.names()


def _cause(bubble: Bubble) -> str:
    return f"{bubble.cause}: rank {bubble.peer} is late" if bubble.is_slowness else bubble.cause


def _arrows(timeline: Timeline, steps: list[int], ranks: list[int]) -> Iterator[Arrow]:
    """Where messages went, and which rank others waited for; each end lies within its event."""
    of_all = (event for step in steps for rank in ranks for event in timeline.of(rank, step))
    exchanges = sum(event.name == "exchange" for event in of_all)
    everyone = len(ranks) <= ALL_PAIRS and exchanges * (len(ranks) - 1) <= MAX_ARROWS
    next_only = list(zip(ranks, ranks[1:] + ranks[:1], strict=True))
    pairs = [(a, b) for a in ranks for b in ranks] if everyone else next_only
    for step in steps:
        found: dict[tuple[str, int], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
        for event in chain.from_iterable(timeline.of(rank, step) for rank in ranks):
            if event.lane == "communication" and event.bucket >= 0 and event.end_ns > event.start_ns:
                found[event.name, event.bucket][event.rank].append(event)
        for (name, bucket), by_rank in list(found.items()):
            if name == "exchange":
                yield from _messages(by_rank, by_rank, pairs, f"bucket {bucket}")
            elif name == "aggregate":  # only to and from the server, which is the rank that sums
                links = [(a, b) for a in ranks for b in ranks if (a in by_rank) != (b in by_rank)]
                sent, received = found["send", bucket], found["receive", bucket]
                yield from _messages(sent, received, links, f"bucket {bucket}")
            elif name == WAIT:
                yield from _late(by_rank, found[QUEUED, bucket], f"waited for bucket {bucket}")


def _messages(
    sent: Mapping[int, list[Event]],
    received: Mapping[int, list[Event]],
    pairs: Iterable[tuple[int, int]],
    name: str,
) -> Iterator[Arrow]:
    """From the begin of a send to the end of what it arrives in."""
    for rank, other in pairs:
        for start, end in zip(sent.get(rank, ()), received.get(other, ()), strict=False):
            if rank != other and start.start_ns < end.end_ns:
                yield start, start.start_ns, end, end.end_ns - 1, name


def _late(
    waits: Mapping[int, list[Event]], handed_over: Mapping[int, list[Event]], name: str
) -> Iterator[Arrow]:
    """From the hand-over of the rank that was last to the end of the wait for it."""
    for wait in chain.from_iterable(waits.values()):
        of_peer = handed_over.get(wait.peer, [])
        late = min(of_peer, key=lambda event: abs(event.end_ns - wait.end_ns), default=wait)
        left_ns = min(late.end_ns, wait.end_ns) - 1
        if late is not wait and left_ns >= late.start_ns:
            yield late, left_ns, wait, wait.end_ns - 1, name


def _one_rank(events: Iterable[Event], title: str, base_ns: int) -> Iterator[str]:
    """The lines that HTA reads: what threads did, and the kernels that they issued or that stand for it."""
    threads = _Process(1, f"{title}: threads", base_ns, (TRAINS, EXCHANGES, QUEUED))
    device = _Process(2, f"{title}: kernels", base_ns, ("stream 7: compute", "stream 20: communication"))
    issued: dict[tuple[str, int, int], deque[int]] = defaultdict(deque)  # by name, step, leaf: correlations
    streams: dict[str, int] = {"compute": COMPUTE_STREAM, "communication": COMMUNICATION_STREAM}
    numbers = count(1)
    for event in events:
        key, times, details = (
            (event.name, event.step, event.leaf),
            (event.start_ns, event.end_ns),
            _details(event),
        )
        if event.lane == "host" and event.name in ISSUED:  # its kernel comes later
            issued[key].append(next(numbers))
            details = {"correlation": issued[key][-1], **details}
            yield threads.slice(TRAINS, "cpu_op", event.name, *times, details)
        elif not _is_work(event):
            name = f"ProfilerStep#{event.step}" if event.name == STEP and event.lane == "host" else event.name
            yield threads.slice(_thread(event), "user_annotation", name, *times, details)
        else:
            stream = streams.setdefault(event.lane, THREADS_STREAM + len(streams) - 2)
            if event.lane == "compute" and issued[key]:
                number = issued[key].popleft()
            else:
                number = next(numbers)
                double = {"correlation": number, **details}
                yield threads.slice(_thread(event), "cpu_op", event.name, *times, double)
            name = COMMUNICATION_KERNEL + event.name if event.lane == "communication" else event.name
            kernel = {"device": 0, "stream": stream, "correlation": number, **details}
            yield device.slice(f"stream {stream}: {event.lane}", "kernel", name, *times, kernel)
    yield from chain(threads.names(), device.names())


def _is_work(event: Event) -> bool:
    """Was it computed or sent? Else a rank waited, or it is neither."""
    if event.lane == "communication":
        return event.name not in (QUEUED, WAIT)
    return event.lane not in ("data", "host") and event.name != "data"


def _thread(event: Event) -> str:
    """The track of what a thread did."""
    if event.lane == "communication":
        return QUEUED if event.name == QUEUED else EXCHANGES
    return TRAINS if event.lane in LANES else event.lane


def _track(event: Event) -> str:
    return QUEUED if event.lane == "communication" and event.name == QUEUED else event.lane


def _details(event: Event) -> dict[str, int]:
    """What is known of an event besides its times."""
    known = {"step": event.step, "leaf": event.leaf, "bucket": event.bucket, "peer": event.peer}
    return _known({**known, "stage": event.stage, "bytes": event.bytes or -1})


def _known(figures: Mapping[str, int]) -> dict[str, int]:
    return {name: figure for name, figure in figures.items() if figure >= 0}


def _micros(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


@lru_cache(maxsize=4096)
def _text(value: str) -> str:
    return json.dumps(value)
