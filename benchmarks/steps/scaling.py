"""Throughput against the number of ranks, of fixed work and of work per rank, beside the ideal.

python benchmarks/steps/scaling.py                                some four minutes; writes into this folder
python benchmarks/steps/scaling.py --params 1M --samples 2 --out DIR   a trial, which leaves this folder alone
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench import tables
from instep.bench.options import ScalingOptions
from instep.bench.scaling import HIDDEN, draw, measure, notes, title_of

HERE = Path(__file__).parent
COMMAND = "python benchmarks/steps/scaling.py"


def main() -> int:
    wanted = arguments()
    began = time.monotonic()
    results = measure(
        ScalingOptions(
            ranks=tuple(wanted.ranks),
            params=wanted.params,
            samples=wanted.samples,
            strategies=("bucketed", "DDP"),
        )
    )
    rows = tables.short(results["rows"], HIDDEN)
    tables.show(rows, title_of(results), notes=notes(results))
    write(results, wanted.out, (time.monotonic() - began) / 60)
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("-n", "--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--params", default="")
    return parser.parse_args()


def pages(results: Results) -> Pages:
    said = "\n".join(f"- {note}" for note in notes(results))
    table = tables.markdown(tables.short(results["rows"], HIDDEN))
    return {README: {"scaling table": f"{title_of(results)}.\n\n{table}\n\n{said}\n\n{made(results)}"}}


def write(results: Results, folder: Path, minutes: float) -> None:
    """Results, table and chart into ``folder``."""
    prepare(folder, HERE)
    tables.write_csv(folder / "scaling.csv", results["rows"])
    draw(results, folder / "scaling.svg")
    save(folder / "scaling.json", {"minutes": minutes, **results}, pages, HERE, COMMAND)


if __name__ == "__main__":
    sys.exit(main())
