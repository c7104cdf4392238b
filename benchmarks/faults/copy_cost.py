"""What the snapshot costs: seconds in which it keeps a rank, as a share of the time that steps take.

Two ways in one run of the default recipe on two ranks. *Told*: rank 0 times every copy; the others wait for
it in the next exchange, so the step is longer by that much. *Paired*: blocks of steps with copies take turns
with blocks without, and neighbours are compared; that has what no clock inside can see (caches, page
faults), and the machine's noise.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from benchmarks.faults.acts import INSTEP, Inside
from benchmarks.faults.bench import Bench, corner
from benchmarks.faults.command import run
from benchmarks.faults.inside import COPIES
from instep.bench.tables import paired_ratio

RANKS, STEPS, BLOCK = 2, 600, 20
MOST = 0.03
WARM_UP = 20  # the first copy touches new pages, the first steps everything else


def measure_copy(bench: Bench, *, quick: bool) -> dict[str, Any]:
    """The two shares of a step, and the seconds and the interval that they come from."""
    steps = 100 if quick else STEPS
    settings = ["--steps", str(steps), "--data", str(bench.directory / "text"), "--eval.every", "0"]
    told = _run([*settings, "--checkpoint.every", "0"], "copies")
    paired = _run([*settings, "--checkpoint.every", "0"], f"copies={BLOCK}")
    found = {"ranks": RANKS, "steps": steps, **as_told(told), **as_paired(paired)}
    share = found["share"]
    wrong = [f"expected at most {MOST:.0%} of a step, got {share:.1%}"] if share > MOST else []
    return {**found, "wrong": wrong}


def _run(settings: list[str], hook: str) -> list[dict[str, Any]]:
    """A line per step of rank 0."""
    with corner() as place:
        path = place / "run"
        words = [*INSTEP, "train", "-n", str(RANKS), "--run-dir", str(path), *settings]
        ended = run(Inside((hook,))(words, place), place, path)
        if ended.code:
            raise RuntimeError(f"expected a run that ends with code 0, got {ended.code}:\n{ended.said}")
        return [json.loads(line) for line in Path(place, COPIES).read_text().splitlines()]


def as_told(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds in copies by seconds in steps."""
    steady = [line for line in lines if line["step"] > WARM_UP]
    copied = [line["step"] for line in steady if line["copied"]]
    whole_ns = steady[-1]["ns"] - steady[0]["ns"]
    return {
        "share": sum(line["copy_ns"] for line in steady[1:]) / whole_ns,
        "copy_ms": statistics.median(line["copy_ns"] for line in steady if line["copied"]) / 1e6,
        "step_ms": statistics.median(b["ns"] - a["ns"] for a, b in pairwise(steady)) / 1e6,
        "interval": statistics.median(b - a for a, b in pairwise(copied)),
    }


def as_paired(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean step of a block with copies by that of the block after it, without."""
    blocks = []
    for on, block in groupby(pairwise(lines), key=lambda pair: pair[1]["on"]):
        durations = [b["ns"] - a["ns"] for a, b in block]
        blocks.append((on, statistics.fmean(durations)))
    blocks = blocks[2:]  # warming up
    pairs = [(a, b) for (is_on, a), (_, b) in pairwise(blocks) if is_on]
    if not pairs:
        return {}
    ratio = paired_ratio([a for a, _ in pairs], [b for _, b in pairs])
    return {"paired": ratio._asdict(), "pairs": len(pairs), "block": BLOCK}
