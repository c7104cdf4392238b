"""Every strategy on one host in two settings: measures the steps, and writes tables, charts and results anew.

python benchmarks/steps/run.py                              some twenty minutes; writes into this folder
python benchmarks/steps/run.py --params 2M --samples 3 --out DIR     a trial, which leaves this folder alone
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from instep.bench.options import StepsOptions, parse_count
from instep.bench.steps import HostResults, chart, measure, report, table
from instep.bench.tables import (
    environment,
    made_where,
    markdown,
    prepare,
    short,
    write_between,
    write_csv,
    write_json,
)
from instep.bench.workloads import Workload, workload

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--params", default="")
    parser.add_argument("--out", type=Path, default=HERE)
    return parser.parse_args()


def headline(settings: Sequence[Mapping[str, Any]]) -> str:
    """What docs/shm.md has of it: torch's DDP, the default strategy, and no exchange at all."""
    rows = []
    for one in settings:
        for row in one["rows"]:
            if (row["strategy"], row["over"]) in HEADLINE:
                (shown,) = short([row])
                figures = {name: shown[name] for name in ("step(ms)", "x DDP", "gap closed(%)")}
                who = {
                    "model": Workload(**one["setting"]).text,
                    "strategy": row["strategy"],
                    "over": row["over"],
                }
                rows.append({**who, **figures})
    made = environment(COMMAND)
    return (
        f"{markdown(rows)}\n\n`none` exchanges nothing. Made by `{COMMAND}` on {made['cores']} cores "
        f"({made['cpu']}), torch {made['torch']}."
    )


def write(found: list[HostResults], folder: Path, ranks: int, minutes: float) -> None:
    """Results, table and charts into ``folder``, and a README with them."""
    prepare(folder, HERE)
    write_json(
        folder / "results.json",
        {"ranks": ranks, "settings": [one.as_json() for one in found]},
        command=COMMAND,
    )
    write_csv(folder / "results.csv", [row for one in found for row in one.rows])
    for one in found:
        chart(one, folder / f"{one.workload.name}.svg", ranks)
        text = f"{one.workload.text}; {ranks} ranks.\n\n{report(one.as_json())}"
        write_between(folder / "README.md", f"{one.workload.name} table", text)
    if folder.resolve() == HERE:
        text = headline([one.as_json() for one in found])
        write_between(ROOT / "docs" / "shm.md", "steps table", text)
    made = environment(COMMAND)
    write_between(
        folder / "README.md",
        "environment",
        f"{made_where(made, minutes)}.",
    )


if __name__ == "__main__":
    sys.exit(main())
