"""Random faults in random layouts: the matrix asks what somebody thought of, this asks the rest.

A layout is drawn from (seed, number): ranks, strategy or stage, backend, checkpoints or none, --min-ranks or
none. Half a dozen faults come to it at random steps: injected at a phase of one rank, or from outside, at a
moment that no rank knows, to one rank, two, all, or a spare, and some of them while the run recovers from the
one before. Some runs are stopped by SIGTERM and resumed. Each has to end as if nothing had happened: with the
bits of the undisturbed run on one rank, with every sample read once, and with nothing left behind.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.bench import Bench
from benchmarks.faults.command import Live, listening
from benchmarks.faults.judge import NOBODY, SENTINEL, Expect, Found, samples, way
from benchmarks.faults.matrix import GOES_ON, Row, Run, injected
from instep.cli.exit_codes import PREEMPTED
from instep.recipes import text_config

LAYOUTS = 16
STEPS = 150
SAVED_EVERY = 20
FIRST, LAST = 5, 120  # steps at which faults come
STRATEGIES = ("naive", "flat", "overlap", "bucketed")
PHASES = ("data", "forward", "backward", "exchange", "loss", "update")
SOMETIMES = ("ledger", "hash", "evaluate", "gather", "save", "snapshot")  # at steps of SAVED_EVERY
OF_RANK_0 = ("ledger", "hash", "save")
INSIDE = ("kill", "kill", "segv", "abort", "exit", "raise", "slow", "stop", "hang")
OUTSIDE = ("rank", "rank", "rank", "two", "all", "spare", "again", "stop")
LOOPBACK = ("0100007F:",)  # as /proc/net/tcp writes 127.0.0.1
DELAY_S = 0.05  # at most, from a step to what happens after it
AGAIN_S = 0.25  # at most, from a kill to the one that comes while the run recovers
DEADLINE_S = 30  # of a wait, by which what hangs where ranks wait for each other is noticed
PACE_S = 0.02  # a step takes so much longer, so that something can happen to it


@dataclass(frozen=True)
class Blow:
    """What happens from outside: ``what`` of ``OUTSIDE``, or "term", ``delay_s`` after ``step``."""

    what: str
    step: int
    delay_s: float
    rank: int
    again_s: float


@dataclass(frozen=True)
class Layout:
    """A run and what comes to it."""

    ranks: int
    backend: str
    args: tuple[str, ...]
    inside: tuple[str, ...]  # as --fault takes them
    blows: tuple[Blow, ...]
    steps: int = STEPS

    @property
    def is_stopped(self) -> bool:
        """Whether it is told to stop, and resumed."""
        return any(blow.what == "term" for blow in self.blows)

    @property
    def row(self) -> Row:
        """As the matrix has rows."""
        pace = f"slow:rank=0,step=0,steps={self.steps},phase=script,seconds={PACE_S:g}"
        run = Run(
            self.args, (pace, *self.inside), self.ranks, act=Struck(self.blows, self.backend), pauses=False
        )
        codes = (PREEMPTED, 0) if self.is_stopped else (0,)
        runs = (run, GOES_ON) if self.is_stopped else (run,)
        return Row("campaign", str(self), "", Expect(NOBODY, codes), runs, steps=self.steps)

    def __str__(self) -> str:
        words = [word.removeprefix("--parallel.").removeprefix("--") for word in self.args]
        return f"{self.ranks} ranks, {' '.join(words)}"


@dataclass(frozen=True)
class Struck:
    """Blow after blow; then a look for open ports: gloo's are on loopback, and there are no others."""

    blows: tuple[Blow, ...]
    backend: str

    def __call__(self, live: Live) -> None:
        for blow in self.blows:
            # The run has made a step since the last one: five failures without a step would end it.
            live.until(max(blow.step, live.step() + 1))
            time.sleep(blow.delay_s)
            if blow.what == "term":
                live.process.send_signal(signal.SIGTERM)
                return
            strike(live, blow)
        allowed = LOOPBACK if self.backend == "gloo" else ()
        if found := [address for address in listening(live.mark) if not address.startswith(allowed)]:
            live.notes["problem"] = f"it listens on {', '.join(found)}"


def strike(live: Live, blow: Blow) -> None:
    """What ``blow`` says, to whom there is at this moment."""
    pids = list(live.pids().values())
    first = blow.rank % max(1, len(pids))
    turned = pids[first:] + pids[:first]
    chosen = {"two": turned[:2], "all": pids, "spare": spares(live)[:1]}.get(blow.what, turned[:1])
    live.now()
    for pid in chosen:
        with suppress(ProcessLookupError):  # it has ended by itself, or in the fault before
            os.kill(pid, signal.SIGSTOP if blow.what == "stop" else signal.SIGKILL)
    if blow.what == "again":
        time.sleep(blow.again_s)
        live.now()
        for pid in list(live.pids().values())[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def spares(live: Live) -> list[int]:
    """Workers without a seat: the children of the process whose children the ranks are, without the ranks."""
    ranks = set(live.pids().values())
    with suppress(OSError, IndexError, ValueError, StopIteration):
        stat = Path(f"/proc/{next(iter(ranks))}/stat").read_text()
        server = int(stat.rpartition(")")[2].split()[1])
        if server != live.process.pid:
            children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
            return sorted(set(map(int, children)) - ranks)
    return []


def layout(seed: int, number: int) -> Layout:
    """Layout ``number`` of ``seed``."""
    draw = random.Random(f"campaign {seed} {number}")
    ranks = draw.choice((1, 2, 2, 3, 3, 4))
    backend = draw.choice(("shm", "shm", "gloo"))
    args = ["--timeout-s", str(DEADLINE_S), "--parallel.backend", backend]
    stage = draw.choice((0, 0, 1, 2, 3))
    if stage:
        args += ["--parallel.shard-stage", str(stage)]
    else:
        args += ["--parallel.strategy", draw.choice(STRATEGIES)]
    saved = draw.random() < 0.6
    if saved:
        every = str(SAVED_EVERY)
        args += ["--checkpoint.every", every, "--eval.every", every, "--record.hash-every", every]
    if ranks > 1 and draw.random() < 0.3:
        args += ["--min-ranks", str(draw.randint(1, ranks - 1))]
    steps = sorted(draw.sample(range(FIRST, LAST, 5), draw.randint(5, 8)))
    inside, blows = [], []
    for step in steps:
        if draw.random() < 0.5:
            inside.append(_inside(draw, step, ranks, saved))
        else:
            blows.append(draw_blow(draw, draw.choice(OUTSIDE), step, ranks))
    replicas = ranks >= 3 and stage == 0
    if saved and replicas and draw.random() < 0.5:
        args += ["--checks.replicas-every", "10"]
        inside.append(injected("flip", rank=1, step=LAST + 4, phase="data"))
    if draw.random() < 0.3:
        blows.append(draw_blow(draw, "term", LAST + 1, ranks))
    return Layout(ranks, backend, tuple(args), tuple(inside), tuple(blows))


def _inside(draw: random.Random, step: int, ranks: int, saved: bool) -> str:
    kind, rank = draw.choice(INSIDE), draw.randrange(ranks)
    if kind == "slow":
        return injected(kind, rank=rank, step=step, phase=draw.choice(PHASES), seconds=draw.choice((0.3, 2)))
    if saved and draw.random() < 0.3:
        phase = draw.choice(SOMETIMES)
        step = -(-step // SAVED_EVERY) * SAVED_EVERY
        return injected(kind, rank=0 if phase in OF_RANK_0 else rank, step=step, phase=phase)
    phase = "join" if draw.random() < 0.1 else draw.choice(PHASES)
    late = {"after_ms": round(draw.uniform(0.1, 20), 1)} if kind in ("kill", "segv", "abort", "exit") else {}
    return injected(kind, rank=rank, step=step, phase=phase, **(late if draw.random() < 0.5 else {}))


def draw_blow(draw: random.Random, what: str, step: int, ranks: int) -> Blow:
    """One to a rank that is drawn, some time after ``step``."""
    return Blow(what, step, draw.uniform(0, DELAY_S), draw.randrange(ranks), draw.uniform(0, AGAIN_S))


def measure_campaign(
    bench: Bench,
    seed: int,
    numbers: Sequence[int],
    draw: Callable[[int, int], Layout] = layout,
    part: str = "campaign",
) -> dict[str, Any]:
    """Every layout of ``numbers``, as ``draw`` gives it, once, compared with the undisturbed run."""
    layouts = []
    for number in numbers:
        one = draw(seed, number)
        found = bench.found(one.row)
        entry = fields(again(part, seed, number), one, found)
        layouts.append(entry)
        state = f"NOT GREEN: {'; '.join(entry['wrong'])}" if entry["wrong"] else "green"
        print(f"[{part} {seed}: {number}] {one}: {entry['faults']} faults: {state}", flush=True)
    return {
        "seed": seed,
        "layouts": layouts,
        "faults": sum(entry["faults"] for entry in layouts),
        "recoveries": sum(entry["recoveries"] for entry in layouts),
        "wrong": [
            f"{entry['command']} ({entry['layout']}): {wrong}"
            for entry in layouts
            for wrong in entry["wrong"]
        ],
    }


def fields(command: str, one: Layout, found: Found) -> dict[str, Any]:
    """What became of a layout, as JSON."""
    outside = len(found.moments)
    seen = sum(bool(event.get("injected_ns")) for event in found.failures)
    return {
        "command": command,
        "layout": str(one),
        "wrong": wrongs(one, found),
        "faults": outside + seen,
        "failures": dict(sorted(Counter(map(way, found.failures)).items())),
        "recoveries": len(found.recoveries),
        "codes": list(found.codes),
        "same": found.same,
        "redone": found.redone,
        "kill_to_step_s": kill_to_step(found),
        "inside": list(one.inside),
        "outside": [f"{blow.what} at {blow.step}" for blow in one.blows],
    }


def again(part: str, seed: int, number: int) -> str:
    """The line that makes a layout again."""
    return f'make faults ARGS="--part {part} --seed {seed} --layout {number}"'


def wrongs(one: Layout, found: Found) -> list[str]:
    """What is not as if nothing had happened, in words."""
    expected = one.row.expect.codes
    wrong = list(found.problems)
    if found.codes != expected:
        wrong.append(f"expected exit codes {expected}, got {found.codes}: {found.said[-1000:]}")
    wrong += [] if found.same else ["expected the hash of the undisturbed run on one rank"]
    wrong += [] if found.same_ledger else ["expected the losses and norms of the undisturbed run"]
    wrong += samples(found.steps, one.steps, text_config.tiny().batch.global_size)
    wrong += [f"left behind: {', '.join(found.left)}"] if found.left else []
    return wrong


def kill_to_step(found: Found) -> list[float]:
    """Seconds from a death to the next step, where nobody stopped or hung, who is watched for a while first.

    The fault before the first death that is noticed has caused it. Whatever else comes until there is a step
    again counts to it.
    """
    seconds: list[float] = []
    pending: list[dict[str, Any]] = []
    for event in found.events:
        if event["event"] == "failure":
            pending.append(event)
            continue
        if pending and all(way(failure) == SENTINEL for failure in pending):
            noticed = pending[0]["noticed_ns"]
            faults = [*found.moments, *(failure.get("injected_ns", 0) for failure in pending)]
            if cause := max((moment for moment in faults if moment <= noticed), default=0):
                seconds.append((event["stepped_ns"] - cause) / 1e9)
        pending = []
    return seconds


def summary(campaign: dict[str, Any]) -> str:
    """The table's last line: how many, how long, how many not as they should be."""
    seconds = [x for entry in campaign["layouts"] for x in entry["kill_to_step_s"]]
    took = (
        f"from a kill to the next step {statistics.median(seconds):.2f} s (median of {len(seconds)}), "
        f"{max(seconds):.2f} s at most"
        if seconds
        else "no kill was timed"
    )
    ends = f"{len(campaign['wrong'])} not as expected" if campaign["wrong"] else "all as expected"
    return (
        f"{campaign['faults']} faults in {len(campaign['layouts'])} layouts, {campaign['recoveries']} "
        f"recoveries: {ends}; {took}. Seed {campaign['seed']}."
    )
