"""Where every worker is, as one table to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from instep.elastic.stuck import Reading
from instep.elastic.worker import Worker


def table(workers: Iterable[Worker], readings: Mapping[int, Reading]) -> str:
    """One line per worker: rank, process, phase, for how long, and how many steps it has made."""
    rows = [("rank", "pid", "phase", "seconds", "steps", "")]
    for worker in workers:
        reading = readings[worker.number]
        position = reading.position
        rows.append(
            (
                str(worker.rank) if worker.rank >= 0 else "-",
                str(worker.pid),
                position.phase,
                f"{position.seconds:.1f}",
                str(position.step),
                f"stopped for {reading.stopped_s:.1f} s" if reading.stopped_s else "",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
