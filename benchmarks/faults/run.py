"""The fault matrix: what happens to machines and programs is done to runs, and their ends are compared.

make faults                                     everything, each row five times; an hour or two
make faults ARGS="--quick"                      each row once; writes nothing
make faults ARGS="--only SIGKILL --times 3"     rows with SIGKILL in their names; writes nothing
make faults ARGS="--quick --no-pickle"          in ranks in which whoever unpickles is caught
make faults ARGS="--part kills"                 30 kills in one run; copy: what the snapshot costs
make faults ARGS="--part campaign"              random faults in 16 random layouts, others every time;
                                                one of them again: --seed 7 --layout 2
make faults ARGS="--part pipelines"             random kills in pipelines: stages, micro-batches, phases

Exit code 1 if anything is not as expected.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults import pipelines, report
from benchmarks.faults.bench import Bench
from benchmarks.faults.campaign import LAYOUTS, measure_campaign
from benchmarks.faults.campaign import summary as campaign_summary
from benchmarks.faults.copy_cost import measure_copy
from benchmarks.faults.kills import measure_kills
from benchmarks.faults.matrix import Row, matrix
from instep.bench.tables import write_json

pages = report.pages
TIMES = 5
PARTS = ("rows", "kills", "copy", "campaign", "pipelines")
SHOWN = 1500  # characters of what a row says that is not green


def main(words: Sequence[str] | None = None) -> int:
    wanted = arguments(words)
    rows = [
        row for row in matrix() if any(name in f"{row.group}: {row.name}" for name in wanted.only or [""])
    ]
    began = time.monotonic()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        bench = Bench(Path(directory), ["no-pickle"] if wanted.no_pickle else [])
        if "rows" in wanted.part:
            results["rows"] = make(bench, rows, 1 if wanted.quick else wanted.times)
            results["minutes"] = round((time.monotonic() - began) / 60, 1)
        if "kills" in wanted.part:
            results["kills"] = measure_kills(bench, quick=wanted.quick)
        if "copy" in wanted.part:
            results["copy"] = measure_copy(bench, quick=wanted.quick)
        if "campaign" in wanted.part:
            numbers = wanted.layout or range(LAYOUTS)
            results["campaign"] = measure_campaign(bench, wanted.seed, numbers)
            print(campaign_summary(results["campaign"]), flush=True)
        if "pipelines" in wanted.part:
            numbers = wanted.layout or range(len(pipelines.LAYOUTS))
            made = measure_campaign(bench, wanted.seed, numbers, pipelines.pipelined, "pipelines")
            results["pipelines"] = made
            print(campaign_summary(made), flush=True)
    if wanted.json is not None:
        write_json(wanted.json, results, command=report.COMMAND)
    if not (wanted.only or wanted.quick or wanted.no_pickle or wanted.layout):
        report.write(results)
    for name, wrong in report.not_green(results):
        print(f"NOT GREEN: {name}: {wrong}", file=sys.stderr)
    return 1 if report.not_green(results) else 0


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", metavar="NAME", help="a part of 'group: name'")
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--no-pickle", action="store_true")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000), help="of the campaign")
    parser.add_argument("--layout", type=int, action="append", help="of the campaign; writes nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    wanted = parser.parse_args(words)
    wanted.part = wanted.part or (["rows"] if wanted.only or wanted.no_pickle else PARTS)
    return wanted


def make(bench: Bench, rows: Sequence[Row], times: int) -> list[dict[str, Any]]:
    """Each of ``rows`` so many times, in rounds: what disturbs the machine for a while spares most of it."""
    found: list[dict[str, Any]] = [
        {"group": row.group, "name": row.name, "skipped": bench.skipped(row), "made": []} for row in rows
    ]
    for turn in range(times):
        for number, (row, entry) in enumerate(zip(rows, found, strict=True), start=1):
            if entry["skipped"]:
                continue
            began = time.monotonic()
            made = bench.make(row)
            entry["made"].append(made.fields())
            took = f"{time.monotonic() - began:.1f} s"
            state = "green" if not made.wrong else f"NOT GREEN: {'; '.join(made.wrong)}"
            print(f"[{turn + 1}: {number}/{len(rows)}] {row.group}: {row.name}: {state} ({took})", flush=True)
            if made.wrong:
                print(made.found.said[-SHOWN:], file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
