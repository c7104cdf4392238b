"""The chrome trace that torch.profiler exports (kineto writes it), read as records; of JSON and nothing else.

It may come from anybody: whatever is wrong with it is a ``ValueError`` that says so.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from instep.timeline.intervals import Stretch

MAX_BYTES = 1 << 30  # of JSON; in memory it is about eight times as much
MAX_MICROSECONDS = 1e17  # later than the year 5000
GZIP = b"\x1f\x8b"

OPERATOR, ANNOTATION, KERNEL, COPY, RUNTIME = "operator", "annotation", "kernel", "copy", "runtime"
KINDS = {
    "cpu_op": OPERATOR,
    "user_annotation": ANNOTATION,
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "gpu_memset": COPY,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    # in older profiles
    "Operator": OPERATOR,
    "Kernel": KERNEL,
    "Memcpy": COPY,
    "Memset": COPY,
    "Runtime": RUNTIME,
}
STEP_NAME = re.compile(r"ProfilerStep\s*#\s*(\d{1,15})$")


class Record(NamedTuple):
    """One complete event of a profile; ``correlation`` is the same for a kernel and for what launched it."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    thread: str
    correlation: int | None

    @property
    def stretch(self) -> Stretch:
        return (self.start_ns, self.end_ns)


def read_trace(path: Path, what: str) -> tuple[list[Record], int]:
    """The records in file ``path``, by their start, the longer ones first, and the rank (0 if it says none).

    ``what`` is what errors call the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, cut off, too large, or no profile.
    """
    trace = _load(path, what)
    records = sorted(_records(trace, what), key=lambda record: (record.start_ns, -record.end_ns))
    if not any(record.kind in (OPERATOR, KERNEL) for record in records):
        raise ValueError(
            f"{what} has neither operators nor kernels in it: it is no profile of torch.profiler"
        )
    told = trace.get("distributedInfo")
    rank = told.get("rank") if isinstance(told, dict) else None
    return records, rank if isinstance(rank, int) and 0 <= rank < 1 << 31 else 0


def _load(path: Path, what: str) -> dict[str, Any]:
    with path.open("rb") as raw:
        packed = raw.read(len(GZIP)) == GZIP
        raw.seek(0)
        try:
            data = (gzip.GzipFile(fileobj=raw) if packed else raw).read(MAX_BYTES + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{what} is damaged or cut off: it cannot be unpacked ({error})") from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"{what} holds more than {MAX_BYTES} bytes of JSON: profile fewer steps")
    try:
        trace = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is damaged or cut off: it is not JSON ({error})") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f'{what} is no profile: expected an object with a list "traceEvents"')
    return trace


def _records(trace: Mapping[str, Any], what: str) -> Iterator[Record]:
    base_ns = trace.get("baseTimeNanoseconds", 0)
    if not isinstance(base_ns, int) or abs(base_ns) > MAX_MICROSECONDS * 1e3:
        raise ValueError(f'{what}: expected nanoseconds as "baseTimeNanoseconds", got {_shown(base_ns)}')
    for number, event in enumerate(trace["traceEvents"]):
        where = f"{what}, event {number}"
        if not isinstance(event, dict):
            raise ValueError(f"{where}: expected an object, got {_shown(event)}")
        category = event.get("cat")
        kind = KINDS.get(category) if isinstance(category, str) else None
        if event.get("ph") == "X" and kind is not None:
            yield _record(event, kind, base_ns, where)


def _record(event: Mapping[str, Any], kind: str, base_ns: int, where: str) -> Record:
    name, args = event.get("name"), event.get("args")
    if not isinstance(name, str):
        raise ValueError(f"{where}: expected a name, got {_shown(name)}")
    if STEP_NAME.match(name):
        kind = ANNOTATION  # in older profiles an operator
    start_ns = base_ns + _nanoseconds(event, "ts", where)
    duration_ns = _nanoseconds(event, "dur", where)
    if duration_ns < 0:
        raise ValueError(f"{where}: expected a duration of at least 0, got {duration_ns / 1e3} us")
    correlation = args.get("correlation") if isinstance(args, dict) else None
    return Record(
        kind,
        name,
        start_ns,
        start_ns + duration_ns,
        f"{_shown(event.get('pid'))} {_shown(event.get('tid'))}",
        correlation if isinstance(correlation, int) else None,
    )


def _nanoseconds(event: Mapping[str, Any], key: str, where: str) -> int:
    value = event.get(key)
    if not isinstance(value, int | float) or not abs(value) < MAX_MICROSECONDS:  # NaN is not less either
        raise ValueError(f'{where}: expected microseconds as "{key}", got {_shown(value)}')
    return round(value * 1000)


def _shown(value: object) -> str:
    return f"{value!r:.60}" if isinstance(value, str | int | float) else f"a {type(value).__name__}"
