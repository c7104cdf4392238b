"""Pipelines on this machine's cores, beside the simulator that is fed with their times.

python benchmarks/pipeline/measured.py            some five minutes; writes measured.json, two charts and the
                                                  tables of README.md
python benchmarks/pipeline/measured.py --width 64 --samples 1 --out DIR      a trial, elsewhere

Exit code 1 if the measured bubble of gpipe or 1f1b is further than WITHIN from that of its replay, which has
the time of each single action, or if ranks keep other activations than their schedule says.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench.options import PipelineOptions
from instep.bench.pipeline import PipelineResults, draw, measure, short_row
from instep.bench.tables import Row, markdown, with_quartiles

HERE = Path(__file__).parent
COMMAND = "python benchmarks/pipeline/measured.py"
WITHIN = 0.10
AT = 8  # micro-batches: where bubbles are judged
PROVED = ("gpipe", "1f1b")
DEEP = 4  # ranks, of which activations are counted: a schedule's depth shows, whatever the cores
KEPT = ("schedule", "kept", "kept by schedule", "kept(MB)")
KEPT_WITHIN = 0.05  # a share; those whose gradients of weights wait may keep less: the loss needs none


def main() -> int:
    wanted = arguments()
    began = time.monotonic()
    options = PipelineOptions(
        micro_batches=("1,2,4,8,16",), samples=wanted.samples, width=wanted.width, backend=wanted.backend
    )
    results = measure(options)
    deep = measure(replace(options, ranks=DEEP, micro_batches=(str(AT),), samples=1))
    kept = [{name: row[name] for name in KEPT} for row in deep.rows]
    whole = write(kept, results, wanted.out, (time.monotonic() - began) / 60)
    print(*pages(whole)[README].values(), sep="\n\n")
    beyond = too_far(results.rows, deep)
    print("\n".join(beyond) if beyond else "all within what was set")
    return 1 if beyond else 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    as_it_is = PipelineOptions()
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--width", type=int, default=as_it_is.width)
    parser.add_argument("--backend", choices=("gloo", "shm"), default=as_it_is.backend)
    return parser.parse_args()


def pages(results: Results) -> Pages:
    tables = {
        "few and many": few_and_many(results["rows"]),
        "measured": [short_row(row) for row in results["rows"]],
        "kept": results["kept"],
    }
    said = "\n".join(f"- {note}" for note in results["notes"])
    where = f"{made(results)} {results['text']}; {DEEP} ranks: only activations kept."
    texts = {name: markdown(rows) for name, rows in tables.items()}
    return {README: {**texts, "notes on the measured": f"{said}\n\n{where}"}}


def write(kept: list[Row], found: PipelineResults, folder: Path, minutes: float) -> Results:
    """Results, charts and tables into ``folder``."""
    prepare(folder, HERE)
    results = {"minutes": minutes, **found.as_json(), "notes": found.notes, "kept": kept}
    draw(found, folder / "measured.svg")
    return save(folder / "measured.json", results, pages, HERE, COMMAND)


def few_and_many(rows: Sequence[Row]) -> list[Row]:
    """What micro-batches do to bubble and step of gpipe and 1f1b, from one micro-batch on."""
    return [
        {
            "schedule": row["schedule"],
            "micro-batches": row["micro-batches"],
            "(p-1) / (m+p-1)": f"{row['by formula']:.1%}",
            "simulated bubble": f"{row['simulated bubble']:.1%}",
            "bubble": f"{row['bubble']:.1%} ({row['bubble q25']:.1%} to {row['bubble q75']:.1%})",
            "measured / simulated": with_quartiles(row, "x simulated"),
            "measured / replayed": with_quartiles(row, "x replayed"),
            "step(ms)": f"{row['step(ms)']:.0f} ({row['q25(ms)']:.0f} to {row['q75(ms)']:.0f})",
            "simulated(ms)": f"{row['simulated(ms)']:.0f}",
        }
        for row in rows
        if row["schedule"] in PROVED
    ]


def too_far(rows: Sequence[Row], deep: PipelineResults) -> list[str]:
    """What is not as the simulator or the schedule says."""
    found = [
        f"{row['schedule']}, {AT} micro-batches: a bubble of {row['bubble']:.4f}, simulated "
        f"{row['simulated bubble']:.4f}, {row['x replayed']:.3f} of what its actions' own times give"
        for row in rows
        if row["schedule"] in PROVED and row["micro-batches"] == AT and abs(row["x replayed"] - 1) > WITHIN
    ]
    for one in deep.steps:
        for rank, (kept, said) in enumerate(one.activations):
            less = KEPT_WITHIN * said if one.schedule.name in PROVED else said
            if not said - less <= kept <= said + KEPT_WITHIN * said:
                found.append(f"{one.name}: rank {rank} keeps {kept:.2f} micro-batches, expected {said:g}")
    return found


if __name__ == "__main__":
    sys.exit(main())
