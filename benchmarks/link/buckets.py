"""Step time against bucket size in three places, beside what arithmetic predicts.

python benchmarks/buckets/run.py                         sockets, shared memory and a link: some ten minutes
python benchmarks/buckets/run.py --place link            one of them, gloo, shm or link: some four minutes
python benchmarks/buckets/run.py --params 5M --samples 4 --out DIR    a trial, which leaves this folder alone

Writes results (JSON, CSV), chart (SVG, PNG) and table (in README.md) of each place anew. The link needs
Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instep.bench import tables
from instep.bench.buckets import draw, measure, notes, title_of
from instep.bench.options import BucketsOptions

HERE = Path(__file__).parent
COMMAND = "python benchmarks/buckets/run.py"
SIZES = (1.0, 2.0, 5.0, 10.0, 25.0, 100.0, 1000.0)
PLACES: dict[str, dict[str, Any]] = {
    "gloo": {"backend": "gloo"},
    "shm": {"backend": "shm"},
    "link": {"link": True},
}


def main() -> int:
    wanted = arguments()
    for place in wanted.place or PLACES:
        began = time.monotonic()
        params = wanted.params or ("20M" if place == "link" else "70M")
        options = BucketsOptions(
            sizes=SIZES, params=params, samples=wanted.samples, rounds=3, **PLACES[place]
        )
        results = measure(options)
        write(place, results, wanted.out, (time.monotonic() - began) / 60)
        tables.show(results["rows"], title_of(results), notes=notes(results))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--place", action="append", choices=list(PLACES))
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--params", default="")
    parser.add_argument("--out", type=Path, default=HERE)
    return parser.parse_args()


def write(place: str, results: Mapping[str, Any], folder: Path, minutes: float) -> None:
    """Results and chart into ``folder``, and the table into its README."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "README.md").exists():
        shutil.copy(HERE / "README.md", folder)
    command = f"{COMMAND} --place {place}"
    tables.write_json(
        folder / f"results-{place}.json", {"minutes": round(minutes, 1), **results}, command=command
    )
    tables.write_csv(folder / f"results-{place}.csv", results["rows"])
    draw(results, folder / f"chart-{place}.svg")
    made = tables.environment(command)
    said = "\n".join(f"- {note}" for note in notes(results))
    tables.write_between(
        folder / "README.md",
        f"{place} table",
        f"**{title_of(results)}**\n\n{tables.markdown(results['rows'])}\n\n{said}\n\nMade by `{command}` on "
        f"{tables.machine()}, torch {made['torch']}, {made['date']}, in {minutes:.1f} minutes.",
    )


if __name__ == "__main__":
    sys.exit(main())
