"""Strategies over 1 and 10 Gbit/s, a parameter server with more and more hosts: measures and writes all.

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

from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench.charts import bars
from instep.bench.hosts import RATE, rate_text
from instep.bench.link import LinkResults, chart, measure, report, title
from instep.bench.options import parse_count
from instep.bench.tables import markdown, show, write_csv
from instep.bench.workloads import Workload, workload

HERE = Path(__file__).parent
COMMAND = "python benchmarks/link/run.py"
NUM_HOSTS = (2, 3, 4)
FAST = "10gbit"
COMPARED = ("server", "DDP", "bucketed")


def main() -> int:
    wanted = arguments()
    began = time.monotonic()
    chosen = workload("link", parse_count(wanted.params) if wanted.params else None)
    pairs = [measure(chosen, 2, (), wanted.samples, rate) for rate in (RATE, FAST)]
    # Little to compute: four hosts share the cores of one, and it is their links that are of interest.
    small = replace(chosen, batch=1)
    fewer = max(wanted.samples // 3, 3)  # bytes do not vary, and hosts that share two cores are slow
    several = [measure(small, hosts, ("server", "bucketed-gloo"), fewer) for hosts in NUM_HOSTS]
    for pair in pairs:
        show(pair.rows, title(pair), notes=pair.notes)
    show(growth([found.as_json() for found in several]), "more hosts")
    write(pairs, several, wanted.out, (time.monotonic() - began) / 60)
    return 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--params", default="")
    return parser.parse_args()


def growth(several: Sequence[Results]) -> list[dict[str, Any]]:
    """A row per strategy and number of hosts; bytes as multiples of S, the gradients of one rank."""
    rows = []
    for strategy in COMPARED:
        for found in several:
            row = next(row for row in found["rows"] if row["strategy"] == strategy)
            W, megabytes = found["hosts"], Workload(**found["setting"]).gradient_bytes / 1e6
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


def pages(results: Results) -> Pages:
    pairs, several = results["pairs"], results["several"]
    small = Workload(**several[0]["setting"]).text
    texts = []
    for pair in pairs:
        where = f"2 hosts, {rate_text(pair['rate'])} between them"
        text = Workload(**pair["setting"]).text
        texts.append(f"{where}; {text}.\n\n{report(pair)}\n\n![{where}](chart-{pair['rate']}.svg)")
    return {
        README: {
            "link table": "\n\n".join([*texts, f"All hosts share the cores. {made(results)}"]),
            "hosts table": f"{small}.\n\n{markdown(growth(several))}\n\n{made(results)}",
        }
    }


def write(pairs: Sequence[LinkResults], several: Sequence[LinkResults], folder: Path, minutes: float) -> None:
    """Results, tables and charts into ``folder``."""
    prepare(folder, HERE)
    jsons = {
        name: [one.as_json() for one in found] for name, found in (("pairs", pairs), ("several", several))
    }
    results: dict[str, Any] = {"minutes": minutes, **jsons}
    rows = growth(results["several"])
    write_csv(folder / "results.csv", [{"rate": pair.rate, **row} for pair in pairs for row in pair.rows])
    write_csv(folder / "hosts.csv", rows)
    for pair in pairs:
        chart(pair, folder / f"chart-{pair.rate}.svg")
    bars(
        [{**row, "panel": f"{row['hosts']} hosts"} for row in sorted(rows, key=lambda row: row["hosts"])],
        folder / "hosts.svg",
        title="What a step waits for, with more hosts",
        subtitle=f"{several[0].workload.text}; {rate_text(RATE)} to every host; step time less that of no "
        "exchange",
        label="strategy", value="exposed(ms)", unit="ms", group="panel",
    )  # fmt: skip
    save(folder / "results.json", results, pages, HERE, COMMAND)


if __name__ == "__main__":
    sys.exit(main())
