"""Broadcast from one host to 3 and to 7 others: naive, tree and scatter-allgather, where rounds show.

python benchmarks/collectives/broadcast.py                      some three minutes; writes into this folder
python benchmarks/collectives/broadcast.py --quick --out DIR    a short trial, which leaves this folder alone

Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench import charts, tables
from instep.bench.collectives import against_size, by_backend, by_size, measure, prediction, where
from instep.bench.options import CollectivesOptions, sizes_of
from instep.bench.tables import Row
from instep.comm.algorithms import SCHEDULES
from instep.comm.cost import collective_cost

HERE = Path(__file__).parent
COMMAND = "python benchmarks/collectives/broadcast.py"
FULL = CollectivesOptions(
    collective="broadcast",
    link=True,
    rate="200mbit",
    ranks=(4, 8),
    backends=("gloo", *SCHEDULES["broadcast"]),
    sizes=("1KB", "10KB", "100KB", "1MB", "4MB"),
    samples=10,
    budget_s=60,
)
QUICK = CollectivesOptions(
    collective="broadcast", link=True, rate="200mbit", ranks=(3,), sizes=("1KB", "100KB"), samples=3
)


def main() -> int:
    wanted = arguments()
    began = time.monotonic()
    options = QUICK if wanted.quick else FULL
    results = measure(options)
    results |= {"minutes": (time.monotonic() - began) / 60, "sizes": list(sizes_of(options))}
    prepare(wanted.out, HERE)
    tables.write_csv(wanted.out / "broadcast.csv", results["rows"])
    draw(results, options, wanted.out)
    whole = save(wanted.out / "broadcast.json", results, pages, HERE, COMMAND)
    print(pages(whole)[README]["broadcast"])
    return 1 if any(row["#wrong"] for row in results["rows"]) else 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


def pages(results: Results) -> Pages:
    """The tables of each number of hosts."""
    parts = []
    for ranks in dict.fromkeys(row["ranks"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["ranks"] == ranks]
        parts += [f"{where(results, ranks)}.", tables.markdown(with_rounds(rows, results["sizes"]))]
        longer = by_backend(rows, "time/predicted")
        parts += [f"Times as long as predicted; {prediction(results, ranks)}", tables.markdown(longer)]
    wrong = sum(row["#wrong"] for row in results["rows"])
    what = f"Median of up to {results['samples']} samples; {wrong} wrong elements; the hosts share the cores."
    return {README: {"broadcast": "\n\n".join([*parts, f"{what} {made(results)}"])}}


def draw(results: Mapping[str, Any], options: CollectivesOptions, folder: Path) -> None:
    """Time against size, where latencies show, and bars of the largest message, where bytes show."""
    rows = [
        {
            **row,
            "panel": f"{row['ranks']} hosts",
            **{f"{name}(ms)": row[f"{name}(us)"] / 1e3 for name in ("time", "min", "p99")},
        }
        for row in results["rows"]
    ]
    how = f"float32, a host per rank, all on two cores; median of {options.samples} samples"
    title = f"over links of {options.rate}"
    against_size(rows, folder / "broadcast.svg", title=f"Broadcast {title}", subtitle=how, hosts="hosts")
    most = max(sizes_of(options))
    charts.bars(
        [row for row in rows if row["size(B)"] > most / 2],
        folder / "broadcast-large.svg",
        title=f"Broadcast of {tables.size_text(most)} {title}",
        subtitle=f"{how}, least and 99th percentile",
        label="backend", value="time(ms)", low="min(ms)", high="p99(ms)", unit="ms", group="panel",
    )  # fmt: skip


def with_rounds(rows: Sequence[Row], sizes: Sequence[int]) -> list[Row]:
    """A row per algorithm: its rounds, how often the root sends all of x, and its times."""
    table: list[Row] = []
    for row in by_size(rows, sizes):
        times = {name: value for name, value in row.items() if name not in ("ranks", "backend")}
        shape: dict[str, Any] = {"rounds": None, "root sends(S)": None}
        if (schedule := SCHEDULES["broadcast"].get(row["backend"])) is not None:
            cost = collective_cost(schedule, row["ranks"], row["ranks"])
            shape = {"rounds": cost.steps, "root sends(S)": cost.sent[0] / row["ranks"]}
        table.append({"algorithm": row["backend"], **shape, **times})
    return table


if __name__ == "__main__":
    sys.exit(main())
