"""``instep bench collectives``: what a collective costs, by size, backend and number of ranks.

The columns are those of nccl-tests, so that the rows can be laid beside its output. ``time(us)`` is the
median over samples of the slowest rank's time, with ``min(us)`` and ``p99(us)`` beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.bench import charts, tables
from instep.bench.bandwidth import WITH_ROOT, WITH_SUM, bound_applies, bound_s, figures
from instep.bench.collectives_rank import WARM_UP, default_names, fits, measure_collective, obstacle
from instep.bench.options import CollectivesOptions, sizes_of, split_words
from instep.bench.tables import Row, size_text
from instep.bench.worlds import on_ranks, slowest_rank

# Those that tell the story in a chart; it would have ten lines otherwise.
CHART_BACKENDS = ("gloo", "ring", "direct", "naive", "shm", "shm-in-place", "nccl")
BASELINE = "gloo"
PAIRS = "Median (and quartiles) of the ratios of samples of the same turn; the mean is geometric."
SUMMARY_SIZES = (1_000_000, 10_000_000, 100_000_000)  # the geometric mean is over these
HIDDEN = (
    "x gloo",
    "x gloo q25",
    "x gloo q75",
    "ranks",
    "bound(us)",
    "time/bound",
    "calls",
    "samples",
)  # in files only


def run(options: CollectivesOptions) -> None:
    """Measure as ``options`` say: tables on stdout, progress on stderr, files where they were asked for.

    Raises:
        ValueError: an unknown backend or size, fewer than two ranks or samples.
        RankFailed: a rank failed.
    """
    results = measure(options)
    for ranks in dict.fromkeys(row["ranks"] for row in results["rows"]):
        _show([row for row in results["rows"] if row["ranks"] == ranks], results, ranks)
    for note in results["skipped"]:
        print(f"skipped: {note}", file=sys.stderr)
    tables.write(options, results, results["rows"], lambda path: draw(results, path))


def _show(rows: Sequence[Row], results: dict[str, Any], ranks: int) -> None:
    shown = [{name: value for name, value in row.items() if name not in HIDDEN} for row in rows]
    memory = results["memory_bytes_per_s"].get(str(ranks))
    speed = [] if memory is None else [f"memory: {memory / 1e9:.1f} GB/s when all ranks copy."]
    tables.show(shown, f"{results['collective']} on {ranks} ranks", notes=[*notes(rows, results), *speed])
    faster = beside_gloo(rows)
    if faster:
        tables.show(faster, "Times as fast as gloo", notes=[PAIRS])
    if memory is not None:
        ratios, note = beside_the_bound(rows, memory)
        if ratios:
            tables.show(ratios, "Times as long as the memory allows", notes=[note])


def measure(options: CollectivesOptions) -> dict[str, Any]:
    """The rows of all worlds, the memory bandwidth that each measured, what was skipped and why."""
    options.check()
    sizes = sizes_of(options)
    wanted = split_words(options.backends) or default_names(options.collective)
    for name in wanted:
        obstacle(name, options.collective, 2)  # before anything is measured
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    memory: dict[str, float] = {}
    for ranks in options.ranks:
        reasons = {name: obstacle(name, options.collective, ranks) for name in wanted}
        skipped += [f"{name} on {ranks} ranks: {reason}" for name, reason in reasons.items() if reason]
        names = [name for name in wanted if reasons[name] is None]
        fitting = [size for size in sizes if fits(options.collective, names, size, ranks)]
        skipped += [
            f"{size_text(size)} on {ranks} ranks: it does not fit the memory"
            for size in sizes
            if size not in fitting
        ]
        if not names or not fitting:
            continue
        task = {
            "collective": options.collective,
            "backends": names,
            "sizes": fitting,
            "samples": options.samples,
            "budget_s": options.budget_s,
            "bound": options.collective == "all_reduce",
        }
        by_rank = on_ranks(measure_collective, task, ranks=ranks)
        if task["bound"]:
            memory[str(ranks)] = by_rank[0]["memory"]
        rows += _rows(options.collective, ranks, names, by_rank)
    return {
        "collective": options.collective,
        "samples": options.samples,
        "warm_up": WARM_UP,
        "memory_bytes_per_s": memory,
        "skipped": list(dict.fromkeys(skipped)),
        "rows": rows,
    }


def _rows(
    collective: str, ranks: int, names: Sequence[str], by_rank: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    rows = []
    for parts in zip(*(rank["sizes"] for rank in by_rank), strict=True):
        size, count = parts[0]["size"], parts[0]["count"]
        slowest = {name: slowest_rank([part["times"][name] for part in parts]) for name in names}
        for name in names:
            times = tables.quantiles([1e6 * s for s in slowest[name]])
            row = {
                "ranks": ranks,
                "backend": name,
                "size(B)": size,
                "count": count,
                "type": "float",
                "redop": "sum" if collective in WITH_SUM else "none",
                "root": 0 if collective in WITH_ROOT else -1,
                "time(us)": times.median,
                "min(us)": times.min,
                "p99(us)": times.p99,
                **figures(collective, size, ranks, times.median),
                "#wrong": sum(part["wrong"][name] for part in parts),
                "calls": parts[0]["calls"][name],
                "samples": len(parts[0]["times"][name]),
            }
            if BASELINE in slowest:
                ratio = tables.paired_ratio(slowest[BASELINE], slowest[name])
                row |= {"x gloo": ratio.median, "x gloo q25": ratio.low, "x gloo q75": ratio.high}
            memory = by_rank[0]["memory"]
            if memory is not None and bound_applies(size, ranks):
                row["bound(us)"] = 1e6 * bound_s(size, ranks, memory)
                row["time/bound"] = times.median / row["bound(us)"]
            rows.append(row)
    return rows


def notes(rows: Sequence[Row], results: dict[str, Any]) -> list[str]:
    """What has to be known to read the table of one number of ranks."""
    calls = max(row["calls"] for row in rows)
    return [
        f"time: median of {_samples(rows)} samples of the slowest rank, after {results['warm_up']} calls of "
        "warm-up;",
        f"backends alternate; a sample of a short message is the mean of up to {calls} calls.",
    ]


def _samples(rows: Sequence[Row]) -> str:
    """How many samples the rows are made of: "20", or "3 to 20" where long ones got fewer."""
    counts = sorted({row["samples"] for row in rows})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def beside_the_bound(rows: Sequence[Row], memory: float) -> tuple[list[Row], str]:
    """How many times as long as the memory allows each backend takes, a column per size; and what that is.

    Only of sizes to which the bound applies; there may be none.
    """
    rows = [row for row in rows if "bound(us)" in row]
    bounds = {size_text(row["size(B)"]): row["bound(us)"] for row in rows}
    table = {
        name: {size_text(row["size(B)"]): row["time/bound"] for row in rows if row["backend"] == name}
        for name in dict.fromkeys(row["backend"] for row in rows)
    }
    least = ", ".join(f"{bound:,.0f} us for {size}" for size, bound in bounds.items())
    note = f"bound: 2 W S / {memory / 1e9:.1f} GB/s, which all ranks reach when they copy; {least}."
    return [{"backend": name, **ratios} for name, ratios in table.items()], note


def beside_gloo(rows: Sequence[Row]) -> list[Row]:
    """How many times as fast as gloo each backend is, with quartiles: a column per size, and the mean."""
    found: list[Row] = []
    for name in dict.fromkeys(row["backend"] for row in rows):
        mine = [row for row in rows if row["backend"] == name and "x gloo" in row]
        if not mine or name == BASELINE:
            continue
        columns: dict[str, Any] = {"backend": name}
        for row in mine:
            columns[size_text(row["size(B)"])] = (
                f"{row['x gloo']:.2f} ({row['x gloo q25']:.2f}-{row['x gloo q75']:.2f})"
            )
        averaged = [row["x gloo"] for row in mine if row["size(B)"] in SUMMARY_SIZES]
        if len(averaged) == len(SUMMARY_SIZES):
            columns["mean of 1, 10, 100 MB"] = round(tables.geometric_mean(averaged), 2)
        found.append(columns)
    return found


def draw(results: Mapping[str, Any], path: str | Path) -> list[Path]:
    """Time and bus bandwidth over size, a column of panels per number of ranks."""
    return charts.against_size(
        results["rows"],
        path,
        title=f"{results['collective']}: time and bus bandwidth against message size",
        subtitle=subtitle(results["rows"]),
    )


def subtitle(rows: Sequence[Row]) -> str:
    """How the ``rows`` of a chart were measured."""
    found = tables.environment()
    banded = len({row["backend"] for row in rows}) <= charts.MOST_BANDS
    return (
        f"float32, one thread per rank, {found['cores']} cores ({found['cpu']}); median of "
        f"{_samples(rows)} samples" + (", band from the least to the 99th percentile" if banded else "")
    )
