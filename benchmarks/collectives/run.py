"""All-reduce against message size, number of ranks and way to do it, with table and chart.

python benchmarks/collectives/run.py            writes results.json, results.csv, chart.svg, chart.png and the
                                                tables in README.md beside it; about twenty minutes
python benchmarks/collectives/run.py --quick    the same of small messages, in a minute, to see that it works
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.bench import charts, tables
from instep.bench.collectives import (
    CHART_BACKENDS,
    PAIRS,
    SUMMARY_SIZES,
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

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMAND = "python benchmarks/collectives/run.py"
# The largest messages on two ranks alone: elsewhere they take long and show nothing new.
WAYS = {"shm": "of ordinary tensors", "shm-in-place": "in place, in shared buckets"}
FULL = [
    CollectivesOptions(ranks=(2,), full=True, samples=20, budget_s=30),
    CollectivesOptions(ranks=(4,), samples=20, budget_s=60),
    CollectivesOptions(ranks=(3, 6), samples=20, budget_s=15),
]
IN_CHART = (2, 4)
QUICK = {"ranks": (2,), "sizes": ("1KB,64KB,1MB",), "samples": 5}


def block(results: Mapping[str, Any], sizes: Sequence[int]) -> str:
    """The tables and what they were made on."""
    found = results["environment"]
    parts = [tables.markdown(by_size(results["rows"], sizes))]
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
    parts.append(
        f"Median of up to {results['samples']} samples; {wrong} wrong elements. Made by `{found['command']}` "
        f"on {found['cores']} cores ({found['cpu']}), torch {found['torch']}, {found['date']}, in "
        f"{results['minutes']:g} minutes."
    )
    parts += [f"Skipped: {reason}." for reason in results["skipped"]]
    return "\n\n".join(parts)


def headline(results: Mapping[str, Any]) -> str:
    """What docs/shm.md has of it: shared memory against gloo, and against the memory's speed."""
    rows: list[Row] = []
    for ranks in (2, 4):
        here = [r for r in results["rows"] if r["ranks"] == ranks and r["size(B)"] in SUMMARY_SIZES]
        mine = [r for r in here if r["backend"] in WAYS]
        rows += [
            {"ranks": ranks, "all-reduce": WAYS[row["backend"]], **{k: row[k] for k in row if k != "backend"}}
            for row in beside_gloo(mine)
        ]
    found = results["environment"]
    limits = [r for r in results["rows"] if r["backend"] == "shm-in-place" and r["size(B)"] == 100_000_000]
    speed = " and ".join(f"{1 / r['time/bound']:.0%} on {r['ranks']}" for r in limits if r["ranks"] in (2, 4))
    return (
        f"{tables.markdown(rows)}\n\nTimes as fast as gloo: medians (and quartiles) of {results['samples']} "
        "interleaved pairs, float32, one thread per rank. 100 MB in place reach so much of what the memory's "
        f"speed, measured by copying, allows: {speed} ranks (a copy also loads what it overwrites: it may be "
        f"more than all of it). Made by `{COMMAND}` on {found['cores']} cores "
        f"({found['cpu']}), torch {found['torch']}."
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    began = time.monotonic()
    options = [CollectivesOptions(**QUICK)] if quick else FULL  # type: ignore[arg-type]
    command = COMMAND + (" --quick" if quick else "")
    results = {"environment": tables.environment(command), **merged([measure(one) for one in options])}
    results["minutes"] = round((time.monotonic() - began) / 60, 1)
    tables.write_json(HERE / "results.json", results, command=command)
    tables.write_csv(HERE / "results.csv", results["rows"])
    drawn = [r for r in results["rows"] if r["ranks"] in IN_CHART and r["backend"] in CHART_BACKENDS]
    charts.against_size(drawn, HERE / "chart.svg", title="All-reduce on one host", subtitle=subtitle(drawn))
    text = block(results, sizes_of(options[0]))
    tables.write_between(HERE / "README.md", "collectives", text)
    if not quick:
        tables.write_between(ROOT / "docs" / "shm.md", "shared memory table", headline(results))
    print(text)
    return 1 if any(row["#wrong"] for row in results["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
