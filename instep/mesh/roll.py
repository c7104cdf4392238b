"""The roll call of a group as a table: which rank is where, which never came, and where its stack stands.

rank  where                                       number  shape            site           seconds  state
   2  never came; after the exchange of bucket 1      31  float32 (2048,)  data.py:40 get    12.0  running
   0  in the exchange of bucket 2                     32  float32 (2048,)  train.py:8 fit    12.0  sleeping
      and 61 more in the same place
rank 2 stands at (innermost last):
    ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from instep.mesh.flight import Row

HEAD = ("rank", "where", "number", "shape", "site", "seconds", "state")
NUMERIC = {"rank", "number", "seconds"}
NUM_ABSENT, NUM_PLACES, NUM_ALIKE, NUM_STACKS = 8, 6, 2, 3
SILENT = {
    "stopped": "its process is stopped: continue it with SIGCONT, or end it",
    "disk": "its process waits for a disk or a driver, where nothing can reach it",
    "gone": "its process has ended",
    "elsewhere": "it is on another host, where no rank that waits could ask it",
}
HOLDS_LOCK = "its main thread is in native code that holds the interpreter lock"


def table(rows: Sequence[Row], absent: Collection[int] = ()) -> str:
    """``rows`` for people: first the ``absent`` ranks, then the odd ones, then the others, summed up.

    The stacks of the absent come below it. At most some twenty lines, and ten for each of three stacks.
    """
    missing = [row for row in rows if row.rank in absent]
    lines: list[Sequence[str] | str] = [HEAD]
    lines += [_cells(row, "never came; " if row.status else "never came") for row in missing[:NUM_ABSENT]]
    more = missing[NUM_ABSENT:]
    if more:
        lines.append(f"and {len(more)} more that never came: {_numbers(more)}")
    places = _places(row for row in rows if row.rank not in absent)
    for place in places[:NUM_PLACES]:
        lines += [_cells(row) for row in place[:NUM_ALIKE]]
        if len(place) > NUM_ALIKE:
            lines.append(f"and {len(place) - NUM_ALIKE} more in the same place")
    elsewhere = [row for place in places[NUM_PLACES:] for row in place]
    if elsewhere:
        lines.append(f"and {len(elsewhere)} more in other places")
    return "\n".join([*_aligned(lines), *_stacks(missing)])


def _places(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that stand at the same line and operation, the fewest first: those are the odd ones."""
    found: dict[tuple[str, str, int, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.status, row.operation, row.number, row.what, row.site), []).append(row)
    return sorted(found.values(), key=len)


def _cells(row: Row, how: str = "") -> tuple[str, ...]:
    where = f"{row.status} {row.operation}" if row.status else "" if how else "unknown"
    seconds = f"{row.seconds:.1f}" if row.since else ""
    number = str(row.number) if row.status else ""
    return str(row.rank), how + where, number, row.what, row.site, seconds, row.state


def _aligned(lines: Sequence[Sequence[str] | str]) -> list[str]:
    """A ``str`` among the lines belongs to no column."""
    rows = [line for line in lines if not isinstance(line, str)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    return [_line(line, widths) for line in lines]


def _line(cells: Sequence[str] | str, widths: Sequence[int]) -> str:
    if isinstance(cells, str):
        return f"{' ' * (widths[0] + 2)}{cells}"
    padded = [
        cell.rjust(width) if name in NUMERIC else cell.ljust(width)
        for name, cell, width in zip(HEAD, cells, widths, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _stacks(missing: Sequence[Row]) -> list[str]:
    """Where the absent stand, those with the same stack together, and why some have none."""
    lines: list[str] = []
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in missing:
        found.setdefault(row.stack or (row.state,), []).append(row)
    for rows in list(found.values())[:NUM_STACKS]:
        name = f"rank {_numbers(rows)}"
        if not rows[0].stack:
            lines.append(f"{name} gives no answer: {SILENT.get(rows[0].state, HOLDS_LOCK)}")
            continue
        lines.append(f"{name} stands at (innermost last):")
        lines += [f"    {line}" for line in rows[0].stack]
        if rows[0].recent:
            lines.append(f"    its operations before, the last first: {', '.join(rows[0].recent)}")
    return lines


def _numbers(rows: Sequence[Row], most: int = 8) -> str:
    named = ", ".join(str(row.rank) for row in rows[:most])
    return named if len(rows) <= most else f"{named} and {len(rows) - most} more"
