"""The tables that people expect of a profile: an overview, operators, kernels; as text for a terminal.

overview    where the time of the steps went: compute, communication, both at once, neither
operators   what PyTorch's operators took: in all, and by themselves, without those that they call
kernels     what ran on the device, and how long
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from instep.timeline.profiler import (
    ANNOTATION,
    KERNEL,
    OPERATOR,
    STEP_NAME,
    ProfileFigures,
    ProfileRecord,
    figures_of,
)

ROWS = 20
NAME_WIDTH = 60


class NamedTimes(NamedTuple):
    """All calls of one name; ``self_ns`` is ``total_ns`` without what lies in other operators within."""

    name: str
    calls: int
    total_ns: int
    self_ns: int


def profile_lines(records: Sequence[ProfileRecord], rank: int) -> Iterator[str]:
    """What ``instep report`` prints of ``records``, as ``read_records`` gives them, line by line.

    Raises:
        ValueError: threads that had work are not in them.
    """
    figures = figures_of(records, rank)
    yield from overview_lines(figures, rank)
    if not any(record.kind == ANNOTATION and STEP_NAME.match(record.name) for record in records):
        yield (
            "  the profile marks no steps, so all of it counts as one: make it with "
            "torch.profiler.profile(schedule=...), and call its step() after each step"
        )
    yield ""
    yield from _table("operator", operator_times(records))
    yield ""
    kernels = kernel_times(records)
    if kernels:
        yield from _table("kernel", kernels)
    else:
        yield "kernels: none, because no device was profiled; operators stand for them"


def overview_lines(figures: ProfileFigures, rank: int) -> Iterator[str]:
    """Where the time of the steps went; compute and communication without what they have in common."""
    total, num_steps = figures.total, len(figures.steps)
    steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
    yield f"profile of rank {rank}: {steps} on {figures.device}, {_ms(total.wall / num_steps)} ms each"
    parts = {
        "compute": total.kernels - total.overlap,
        "communication": total.communication - total.overlap,
        "both at once": total.overlap,
        "other": total.wall - total.busy,
    }
    for name, seconds in parts.items():
        yield f"  {name:<16}{_ms(seconds / num_steps):>10} ms{_percent(seconds, total.wall):>8}"
    yield (
        f"  utilisation {total.utilisation:.1%}: {total.kernel_share:.1%} compute and "
        f"{total.communication_share:.1%} communication, of which {total.overlap_share:.1%} ran under compute"
    )


def operator_times(records: Sequence[ProfileRecord]) -> list[NamedTimes]:
    """The operators of all threads, those with the longest ``self_ns`` first.

    ``records`` come by their start, the longer ones first. Calls within one of the same name count, but their
    time is in ``total_ns`` once.
    """
    calls: dict[str, int] = defaultdict(int)
    totals: dict[str, int] = defaultdict(int)
    own: dict[str, int] = defaultdict(int)
    open_by_thread: dict[str, list[ProfileRecord]] = defaultdict(list)
    for record in records:
        if record.kind != OPERATOR:
            continue
        stack = open_by_thread[record.thread]
        while stack and stack[-1].end_ns <= record.start_ns:
            stack.pop()
        duration_ns = record.end_ns - record.start_ns
        calls[record.name] += 1
        own[record.name] += duration_ns
        if stack:
            own[stack[-1].name] -= min(duration_ns, stack[-1].end_ns - record.start_ns)
        if all(outer.name != record.name for outer in stack):
            totals[record.name] += duration_ns
        stack.append(record)
    return _ranked(NamedTimes(name, calls[name], totals[name], own[name]) for name in calls)


def kernel_times(records: Sequence[ProfileRecord]) -> list[NamedTimes]:
    """The kernels of all streams, the longest first; none lies in another."""
    durations: dict[str, list[int]] = defaultdict(list)
    for record in records:
        if record.kind == KERNEL:
            durations[record.name].append(record.end_ns - record.start_ns)
    return _ranked(NamedTimes(name, len(ns), sum(ns), sum(ns)) for name, ns in durations.items())


def _ranked(rows: Iterator[NamedTimes]) -> list[NamedTimes]:
    return sorted(rows, key=lambda row: (-row.self_ns, row.name))


def _table(what: str, rows: Sequence[NamedTimes]) -> Iterator[str]:
    whole = sum(row.self_ns for row in rows)
    yield f"{'':>3} {what:<{NAME_WIDTH}}{'calls':>8}{'total(ms)':>11}{'self(ms)':>11}{'share':>8}"
    for place, row in enumerate(rows[:ROWS], start=1):
        name = "".join(x if x.isprintable() else "?" for x in row.name)
        name = name if len(name) < NAME_WIDTH else f"{name[: NAME_WIDTH - 4]}..."
        times = f"{_ms(row.total_ns / 1e9):>11}{_ms(row.self_ns / 1e9):>11}"
        yield f"{place:>3} {name:<{NAME_WIDTH}}{row.calls:>8}{times}{_percent(row.self_ns, whole):>8}"
    if len(rows) > ROWS:
        rest = sum(row.self_ns for row in rows[ROWS:])
        calls = sum(row.calls for row in rows[ROWS:])
        times = f"{'':>11}{_ms(rest / 1e9):>11}"
        label = f"{len(rows) - ROWS} more"
        yield f"{'':>3} {label:<{NAME_WIDTH}}{calls:>8}{times}{_percent(rest, whole):>8}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
