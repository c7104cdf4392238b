"""Steps of a millisecond: the overhead of an exchange. Measures, and writes table and chart anew.

python benchmarks/steps/small_steps.py                           some five minutes; writes into this folder
python benchmarks/steps/small_steps.py --samples 5 --out DIR     a trial, which leaves this folder alone
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench.charts import bars
from instep.bench.options import StepsOptions
from instep.bench.steps import PANELS, HostResults, declared_rows, measure
from instep.bench.tables import Row, markdown, with_quartiles, write_csv
from instep.bench.workloads import MLPS, Workload

HERE = Path(__file__).parent
COMMAND = "python benchmarks/steps/small_steps.py"
# By the model, the rounds: a step of the last takes fifty times as long as one of the first.
ROUNDS = {"mlp-0.02M": 200, "mlp-0.53M": 200, "mlp-8.4M": 60}
STRATEGIES = ("DDP", "flat", "bucketed", "unordered", "declared")
ALONE = "alone"
DECLARED = " declared"


def main() -> int:
    wanted = arguments()
    began = time.monotonic()
    found = [measure_one(preset, wanted.ranks, wanted.samples or rounds) for preset, rounds in ROUNDS.items()]
    rows = [row for one in found for row in one.rows if row["strategy"] != ALONE]
    print(markdown(table(rows)), markdown(declared([one.as_json() for one in found])), sep="\n\n")
    write(found, rows, wanted.out, (time.monotonic() - began) / 60, wanted.ranks)
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=0, help="rounds of each model; 60 or 200 by default")
    return parser.parse_args()


def measure_one(preset: str, ranks: int, rounds: int) -> HostResults:
    """All contestants on one model, in one pair of processes."""
    options = StepsOptions(preset=preset, ranks=ranks, samples=rounds, strategies=STRATEGIES, memory=False)
    return measure(options.workload(preset), options)


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for people: medians, and quartiles beside them."""
    return [
        {
            "parameters": f"{MLPS[row['setting']].num_parameters / 1e6:.2g} M",
            "strategy": row["strategy"],
            "over": row["over"],
            "step(ms)": row["step(ms)"],
            "q25(ms)": row["q25(ms)"],
            "q75(ms)": row["q75(ms)"],
            "x none": with_quartiles(row, "x none"),
            "more than none(ms)": with_quartiles(row, "exposed", "(ms)"),
            "x DDP over gloo": with_quartiles(row, "x DDP"),
        }
        for row in rows
    ]


def declared(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per strategy and backend: how many times as long as one that is not a declared step takes."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in settings:
        for row in declared_rows(one["ms"]):
            mine = rows.setdefault(
                (row["strategy"], row["over"]), {"strategy": row["strategy"], "over": row["over"]}
            )
            mine[Workload(**one["setting"]).model_text] = with_quartiles(row, "x undeclared", digits=3)
    return list(rows.values())


def pages(results: Results) -> Pages:
    rows = [row for one in results["settings"] for row in one["rows"] if row["strategy"] != ALONE]
    return {
        README: {
            "small steps table": f"{markdown(table(rows))}\n\n{made(results)}",
            "declared table": markdown(declared(results["settings"])),
        }
    }


def write(
    found: Sequence[HostResults], rows: Sequence[Row], folder: Path, minutes: float, ranks: int
) -> None:
    """Results, tables and chart into ``folder``."""
    prepare(folder, HERE)
    write_csv(folder / "small_steps.csv", rows)
    texts = {one.workload.name: one.workload.text for one in found}
    shown = [
        {**row, "panel": f"{texts[row['setting']]}; {PANELS[row['over']]}"}
        for row in rows
        if row["over"] and not row["strategy"].endswith(DECLARED)
    ]
    bars(
        shown,
        folder / "small_steps.svg",
        title=f"A short training step on {ranks} ranks of one host",
        subtitle="over that of no synchronisation in the same round; median and quartiles of the ratios",
        label="strategy", value="x none", low="x none q25", high="x none q75", unit="x", group="panel",
        reference=1.0, reference_text="no synchronisation",
    )  # fmt: skip
    results = {"minutes": minutes, "ranks": ranks, "settings": [one.as_json() for one in found]}
    save(folder / "small_steps.json", results, pages, HERE, COMMAND)


if __name__ == "__main__":
    sys.exit(main())
