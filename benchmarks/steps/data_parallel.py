"""One step by threads and by processes: measures, and writes table, chart and results anew.

python benchmarks/steps/data_parallel.py                        two to three minutes; writes into this folder
python benchmarks/steps/data_parallel.py --samples 3 --out DIR  a trial, which leaves this folder alone
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench import tables
from instep.bench.data_parallel import draw, measure, notes, title_of
from instep.bench.options import DataParallelOptions

HERE = Path(__file__).parent
COMMAND = "python benchmarks/steps/data_parallel.py"


def main() -> int:
    wanted = arguments()
    began = time.monotonic()
    results = measure(DataParallelOptions(ranks=wanted.ranks, samples=wanted.samples))
    rows = tables.short(results["rows"])
    tables.show(rows, title_of(results), notes=notes(results))
    folder: Path = wanted.out
    prepare(folder, HERE)
    tables.write_csv(folder / "data_parallel.csv", results["rows"])
    draw(results, folder / "data_parallel.svg")
    minutes = (time.monotonic() - began) / 60
    save(folder / "data_parallel.json", {"minutes": minutes, **results}, pages, HERE, COMMAND)
    return 0


def pages(results: Results) -> Pages:
    lines = "\n".join(f"- {note}" for note in notes(results))
    table = tables.markdown(tables.short(results["rows"]))
    return {README: {"workers table": f"{table}\n\n{lines}\n\n{made(results)}"}}


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=40)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
