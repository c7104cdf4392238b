"""Broadcast from one host to 3 and to 7 others: naive, tree and scatter-allgather, where rounds show.

python benchmarks/broadcast/run.py                      some three minutes; writes into this folder
python benchmarks/broadcast/run.py --quick --out DIR    a short trial, which leaves this folder alone

Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.bench import charts, tables
from instep.bench.collectives import against_size, by_backend, by_size, measure, prediction, where
from instep.bench.options import CollectivesOptions, sizes_of
from instep.bench.tables import Row
from instep.comm.algorithms import SCHEDULES
from instep.comm.cost import collective_cost

HERE = Path(__file__).parent
COMMAND = "python benchmarks/broadcast/run.py"
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
    tables.prepare(wanted.out, HERE)
    text = block(results, options, (time.monotonic() - began) / 60)
    tables.write_json(wanted.out / "results.json", results, command=COMMAND)
    tables.write_csv(wanted.out / "results.csv", results["rows"])
    tables.write_between(wanted.out / "README.md", "broadcast", text)
    draw(results, options, wanted.out)
    print(text)
    return 1 if any(row["#wrong"] for row in results["rows"]) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE)
    return parser.parse_args()


def block(results: Mapping[str, Any], options: CollectivesOptions, minutes: float) -> str:
    """The tables and what they were made on."""
    parts = []
    for ranks in options.ranks:
        rows = [row for row in results["rows"] if row["ranks"] == ranks]
        parts += [f"{where(results, ranks)}.", tables.markdown(with_rounds(rows, sizes_of(options)))]
        longer = by_backend(rows, "time/predicted")
        parts += [f"Times as long as predicted; {prediction(results, ranks)}", tables.markdown(longer)]
    found = tables.environment(COMMAND)
    wrong = sum(row["#wrong"] for row in results["rows"])
    parts.append(
        f"Median of up to {options.samples} samples; {wrong} wrong elements. Made by `{COMMAND}` on "
        f"{found['cores']} cores ({found['cpu']}) shared by all hosts, torch {found['torch']}, "
        f"{found['date']}, in {minutes:.1f} minutes."
    )
    return "\n\n".join(parts)


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
    against_size(rows, folder / "chart.svg", title=f"Broadcast {title}", subtitle=how, hosts="hosts")
    most = max(sizes_of(options))
    charts.bars(
        [row for row in rows if row["size(B)"] > most / 2],
        folder / "large.svg",
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
