"""All-reduce against message size, number of ranks and way to do it, with table and chart.

python benchmarks/collectives/run.py            writes results.json, results.csv, chart.svg, chart.png and the
                                                tables in README.md beside it; some ten minutes
python benchmarks/collectives/run.py --quick --out DIR  the same of small messages, in a minute: a trial
python benchmarks/collectives/run.py --samples 3 --out DIR      a trial, which leaves this folder alone
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench import tables
from instep.bench.collectives import (
    CHART_BACKENDS,
    PAIRS,
    SUMMARY_SIZES,
    against_size,
    beside_gloo,
    beside_the_bound,
    by_backend,
    by_size,
    measure,
    prediction,
    subtitle,
)
from instep.bench.options import CollectivesOptions, sizes_of
from instep.bench.tables import Row
from instep.comm.algorithms import SCHEDULES

HERE = Path(__file__).parent
COMMAND = "python benchmarks/collectives/run.py"
WAYS = {"shm": "of ordinary tensors", "shm-in-place": "in place, in shared buckets"}
# The largest messages by few ways on few ranks: by others they take long and show nothing new.
ALGORITHMS = tuple(SCHEDULES["all_reduce"])
TORCH_WAYS = ("gloo", *WAYS)
SIZES = ("1KB", "10KB", "100KB", "1MB", "10MB", "100MB")
LARGEST = ("1GB",)
FULL = [
    CollectivesOptions(ranks=(2,), sizes=SIZES, backends=(*TORCH_WAYS, *ALGORITHMS), samples=20, budget_s=30),
    CollectivesOptions(ranks=(2,), sizes=LARGEST, backends=TORCH_WAYS, samples=20, budget_s=120),
    CollectivesOptions(ranks=(4,), sizes=SIZES, backends=(*TORCH_WAYS, *ALGORITHMS), samples=20, budget_s=60),
    CollectivesOptions(ranks=(4,), sizes=LARGEST, backends=TORCH_WAYS, samples=20, budget_s=120),
    CollectivesOptions(ranks=(3, 6), sizes=SIZES, samples=20, budget_s=15),
]
IN_CHART = (2, 4)
QUICK = [CollectivesOptions(ranks=(2,), sizes=("1KB,64KB,1MB",), samples=5)]


def pages(results: Results) -> Pages:
    """The tables; that of docs/shm.md has what it needs of a whole measurement alone."""
    parts = [tables.markdown(by_size(results["rows"], results["sizes"]))]
    in_chart = sorted({row["ranks"] for row in results["rows"]} & set(IN_CHART))
    for ranks in in_chart:
        faster = beside_gloo([row for row in results["rows"] if row["ranks"] == ranks])
        parts += [f"{ranks} ranks, times as fast as gloo. {PAIRS}", tables.markdown(faster)]
    for ranks in in_chart:
        longer = by_backend([row for row in results["rows"] if row["ranks"] == ranks], "time/predicted")
        what = f"{ranks} ranks, times as long as predicted; {prediction(results, ranks)}"
        parts += [what, tables.markdown(longer)]
    for ranks, memory in results["memory_bytes_per_s"].items():
        ratios, note = beside_the_bound([r for r in results["rows"] if r["ranks"] == int(ranks)], memory)
        if ratios:
            parts += [f"{ranks} ranks, times as long as the memory allows:", tables.markdown(ratios), note]
    wrong = sum(row["#wrong"] for row in results["rows"])
    what = f"Median of up to {results['samples']} samples; {wrong} wrong elements."
    parts += [f"{what} {made(results)}", *(f"Skipped: {reason}." for reason in results["skipped"])]
    return {
        README: {"collectives": "\n\n".join(parts)},
        "docs/shm.md": {"shared memory table": headline(results)},
    }


def headline(results: Mapping[str, Any]) -> str:
    """The table of docs/shm.md: shared memory against gloo."""
    rows: list[Row] = []
    for ranks in (2, 4):
        here = [r for r in results["rows"] if r["ranks"] == ranks and r["size(B)"] in SUMMARY_SIZES]
        mine = [r for r in here if r["backend"] in WAYS]
        rows += [
            {"ranks": ranks, "all-reduce": WAYS[row["backend"]], **{k: row[k] for k in row if k != "backend"}}
            for row in beside_gloo(mine)
        ]
    return (
        f"{tables.markdown(rows)}\n\nTimes as fast as gloo: medians (and quartiles) of {results['samples']} "
        f"interleaved pairs, float32, one thread per rank. {made(results)}"
    )


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several measurements as one."""
    first = dict(parts[0])
    for other in parts[1:]:
        first["rows"] = first["rows"] + other["rows"]
        first["skipped"] = list(dict.fromkeys(first["skipped"] + other["skipped"]))
        first["memory_bytes_per_s"] = first["memory_bytes_per_s"] | other["memory_bytes_per_s"]
        first["message"] = first["message"] | other["message"]
    return first


def main() -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--samples", type=int, default=0, help="of each, in the place of 20")
    wanted = parser.parse_args()
    if wanted.quick and wanted.out == HERE:
        parser.error("--quick is a trial: expected a folder for its results, by --out")
    began = time.monotonic()
    options = QUICK if wanted.quick else FULL
    if wanted.samples:
        options = [replace(one, samples=wanted.samples) for one in options]
    command = COMMAND + (" --quick" if wanted.quick else "")
    results = merged([measure(one) for one in options])
    results |= {
        "minutes": (time.monotonic() - began) / 60,
        "sizes": sorted({size for one in options for size in sizes_of(one)}),
    }
    prepare(wanted.out, HERE)
    tables.write_csv(wanted.out / "results.csv", results["rows"])
    drawn = [r for r in results["rows"] if r["ranks"] in IN_CHART and r["backend"] in CHART_BACKENDS]
    against_size(drawn, wanted.out / "chart.svg", title="All-reduce on one host", subtitle=subtitle(drawn))
    whole = save(wanted.out / "results.json", results, pages, HERE, command)
    print(pages(whole)[README]["collectives"])
    return 1 if any(row["#wrong"] for row in results["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
