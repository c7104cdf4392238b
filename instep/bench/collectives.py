"""``instep bench collectives``: the time of a collective, by size, backend and number of ranks.

The columns are those of nccl-tests, so that the rows can be laid beside its output. ``time(us)`` is the
median over samples of the slowest rank's time, with ``min(us)`` and ``p99(us)`` beside it. ``predicted(us)``
is the cost of the steps (``comm.cost``) with the latency and the bandwidth of a message that the same run has
measured between two ranks; empty where no messages are sent.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from instep.bench import charts, tables
from instep.bench.bandwidth import WITH_ROOT, WITH_SUM, bound_applies, bound_s, figures
from instep.bench.charts import Measure
from instep.bench.collectives_rank import WARM_UP, default_names, fits, measure_collective, obstacle
from instep.bench.hosts import bytes_per_s
from instep.bench.options import CollectivesOptions, sizes_of, split_words
from instep.bench.tables import Row, duration_text, size_text
from instep.bench.worlds import on_ranks, over_link, slowest_rank
from instep.comm.algorithms import SCHEDULES
from instep.comm.cost import AlphaBeta, collective_cost, fit

# Those that tell the story in a chart; it would have ten lines otherwise.
CHART_BACKENDS = ("gloo", "ring", "direct", "naive", "shm", "shm-in-place", "nccl")
BASELINE = "gloo"
# Which of our algorithms has the rounds and bytes of gloo's, by its source: gloo/allreduce.cc (a ring, in
# segments, so that one is added while the next is under way), allgather.cc, broadcast.cc.
GLOO = {"all_reduce": "ring", "all_gather": "ring", "broadcast": "tree"}
PAIRS = "Median (and quartiles) of the ratios of samples of the same turn; the mean is geometric."
SUMMARY_SIZES = (1_000_000, 10_000_000, 100_000_000)  # the geometric mean is over these
HIDDEN = ("x gloo", "ranks", "bound(us)", "time/bound", "calls", "samples")  # in files only


def run(options: CollectivesOptions) -> None:
    """Measure as ``options`` say: tables on stdout, progress on stderr, files where they were asked for."""
    results = measure(options)
    for ranks in dict.fromkeys(row["ranks"] for row in results["rows"]):
        _show([row for row in results["rows"] if row["ranks"] == ranks], results, ranks)
    for note in results["skipped"]:
        print(f"skipped: {note}", file=sys.stderr)
    tables.write(options, results, results["rows"], lambda path: draw(results, path))


def _show(rows: Sequence[Row], results: dict[str, Any], ranks: int) -> None:
    shown = tables.short(rows, HIDDEN)
    memory = results["memory_bytes_per_s"].get(str(ranks))
    speed = [] if memory is None else [f"memory: {memory / 1e9:.1f} GB/s when all ranks copy."]
    said = [*notes(rows, results), prediction(results, ranks), *speed]
    tables.show(shown, f"{results['collective']} on {where(results, ranks)}", notes=said)
    faster = beside_gloo(rows)
    if faster:
        tables.show(faster, "Times as fast as gloo", notes=[PAIRS])
    if memory is not None:
        ratios, note = beside_the_bound(rows, memory)
        if ratios:
            tables.show(ratios, "Times as long as the memory allows", notes=[note])


def where(results: Mapping[str, Any], ranks: int) -> str:
    """What the ranks were on."""
    return f"{ranks} ranks" if results["link"] is None else f"{ranks} hosts, {results['link']} to each"


def measure(options: CollectivesOptions) -> dict[str, Any]:
    """The rows of all worlds, the memory bandwidth that each measured, what was skipped and why."""
    options.check()
    sizes = sizes_of(options)
    wanted = split_words(options.backends) or default_names(options.collective, hosts=options.link)
    for name in wanted:
        obstacle(name, options.collective, 2)  # before anything is measured
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    memory: dict[str, float] = {}
    messages: dict[str, dict[str, float]] = {}
    for ranks in options.ranks:
        reasons = {name: obstacle(name, options.collective, ranks, hosts=options.link) for name in wanted}
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
            "bound": options.collective == "all_reduce"
            and not options.link
            and any(bound_applies(size, ranks) for size in fitting),
        }
        by_rank = _in_world(options, task, ranks)
        if task["bound"]:
            memory[str(ranks)] = by_rank[0]["memory"]
        message = _message(options, by_rank[0]["messages"])
        messages[str(ranks)] = asdict(message)
        rows += _rows(options.collective, ranks, names, by_rank, message)
    return {
        "collective": options.collective,
        "link": options.rate if options.link else None,
        "samples": options.samples,
        "warm_up": WARM_UP,
        "memory_bytes_per_s": memory,
        "message": messages,
        "skipped": list(dict.fromkeys(skipped)),
        "rows": rows,
    }


def _in_world(options: CollectivesOptions, task: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """What each rank measured: on this host, or on one host each."""
    if options.link:
        return over_link(measure_collective, task, hosts=ranks, rate=options.rate)
    return on_ranks(measure_collective, task, ranks=ranks)


def _message(options: CollectivesOptions, timed: Mapping[str, Sequence[float]]) -> AlphaBeta:
    """What a message costs; over a link a byte costs at least what the link's rate says.

    The beginning of each message passes a link at the speed of memory (``hosts``): where none is long, a fit
    would take that for the link's.
    """
    found = fit(timed["bytes"], timed["seconds"])
    least_s = 1 / bytes_per_s(options.rate) if options.link else 0.0
    return AlphaBeta(found.latency_s, max(found.s_per_byte, least_s))


def _rows(
    collective: str,
    ranks: int,
    names: Sequence[str],
    by_rank: Sequence[dict[str, Any]],
    message: AlphaBeta,
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
                **predicted(collective, name, ranks, size, message, times.median),
                "#wrong": sum(part["wrong"][name] for part in parts),
                "calls": parts[0]["calls"][name],
                "samples": len(parts[0]["times"][name]),
            }
            if BASELINE in slowest:
                ratio = tables.paired_ratio(slowest[BASELINE], slowest[name])
                row |= tables.spread("x gloo", ratio)
            memory = by_rank[0]["memory"]
            if memory is not None and bound_applies(size, ranks):
                row["bound(us)"] = 1e6 * bound_s(size, ranks, memory)
                row["time/bound"] = times.median / row["bound(us)"]
            rows.append(row)
    return rows


def predicted(
    collective: str, backend: str, ranks: int, size: int, message: AlphaBeta, time_us: float
) -> dict[str, float | None]:
    """The time of the alpha-beta model, and how many times it the measured one is; None without steps."""
    algorithm = GLOO.get(collective, "") if backend == BASELINE else backend
    schedule = SCHEDULES[collective].get(algorithm)
    if schedule is None:
        return {"predicted(us)": None, "time/predicted": None}
    cost = collective_cost(schedule, ranks, size // 4, itemsize=4)
    expected_us = 1e6 * cost.time_s(message.latency_s, message.s_per_byte)
    return {"predicted(us)": expected_us, "time/predicted": time_us / expected_us}


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
    bounds = {size_text(row["size(B)"]): row["bound(us)"] for row in rows if "bound(us)" in row}
    least = ", ".join(f"{bound:,.0f} us for {size}" for size, bound in bounds.items())
    note = f"bound: 2 W S / {memory / 1e9:.1f} GB/s, the rate of all ranks copying at once; {least}."
    return by_backend(rows, "time/bound"), note


def by_backend(rows: Sequence[Row], column: str) -> list[Row]:
    """What ``column`` has: a row per backend, a column per size; only of rows that have anything there."""
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get(column) is not None:
            mine = table.setdefault(row["backend"], {"backend": row["backend"]})
            mine[size_text(row["size(B)"])] = row[column]
    return list(table.values())


def by_size(rows: Sequence[Row], sizes: Sequence[int]) -> list[Row]:
    """A row per number of ranks and backend, a column for each of ``sizes``: the median time.

    A message of W equal parts may be a few bytes shorter than what was asked for.
    """
    table: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        key = row["ranks"], row["backend"]
        mine = table.setdefault(key, {"ranks": key[0], "backend": key[1]})
        asked = min(sizes, key=lambda size: abs(size - row["size(B)"]))
        mine[size_text(asked)] = duration_text(row["time(us)"])
    return list(table.values())


def prediction(results: Mapping[str, Any], ranks: int) -> str:
    """What a message costs, of which the predictions on so many ``ranks`` are made."""
    message = AlphaBeta(**results["message"][str(ranks)])
    speed = f"{1e-9 / message.s_per_byte:.3g} GB/s" if message.s_per_byte else "any number of bytes"
    return (
        "predicted: rounds x alpha + bytes x beta; a message between two ranks took alpha "
        f"{1e6 * message.latency_s:.0f} us and 1 / beta {speed}."
    )


def beside_gloo(rows: Sequence[Row]) -> list[Row]:
    """How many times as fast as gloo each backend is, with quartiles: a column per size, and the mean."""
    found: list[Row] = []
    for name in dict.fromkeys(row["backend"] for row in rows):
        mine = [row for row in rows if row["backend"] == name and "x gloo" in row]
        if not mine or name == BASELINE:
            continue
        columns: dict[str, Any] = {"backend": name}
        for row in mine:
            columns[size_text(row["size(B)"])] = tables.with_quartiles(row, "x gloo")
        averaged = [row["x gloo"] for row in mine if row["size(B)"] in SUMMARY_SIZES]
        if len(averaged) == len(SUMMARY_SIZES):
            columns["mean of 1, 10, 100 MB"] = round(tables.geometric_mean(averaged), 2)
        found.append(columns)
    return found


def draw(results: Mapping[str, Any], path: str | Path) -> list[Path]:
    """Time and bus bandwidth over size, a column of panels per number of ranks."""
    title = f"{results['collective']}: time and bus bandwidth against message size"
    return against_size(results["rows"], path, title=title, subtitle=subtitle(results["rows"]))


def against_size(
    rows: Sequence[Row], path: str | Path, *, title: str, subtitle: str, hosts: str = "ranks"
) -> list[Path]:
    """Lines of time and of bus bandwidth, a column of panels per number of ``hosts``."""
    return charts.lines(
        rows,
        path,
        measures=[
            Measure("time(us)", "time", duration_text, "min(us)", "p99(us)"),
            Measure("busbw(GB/s)", "bus bandwidth, GB/s", lambda value: f"{value:g}"),
        ],
        series="backend",
        x="size(B)",
        x_label="message size",
        x_text=size_text,
        panel="ranks",
        panels={row["ranks"]: f"{row['ranks']} {hosts}" for row in rows},
        title=title,
        subtitle=subtitle,
    )


def subtitle(rows: Sequence[Row]) -> str:
    """How the ``rows`` of a chart were measured."""
    found = tables.environment()
    banded = len({row["backend"] for row in rows}) <= charts.MOST_BANDS
    return (
        f"float32, one thread per rank, {found['cores']} cores ({found['cpu']}); median of "
        f"{_samples(rows)} samples" + (", band from the least to the 99th percentile" if banded else "")
    )
