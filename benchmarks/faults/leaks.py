"""Ranks are killed one after the other in a run of 5 M parameters: what do the processes that live on hold?

python benchmarks/faults/leaks.py              some ten minutes; writes leaks.json and the tables in README.md
python benchmarks/faults/leaks.py --quick      a few kills of each layout; writes nothing

Exit code 1 if anything grows. A recovery that keeps something keeps it every time, so what a process held
after the first recoveries is compared with what it holds after the last ones.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.faults.acts import INSTEP
from benchmarks.faults.bench import corner
from benchmarks.faults.command import Live, run
from benchmarks.faults.judge import Found
from benchmarks.faults.kills import recoveries
from benchmarks.pages import README, Pages, Results, made, save
from instep.bench import tables
from instep.cli.exit_codes import PREEMPTED
from instep.record.directory import FAULTS
from instep.record.jsonl import read_lines

HERE = Path(__file__).parent
COMMAND = "python benchmarks/faults/leaks.py"
# 5.02 M parameters, and few samples: the state is what a recovery moves.
MODEL = ["--model.layers", "4", "--model.width", "320", "--model.context", "16"]
BATCH = ["--batch.global-size", "4", "--batch.micro-size", "1"]
RUN = ["--steps", "1000000", *MODEL, *BATCH, "--checkpoint.every", "0", "--eval.windows", "4"]
QUICK = 6
SHOWN = 1500  # characters of what a run says that failed
HEADINGS = {
    "descriptors": "descriptors",
    "threads": "threads",
    "shared_mb": "shared (MB)",
    "private_mb": "private (MB)",
}
SETTLING = 2  # recoveries after which more may be held than before: arenas of malloc, a first spare
BEFORE, AFTER = 8, 10  # readings that are compared, at most: medians, because a spare may be on its way
STEPS = 10  # from a recovery to the reading: time for another spare


@dataclass(frozen=True)
class Layout:
    """``rank`` is killed ``kills`` times in a run of ``ranks``."""

    ranks: int
    backend: str
    stage: int
    rank: int
    kills: int

    @property
    def words(self) -> list[str]:
        placed = ["-n", str(self.ranks), "--parallel.backend", self.backend]
        return [*placed, "--parallel.shard-stage", str(self.stage)]

    @property
    def name(self) -> str:
        return f"{self.ranks} ranks, {self.backend}, stage {self.stage}, rank {self.rank} killed"


LAYOUTS = (
    Layout(2, "shm", 0, rank=1, kills=30),
    Layout(2, "gloo", 0, rank=1, kills=10),
    Layout(2, "shm", 3, rank=1, kills=10),
    Layout(2, "shm", 0, rank=0, kills=10),
    Layout(3, "gloo", 3, rank=1, kills=10),
)


@dataclass(frozen=True)
class Holding:
    """What a process holds. ``shared_mb`` and ``private_mb`` are resident, of memory files and of none."""

    descriptors: int
    threads: int
    shared_mb: float
    private_mb: float

    @staticmethod
    def of(pid: int) -> Holding:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        resident = [int(status[name].split()[0]) * 1024 / 1e6 for name in ("RssShmem", "RssAnon")]
        return Holding(len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), *resident)


# How much more may be held in the end, as a share and in the unit. What one recovery could keep, a copy of
# the gradients (20 MB) or a group (some descriptors and threads), is more than that after a few of them.
TOLERANCES = {
    "descriptors": (0.0, 2.0),
    "threads": (0.0, 1.0),
    "shared_mb": (0.05, 8.0),
    "private_mb": (0.05, 8.0),
}


@dataclass
class RepeatedKills:
    """``layout.rank`` is killed whenever the run has recovered and gone on for ``STEPS`` steps."""

    layout: Layout
    readings: list[dict[str, Holding]] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    def __call__(self, live: Live) -> None:
        live.until(STEPS)
        while len(self.readings) < self.layout.kills:
            live.send_rank(self.layout.rank, signal.SIGKILL)
            live.wait(lambda: len(recovered(live.run_dir)) > len(self.readings))
            live.until(recovered(live.run_dir)[-1]["step"] + STEPS)
            self.readings.append(self.read(live))
            self.loads.append(os.getloadavg()[0])
        live.process.send_signal(signal.SIGTERM)

    def read(self, live: Live) -> dict[str, Holding]:
        """What each process holds that no kill ends."""
        supervisor = live.process.pid
        pids = {"supervisor": supervisor}
        for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
            if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes():
                pids["forkserver"] = int(child)
        pids |= {f"rank {rank}": pid for rank, pid in live.pids().items() if rank != self.layout.rank}
        return {name: Holding.of(pid) for name, pid in pids.items()}


def recovered(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read_lines(run_dir / FAULTS) if event["event"] == "recovery"]


def compare(readings: Sequence[dict[str, Holding]]) -> list[dict[str, Any]]:
    """A row for each process: the medians of what it held after the first recoveries, and after the last."""
    settled = readings[SETTLING:]
    half = len(settled) // 2
    first, last = settled[: min(half, BEFORE)], settled[-min(half, AFTER) :]
    rows = []
    for process in readings[-1]:
        row: dict[str, Any] = {"process": process}
        for name in TOLERANCES:
            row[name] = [
                statistics.median(getattr(reading[process], name) for reading in part)
                for part in (first, last)
            ]
        rows.append(row)
    return rows


def grown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What of ``rows`` is not flat."""
    found = []
    for row in rows:
        for name, (share, more) in TOLERANCES.items():
            before, after = row[name]
            limit = before * (1 + share) + more
            if after > limit:
                found.append(
                    f"{row['process']}: {name}: expected at most {limit:.1f}, as {before:.1f} before, "
                    f"got {after:.1f}"
                )
    return found


def soak(layout: Layout) -> dict[str, Any]:
    """One run of ``layout``: its readings, what is wrong with them, and what its recoveries took."""
    act = RepeatedKills(layout)
    with corner() as place:
        path = place / "run"
        words = [*INSTEP, "train", *RUN, *layout.words, "--run-dir", str(path)]
        ended = run(words, place, path, act=act)
        events = read_lines(path / FAULTS)
    found = Found(codes=(ended.code,), said=ended.said, events=events, moments=ended.moments)
    seconds = [one["total"] for one in recoveries(found)]
    rows = compare(act.readings) if len(act.readings) >= SETTLING + 2 else []
    wrong = [f"{layout.name}: {problem}" for problem in grown(rows)]
    wrong += [f"{layout.name}: {problem}" for problem in ended.notes.values()]
    wrong += [f"{layout.name}: left behind: {', '.join(ended.left)}"] if ended.left else []
    if ended.code != PREEMPTED:
        problem = f"expected exit code {PREEMPTED}, got {ended.code}: {ended.said[-SHOWN:]}"
        wrong.append(f"{layout.name}: {problem}")
    return {
        "layout": layout.name,
        "kills": len(ended.moments),
        "wrong": wrong,
        "median_load": round(statistics.median(act.loads), 1) if act.loads else None,
        "kill_to_step_s": seconds,
        "rows": rows,
        "readings": [{name: asdict(held) for name, held in reading.items()} for reading in act.readings],
    }


def pages(results: Results) -> Pages:
    return {README: {"leaks": f"{block(results['layouts'])} {made(results)}"}}


def block(found: Sequence[dict[str, Any]]) -> str:
    """The tables, and whether any memory or descriptors grew."""
    held = [
        {
            "layout": one["layout"],
            "kills": one["kills"],
            "process": row["process"],
            **{HEADINGS[name]: f"{row[name][0]:.0f} → {row[name][1]:.0f}" for name in TOLERANCES},
        }
        for one in found
        for row in one["rows"]
    ]
    took = [
        {
            "layout": one["layout"],
            "kill to step (s), median": statistics.median(one["kill_to_step_s"]),
            "most": max(one["kill_to_step_s"]),
            "load of the machine": one["median_load"],
        }
        for one in found
        if one["kill_to_step_s"]
    ]
    num_wrong = sum(len(one["wrong"]) for one in found)
    verdict = f"{num_wrong} not flat" if num_wrong else "all flat"
    return (
        f"{tables.markdown(held)}\n\n{tables.markdown(took)}\n\n"
        f"{sum(one['kills'] for one in found)} kills: {verdict}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="layouts with this in their names; writes nothing"
    )
    options = parser.parse_args()
    found = []
    began = time.monotonic()
    for layout in LAYOUTS:
        if options.only in layout.name:
            found.append(soak(replace(layout, kills=QUICK) if options.quick else layout))
            print(block(found[-1:]), flush=True)
    wrong = [problem for one in found for problem in one["wrong"]]
    print(*wrong, sep="\n", file=sys.stderr)
    if not (wrong or options.quick or options.only):
        results = {"minutes": (time.monotonic() - began) / 60, "layouts": found}
        save(HERE / "leaks.json", results, pages, HERE, COMMAND)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
