"""What computing blocks again and bf16 save in memory, and cost in time and loss.

python benchmarks/steps/memory_savers.py            some four minutes; writes into this folder
python benchmarks/steps/memory_savers.py --params 200K --samples 2 --steps 4 --seeds 1 --out DIR      a trial
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench.memory_savers import draw, measure, notes, tables
from instep.bench.options import MemorySaversOptions
from instep.bench.tables import markdown, short, write_csv

HERE = Path(__file__).parent
COMMAND = "python benchmarks/steps/memory_savers.py"


def main() -> int:
    wanted = arguments()
    began = time.monotonic()
    options = MemorySaversOptions(
        ranks=wanted.ranks,
        params=wanted.params,
        samples=wanted.samples,
        steps=wanted.steps,
        seeds=wanted.seeds,
    )
    results = measure(options)
    tables(results)
    write(results, wanted.out, (time.monotonic() - began) / 60)
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    as_it_is = MemorySaversOptions()
    parser.add_argument("-n", "--ranks", type=int, default=as_it_is.ranks)
    parser.add_argument("--params", default=as_it_is.params)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    return parser.parse_args()


def pages(results: Results) -> Pages:
    said = "\n".join(f"- {note}" for note in notes(results))
    return {
        README: {
            "memory table": f"{markdown(short(results['rows']))}\n\n{said}\n\n{made(results)}",
            "loss table": markdown(results["runs"].get("rows", [])),
        }
    }


def write(results: Results, folder: Path, minutes: float) -> None:
    """Results, chart and tables into ``folder``."""
    prepare(folder, HERE)
    write_csv(folder / "memory_savers.csv", results["rows"])
    draw(results, folder / "memory_savers.svg")
    save(folder / "memory_savers.json", {"minutes": minutes, **results}, pages, HERE, COMMAND)


if __name__ == "__main__":
    sys.exit(main())
