"""Strategies over 1 Gbit/s, and a parameter server with more and more hosts: measures and writes all anew.

python benchmarks/link/run.py                               some ten minutes; writes into this folder
python benchmarks/link/run.py --params 1M --samples 3 --out DIR      a trial, which leaves this folder alone

Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from instep.bench.charts import bars
from instep.bench.link import RATE_TEXT, LinkResults, chart, measure, report, title
from instep.bench.options import parse_count
from instep.bench.tables import environment, markdown, prepare, show, write_between, write_csv, write_json
from instep.bench.workloads import workload

HERE = Path(__file__).parent
COMMAND = "python benchmarks/link/run.py"
NUM_HOSTS = (2, 3, 4)
COMPARED = ("server", "DDP", "bucketed")


def main() -> int:
    wanted = arguments()
    began = time.monotonic()
    chosen = workload("link", parse_count(wanted.params) if wanted.params else None)
    pair = measure(chosen, 2, (), wanted.samples)
    # Little to compute: four hosts share the cores of one, and it is their links that are of interest.
    small = replace(chosen, batch=1)
    fewer = max(wanted.samples // 3, 3)  # bytes do not vary, and hosts that share two cores are slow
    several = [measure(small, hosts, ("server", "bucketed-gloo"), fewer) for hosts in NUM_HOSTS]
    show(pair.rows, title(pair), notes=pair.notes)
    show(growth(several), "more hosts")
    write(pair, several, wanted.out, (time.monotonic() - began) / 60)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--params", default="")
    parser.add_argument("--out", type=Path, default=HERE)
    return parser.parse_args()


def growth(several: Sequence[LinkResults]) -> list[dict[str, Any]]:
    """A row per strategy and number of hosts; bytes as multiples of S, the gradients of one rank."""
    rows = []
    for strategy in COMPARED:
        for found in several:
            row = next(row for row in found.rows if row["strategy"] == strategy)
            W, megabytes = found.num_hosts, found.workload.gradient_bytes / 1e6
            expected = W - 1 if strategy == "server" else 2 * (W - 1) / W
            rows.append(
                {
                    "strategy": strategy,
                    "hosts": W,
                    "into rank 0(S)": row["into rank 0(MB)"] / megabytes,
                    "by arithmetic(S)": float(expected),
                    "exposed(ms)": row["exposed(ms)"],
                    "step(ms)": row["step(ms)"],
                    "theory(ms)": row["theory(ms)"],
                }
            )
    return rows


def write(pair: LinkResults, several: Sequence[LinkResults], folder: Path, minutes: float) -> None:
    """Results, tables and charts into ``folder``, and a README with them."""
    prepare(folder, HERE)
    rows, readme = growth(several), folder / "README.md"
    payload = {"pair": pair.as_json(), "several": [found.as_json() for found in several]}
    write_json(folder / "results.json", payload, command=COMMAND)
    write_csv(folder / "results.csv", pair.rows)
    write_csv(folder / "hosts.csv", rows)
    chart(pair, folder / "chart.svg")
    bars(
        [{**row, "panel": f"{row['hosts']} hosts"} for row in sorted(rows, key=lambda row: row["hosts"])],
        folder / "hosts.svg",
        title="What a step waits for, with more hosts",
        subtitle=f"{several[0].workload.text}; {RATE_TEXT} to every host; step time less that of no exchange",
        label="strategy", value="exposed(ms)", unit="ms", group="panel",
    )  # fmt: skip
    write_between(readme, "link table", f"{title(pair)}.\n\n{report(pair.as_json())}")
    write_between(readme, "hosts table", f"{several[0].workload.text}.\n\n{markdown(rows)}")
    made = environment(COMMAND)
    write_between(
        readme,
        "environment",
        f"{made['cores']} cores ({made['cpu']}) shared by all hosts, torch {made['torch']}, Python "
        f"{made['python']}, {made['date']}, {minutes:.0f} minutes; ranks of one thread.",
    )


if __name__ == "__main__":
    sys.exit(main())
