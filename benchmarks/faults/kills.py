"""One run, in which a random rank is killed at a random moment, thirty times."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.acts import INSTEP
from benchmarks.faults.bench import Bench, corner
from benchmarks.faults.command import Live, run, steps_of
from benchmarks.faults.judge import PARTS, Found, samples
from instep.recipes import text_config
from instep.record.directory import FAULTS, SUMMARY
from instep.record.jsonl import read_lines

KILLS, RANKS, STEPS, SEED = 30, 3, 1000, 0
BETWEEN_S = (0.2, 4.0)


@dataclass(frozen=True)
class RandomKills:
    """``number`` kills of a rank that lives at the moment, at moments that no rank knows."""

    number: int
    seed: int

    def __call__(self, live: Live) -> None:
        draw = random.Random(self.seed)
        live.until(2)
        while len(live.moments) < self.number:
            time.sleep(draw.uniform(*BETWEEN_S))
            live.wait(lambda: len(live.pids()) == RANKS)
            pid = live.pids()[draw.randrange(RANKS)]
            with suppress(ProcessLookupError):  # this one has been killed already, and not yet replaced
                moment = time.monotonic_ns()
                os.kill(pid, signal.SIGKILL)
                live.moments.append(moment)


def measure_kills(bench: Bench, *, quick: bool) -> dict[str, Any]:
    """The default recipe on three ranks: the hash, and what each recovery took and was made of."""
    kills, steps = (5, 200) if quick else (KILLS, STEPS)
    settings = ["--steps", str(steps), "--seed", "1", "--data", str(bench.directory / "text")]
    words = [*INSTEP, "train", *settings]
    with corner() as place:
        alone = run([*words, "-n", "1", "--run-dir", str(place / "run")], place, place / "run")
        expected = _hash(place / "run")
    with corner() as place:
        path = place / "run"
        ended = run(
            [*words, "-n", str(RANKS), "--run-dir", str(path)], place, path, act=RandomKills(kills, SEED)
        )
        found = Found(
            codes=(alone.code, ended.code),
            said=ended.said,
            events=read_lines(path / FAULTS),
            moments=ended.moments,
            same=_hash(path) == expected,
            steps=[(line["step"], line["cursor"]) for line in steps_of(path)],
            left=ended.left,
        )
    wrong = [str(ended.notes["problem"])] if "problem" in ended.notes else []
    wrong += (
        []
        if found.codes == (0, 0)
        else [f"expected exit codes (0, 0), got {found.codes}: {ended.said[-2000:]}"]
    )
    wrong += [] if found.same else ["expected the hash of the undisturbed run on one rank"]
    wrong += samples(found.steps, steps, text_config.default().batch.global_size)
    wrong += [f"left behind: {', '.join(found.left)}"] if found.left else []
    return {
        "wrong": wrong,
        "kills": len(found.moments),
        "ranks": RANKS,
        "steps": steps,
        "seed": SEED,
        "failures": len(found.failures),
        "redone": found.redone,
        "same": found.same,
        "recoveries": recoveries(found),
    }


def recoveries(found: Found) -> list[dict[str, Any]]:
    """Each recovery with its parts in seconds, from the kill that caused it: the first after the last one."""
    made, before = [], 0
    for event in found.recoveries:
        causes = [moment for moment in found.moments if before < moment <= event["noticed_ns"]]
        before = event["stepped_ns"]
        detect = {"detect": (event["noticed_ns"] - causes[0]) / 1e9} if causes else {}
        parts = {**detect, **event["seconds"]}
        parts["total"] += parts.get("detect", 0.0)
        again = sum(event["noticed_ns"] < moment < event["stepped_ns"] for moment in found.moments)
        made.append({**parts, "steps_done": event["step"], "source": event["source"], "kills_during": again})
    return made


def summary(kills: dict[str, Any]) -> list[dict[str, Any]]:
    """Median and maximum of each part, as rows of a table."""
    found = kills["recoveries"]
    columns = {part: [one[part] for one in found if part in one] for part in (*PARTS, "total")}
    return [
        {"seconds": name, **{part: how(values) for part, values in columns.items() if values}}
        for name, how in (("median", statistics.median), ("max", max))
    ]


def _hash(path: Path) -> str:
    try:
        return (path / SUMMARY).read_text().split('"state_sha256": "')[1].split('"')[0]
    except (OSError, IndexError):
        return ""
