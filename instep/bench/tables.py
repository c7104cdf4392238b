"""The output of a measurement: samples become figures, rows become tables, files record the environment.

A row is a flat dictionary from column name to text or number; all rows of a table have their columns in the
same order. Files hold the numbers as they are, tables round them to three digits.
"""

from __future__ import annotations

import csv
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from instep.bench.options import OutputFiles
from instep.checkpoint.contract import describe
from instep.net.device import gpu_names

Row = Mapping[str, Any]

COLUMNS = 100
WIDEST = 10_000


class Quantiles(NamedTuple):
    """Of the samples of one thing, in their unit."""

    min: float
    median: float
    p99: float


class Ratio(NamedTuple):
    """Of the pairs a[i] / b[i]: the median and the quartiles around it."""

    median: float
    low: float
    high: float


def quantile(samples: Sequence[float], share: float) -> float:
    """The value that ``share`` of the ``samples`` do not exceed, interpolated between neighbours.

    Raises:
        ValueError: there are no samples, or ``share`` is not within [0, 1].
    """
    if not samples or not 0 <= share <= 1:
        raise ValueError(f"expected samples and a share in [0, 1], got {len(samples)} samples, share {share}")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def quantiles(samples: Sequence[float]) -> Quantiles:
    """The least, the median and the 99th percentile; with few samples that is nearly the greatest."""
    return Quantiles(min(samples), statistics.median(samples), quantile(samples, 0.99))


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """How many times ``b`` is in ``a``, where a[i] and b[i] were measured right after each other.

    What disturbs the machine for longer than a sample disturbs both members of a pair, so their ratio is
    steadier than either time.

    Raises:
        ValueError: unequal numbers of samples.
    """
    if len(a) != len(b):
        raise ValueError(f"expected pairs, got {len(a)} and {len(b)} samples: interleave them one to one")
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    return Ratio(statistics.median(ratios), quantile(ratios, 0.25), quantile(ratios, 0.75))


def spread(name: str, found: Ratio | None, unit: str = "", scale: float = 1.0) -> dict[str, float | None]:
    """The columns of a ratio: its median, its quartiles."""
    values = [None] * 3 if found is None else [scale * value for value in found]
    return dict(zip((f"{name}{unit}", f"{name} q25{unit}", f"{name} q75{unit}"), values, strict=True))


def with_quartiles(row: Row, name: str, unit: str = "", digits: int = 2) -> str | None:
    """One of the columns of ``spread`` as people read it: 0.95 (0.93 to 0.97); None where there is none."""
    found = [row[f"{name}{part}{unit}"] for part in ("", " q25", " q75")]
    if None in found:
        return None
    middle, low, high = (f"{value:.{digits}f}" for value in found)
    return f"{middle} ({low} to {high})"


def short(rows: Sequence[Row], hidden: Collection[str] = ()) -> list[dict[str, Any]]:
    """Rows for people: the quartiles of ratios beside them, the rest of the spread and what is ``hidden``
    in the files."""
    return [
        {
            column: with_quartiles(row, *ratio) if (ratio := _ratio(row, column)) else value
            for column, value in row.items()
            if column not in hidden and "q25" not in column and "q75" not in column
        }
        for row in rows
    ]


def _ratio(row: Row, column: str) -> tuple[str, str, int] | None:
    """Name, unit and digits of a column of ratios, or of percent, that has quartiles."""
    name, bracket, unit = column.partition("(")
    has_quartiles = f"{name} q25{bracket}{unit}" in row and unit in ("", "%)")
    return (name, bracket + unit, 0 if unit else 2) if has_quartiles else None


def geometric_mean(values: Sequence[float]) -> float:
    """The mean for ratios: that of 2 and 1/2 is 1."""
    return statistics.geometric_mean(values)


def environment(command: str | None = None) -> dict[str, Any]:
    """Where and how a measurement was made, without names of hosts or folders."""
    known = describe(config={}, threads=1, device="cpu")
    gpus = gpu_names()
    return {
        "cpu": known["cpu.kind"],
        "cores": len(os.sched_getaffinity(0)),
        **({"gpus": gpus} if gpus else {}),
        "torch": known["torch"],
        "python": known["python"],
        "command": _command_line(sys.argv) if command is None else command,
        "date": date.today().isoformat(),
        **({"commit": commit} if (commit := checked_out()) else {}),
    }


def checked_out() -> str | None:
    """The commit of the checkout that this package is in, "-dirty" if code differs; None outside of one."""
    root = Path(__file__).parents[2]

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        if (root / ".git").exists():
            changed = git("status", "--porcelain", "--", "*.py", "*.c")
            return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    return None


def machine(backend: str = "gloo") -> str:
    """What computes where ranks talk through ``backend``: the cores of this machine, or its GPUs."""
    if backend == "nccl" and (gpus := gpu_names()):
        return f"{len(gpus)} GPUs ({gpus[0]})"
    found = environment()
    return f"{found['cores']} cores ({found['cpu']})"


def _command_line(argv: Sequence[str]) -> str:
    """``argv`` as it can be typed anywhere: of every path only the last part."""
    names = [Path(word).name if os.sep in word else word for word in argv]
    return " ".join(["instep" if names[0] == "__main__.py" else names[0], *names[1:]])


def write_json(path: str | Path, payload: Mapping[str, Any], *, command: str | None = None) -> None:
    """``payload`` with an ``environment`` before it; ``command`` is the process's unless it is given."""
    whole = {"environment": environment(command), **payload}
    Path(path).write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_csv(path: str | Path, rows: Sequence[Row]) -> None:
    """A line of column names, then one per row; columns that a row lacks are empty."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=_columns(rows), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write(
    files: OutputFiles, payload: Mapping[str, Any], rows: Sequence[Row], draw: Callable[[Path], object]
) -> None:
    """The files that were asked for, and no other; ``draw`` makes the chart at the path it is given."""
    if files.json is not None:
        write_json(files.json, payload)
    if files.csv is not None:
        write_csv(files.csv, rows)
    if files.chart is not None:
        draw(files.chart)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, numbers to the right, without a newline at the end."""
    columns = _columns(rows)
    rules = ["---:" if _is_numeric(rows, column) else "---" for column in columns]
    lines = [columns, rules, *([cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(rows: Sequence[Row], title: str, *, notes: Sequence[str] = ()) -> None:
    """The rows as an aligned table on stdout, under ``title`` and over ``notes``; no row is folded.

    A table that would be wider than ``COLUMNS`` is set more tightly.
    """
    console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True, width=WIDEST)
    table = _table(rows, tight=False)
    if console.measure(table).maximum > COLUMNS:
        table = _table(rows, tight=True)
    with suppress(BrokenPipeError):
        console.print(title, style="bold")
        console.print()
        console.print(table)
        console.print()
        for note in [*notes, ""] if notes else ():
            console.print(note)


def _table(rows: Sequence[Row], *, tight: bool) -> Table:
    columns = _columns(rows)
    gap = (0, 0) if tight else (0, 1)
    digits = 4 if tight else 6
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=gap)
    for column in columns:
        name = column.replace("(", "\n(") if tight else column
        table.add_column(name, justify="right" if _is_numeric(rows, column) else "left", no_wrap=True)
    for row in rows:
        values = [cell(row.get(column), digits) for column in columns]
        table.add_row(*([value.replace(",", "") for value in values] if tight else values))
    return table


def cell(value: Any, most: int = 6) -> str:
    """A value as people read it: three digits that count, thousands apart, nothing for None.

    ``most`` is the number of digits after the point that a small number may have.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:,.{min(digits, most)}f}"
    return str(value)


def size_text(nbytes: float) -> str:
    """1000 -> 1 KB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if round(nbytes / unit, 3) >= 1:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes:.3g} B"


def duration_text(microseconds: float) -> str:
    """1500 -> 1.5 ms."""
    for unit, name in ((1e6, "s"), (1e3, "ms")):
        if microseconds >= unit:
            return f"{microseconds / unit:.3g} {name}"
    return f"{microseconds:.3g} µs"


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _is_numeric(rows: Sequence[Row], column: str) -> bool:
    found = [row[column] for row in rows if row.get(column) is not None]
    return bool(found) and all(isinstance(value, int | float) for value in found)
