"""Step time against bucket size in four places, beside what arithmetic predicts.

python benchmarks/link/buckets.py                         sockets, shared memory, two links: some ten minutes
python benchmarks/link/buckets.py --place link            one of them: gloo, shm, link or link-10gbit
python benchmarks/link/buckets.py --params 5M --samples 4 --out DIR    a trial, which leaves this folder alone

Writes results (JSON, CSV), chart (SVG, PNG) and table (in README.md) of each place anew. The link needs
Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench import tables
from instep.bench.buckets import draw, measure, notes, title_of
from instep.bench.hosts import RATE
from instep.bench.options import BucketsOptions

HERE = Path(__file__).parent
COMMAND = "python benchmarks/link/buckets.py"
SIZES = (1.0, 2.0, 5.0, 10.0, 25.0, 100.0, 1000.0)
FAST = "10gbit"
PLACES: dict[str, dict[str, Any]] = {
    "gloo": {"backend": "gloo"},
    "shm": {"backend": "shm"},
    "link": {"link": True},
    f"link-{FAST}": {"link": True, "rate": FAST},
}


def main() -> int:
    wanted = arguments()
    for place in wanted.place or PLACES:
        began = time.monotonic()
        params = wanted.params or ("20M" if "link" in PLACES[place] else "70M")
        options = BucketsOptions(
            sizes=SIZES, params=params, samples=wanted.samples, rounds=3, **PLACES[place]
        )
        results = measure(options)
        write(place, results, wanted.out, (time.monotonic() - began) / 60)
        tables.show(results["rows"], title_of(results), notes=notes(results))
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--place", action="append", choices=list(PLACES))
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--params", default="")
    return parser.parse_args()


def write(place: str, results: Results, folder: Path, minutes: float) -> None:
    """Results, chart and table into ``folder``, which keeps the tables of other places."""
    if not (folder / README).exists():
        prepare(folder, HERE)
    tables.write_csv(folder / f"buckets-{place}.csv", results["rows"])
    draw(results, folder / f"buckets-{place}.svg")
    command = f"{COMMAND} --place {place}"
    save(folder / f"buckets-{place}.json", {"minutes": minutes, **results}, pages, HERE, command)


def pages(results: Results) -> Pages:
    links = {RATE: "link", FAST: f"link-{FAST}"}
    place = links[results["link"]] if results["link"] else results["backend"]
    said = "\n".join(f"- {note}" for note in notes(results))
    text = f"**{title_of(results)}**\n\n{tables.markdown(results['rows'])}\n\n{said}\n\n{made(results)}"
    return {README: {f"buckets, {place} table": text}}


if __name__ == "__main__":
    sys.exit(main())
