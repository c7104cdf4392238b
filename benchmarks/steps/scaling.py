"""Throughput against the number of ranks, of fixed work and of work per rank, beside the ideal.

python benchmarks/scaling/run.py                                some four minutes; writes into this folder
python benchmarks/scaling/run.py --params 1M --samples 2 --out DIR    a trial, which leaves this folder alone
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instep.bench import tables
from instep.bench.options import ScalingOptions
from instep.bench.scaling import HIDDEN, draw, measure, notes, title_of

HERE = Path(__file__).parent
COMMAND = "python benchmarks/scaling/run.py"


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--params", default="")
    parser.add_argument("--out", type=Path, default=HERE)
    return parser.parse_args()


def write(results: Mapping[str, Any], folder: Path, minutes: float) -> None:
    """Results, table and chart into ``folder``, and a README with them."""
    tables.prepare(folder, HERE)
    tables.write_json(folder / "results.json", results, command=COMMAND)
    tables.write_csv(folder / "results.csv", results["rows"])
    draw(results, folder / "chart.svg")
    said = "\n".join(f"- {note}" for note in notes(results))
    table = tables.markdown(tables.short(results["rows"], HIDDEN))
    tables.write_between(folder / "README.md", "scaling table", f"{title_of(results)}.\n\n{table}\n\n{said}")
    where = tables.made_where(tables.environment(COMMAND), minutes)
    tables.write_between(folder / "README.md", "environment", f"{where}.")


if __name__ == "__main__":
    sys.exit(main())
