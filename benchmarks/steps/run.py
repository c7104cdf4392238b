"""Every strategy on one host in two settings: measures the steps, and writes tables, charts and results anew.

python benchmarks/steps/run.py                              some twenty minutes; writes into this folder
python benchmarks/steps/run.py --params 2M --samples 3 --out DIR     a trial, which leaves this folder alone
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench.options import StepsOptions, parse_count
from instep.bench.steps import HostResults, chart, measure, report, table
from instep.bench.tables import markdown, short, write_csv
from instep.bench.workloads import Workload, workload

HERE = Path(__file__).parent
HEADLINE = (
    ("none", ""),
    *((strategy, over) for strategy in ("DDP", "flat", "bucketed") for over in ("gloo", "shm")),
)
COMMAND = "python benchmarks/steps/run.py"
# Where a step is mostly computation, the older forms differ little: time is better spent on more samples. And
# what a rank holds, but for activations, is what it holds where there is less to compute.
SETTINGS: dict[str, dict[str, Any]] = {
    "communication": {"memory": True},
    "compute": {"strategies": ("bucketed", "unordered-shm"), "memory": False},
}


def main() -> int:
    wanted = arguments()
    began = time.monotonic()
    options = StepsOptions(ranks=wanted.ranks, samples=wanted.samples, params=wanted.params)
    params = parse_count(wanted.params) if wanted.params else None
    found = [measure(workload(name, params), replace(options, **chosen)) for name, chosen in SETTINGS.items()]
    for one in found:
        table(one)
    write(found, wanted.out, wanted.ranks, (time.monotonic() - began) / 60)
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--params", default="")
    return parser.parse_args()


def pages(results: Results) -> Pages:
    """A table for each setting, and a short one in docs/shm.md."""
    found = {}
    for one in results["settings"]:
        chosen = Workload(**one["setting"])
        text = f"{chosen.text}; {results['ranks']} ranks.\n\n{report(one)}\n\n{made(results)}"
        found[f"{chosen.name} table"] = text
    return {README: found, "docs/shm.md": {"steps table": headline(results)}}


def headline(results: Results) -> str:
    """torch's DDP, the default strategy, and no exchange at all."""
    rows = []
    for one in results["settings"]:
        for row in one["rows"]:
            if (row["strategy"], row["over"]) in HEADLINE:
                (shown,) = short([row])
                who = {"model": Workload(**one["setting"]).text} | {x: row[x] for x in ("strategy", "over")}
                rows.append(who | {x: shown[x] for x in ("step(ms)", "x DDP", "gap closed(%)")})
    return f"{markdown(rows)}\n\n`none` exchanges nothing. {made(results)}"


def write(found: list[HostResults], folder: Path, ranks: int, minutes: float) -> None:
    """Results, tables and charts into ``folder``."""
    prepare(folder, HERE)
    write_csv(folder / "results.csv", [row for one in found for row in one.rows])
    for one in found:
        chart(one, folder / f"{one.workload.name}.svg", ranks)
    results = {"minutes": minutes, "ranks": ranks, "settings": [one.as_json() for one in found]}
    save(folder / "results.json", results, pages, HERE, COMMAND)


if __name__ == "__main__":
    sys.exit(main())
