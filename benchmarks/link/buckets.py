"""Step time against bucket size in three places, beside what arithmetic predicts.

python benchmarks/link/buckets.py                         sockets, shared memory and links: some ten minutes
python benchmarks/link/buckets.py --place link            one of them, gloo, shm or link: some six minutes
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
from instep.bench.buckets import draw, measure, place_of, title_of
from instep.bench.hosts import RATE
from instep.bench.options import BucketsOptions

HERE = Path(__file__).parent
COMMAND = "python benchmarks/link/buckets.py"
SIZES = (1.0, 2.0, 5.0, 10.0, 25.0, 100.0, 1000.0)
PLACES: dict[str, list[dict[str, Any]]] = {
    "gloo": [{"backend": "gloo"}],
    "shm": [{"backend": "shm"}],
    "link": [{"link": True}, {"link": True, "rate": "10gbit"}],
}


def main() -> int:
    wanted = arguments()
    for place in wanted.place or PLACES:
        began = time.monotonic()
        common = {"sizes": SIZES, "samples": wanted.samples, "rounds": 3}
        common["params"] = wanted.params or ("20M" if place == "link" else "70M")
        found = [measure(BucketsOptions(**common, **one)) for one in PLACES[place]]
        write(place, found, wanted.out, (time.monotonic() - began) / 60)
        for one in found:
            tables.show(one["rows"], title_of(one), notes=one["notes"])
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--place", action="append", choices=list(PLACES))
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--params", default="")
    return parser.parse_args()


def write(place: str, found: list[dict[str, Any]], folder: Path, minutes: float) -> None:
    """Results, charts and tables into ``folder``, which keeps the tables of other places."""
    if not (folder / README).exists():
        prepare(folder, HERE)
    for one in found:
        tables.write_csv(folder / f"{stem(one)}.csv", one["rows"])
        draw(one, folder / f"{stem(one)}.svg")
    results = {"minutes": minutes, "place": place, "measured": found}
    save(folder / f"buckets-{place}.json", results, pages, HERE, f"{COMMAND} --place {place}")


def stem(one: Results) -> str:
    """The name of its files."""
    rate = "" if one["link"] in (None, RATE) else f"-{one['link']}"
    return f"buckets-{'link' if one['link'] else one['backend']}{rate}"


def pages(results: Results) -> Pages:
    texts = []
    for one in results["measured"]:
        said = "\n".join(f"- {note}" for note in one["notes"])
        chart = f"![step time against bucket size, {place_of(one)}]({stem(one)}.svg)"
        texts.append(f"{chart}\n\n**{title_of(one)}**\n\n{tables.markdown(one['rows'])}\n\n{said}")
    return {README: {f"buckets, {results['place']} table": "\n\n".join([*texts, made(results)])}}


if __name__ == "__main__":
    sys.exit(main())
