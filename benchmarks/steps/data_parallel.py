"""One step by threads and by processes: measures, and writes table, chart and results anew.

python benchmarks/data_parallel/run.py                        two to three minutes; writes into this folder
python benchmarks/data_parallel/run.py --samples 3 --out DIR  a trial, which leaves this folder alone
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from instep.bench import tables
from instep.bench.data_parallel import draw, measure, notes, title_of
from instep.bench.options import DataParallelOptions

HERE = Path(__file__).parent
COMMAND = "python benchmarks/data_parallel/run.py"


def main() -> int:
    wanted = arguments()
    results = measure(DataParallelOptions(ranks=wanted.ranks, samples=wanted.samples))
    rows = tables.short(results["rows"])
    tables.show(rows, title_of(results), notes=notes(results))
    folder: Path = wanted.out
    tables.prepare(folder, HERE)
    tables.write_json(folder / "results.json", results, command=COMMAND)
    tables.write_csv(folder / "results.csv", results["rows"])
    draw(results, folder / "chart.svg")
    made = tables.environment(COMMAND)
    lines = "\n".join(f"- {note}" for note in notes(results))
    text = (
        f"{tables.markdown(rows)}\n\n{lines}\n\nMade by `{COMMAND}` on {made['cores']} cores "
        f"({made['cpu']}), torch {made['torch']}, Python {made['python']}, {made['date']}."
    )
    tables.write_between(folder / "README.md", "workers table", text)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--out", type=Path, default=HERE)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
