"""Kills in pipelines: of ranks of each stage, at points of a step that are drawn.

A layout is (schedule, ranks, backend): one pipeline of two ranks, or two. The points of its run are drawn
from (seed, number): a step, a rank, a phase and which time it is entered there (``forward`` and ``backward``:
of the so-many-th micro-batch; ``script``: between two of them, where messages are sent and taken;
``exchange``: gradients, the end of the step, the norm), and up to some milliseconds more. One kill is
followed by another one while the ranks recover from it, one comes before the first step, three from outside,
at moments that no rank knows. All as in the campaign: the run ends as if nothing had happened.
"""

from __future__ import annotations

import random
from itertools import product

from benchmarks.faults.campaign import DEADLINE_S, Layout, draw_blow
from benchmarks.faults.matrix import injected
from instep.recipes import text_config

SCHEDULES = ("1f1b", "interleaved", "zb-h1")
LAYOUTS = (*product(SCHEDULES, (2, 4), ("shm", "gloo")),)
PP, STEPS = 2, 60
SAVED_EVERY = 10
FIRST, LAST, APART = 4, 53, 6  # steps done at kills
PHASES = ("forward", "forward", "backward", "backward", "script", "script", "exchange", "exchange")
ONCE = ("loss", "update")
SOMETIMES = ("evaluate", "gather", "save", "hash")  # at steps of SAVED_EVERY
RECOVERING = ("join", "agree", "lost", "forward")
OUTSIDE, NUM_OUTSIDE = ("rank", "rank", "two", "all", "again"), 3
LATE_MS = 6.0
EXCHANGES = 5  # of a step, on every rank


def pipelined(seed: int, number: int) -> Layout:
    """Layout ``number`` of ``LAYOUTS``, with the kills of ``seed``."""
    schedule, ranks, backend = LAYOUTS[number]
    draw = random.Random(f"pipelines {seed} {number}")
    args = ["--timeout-s", str(DEADLINE_S), "--parallel.backend", backend]
    args += ["--parallel.pp", str(PP), "--parallel.schedule", schedule]
    saved = draw.random() < 0.5
    if saved:
        every = str(SAVED_EVERY)
        args += ["--checkpoint.every", every, "--eval.every", every, "--record.hash-every", every]
    inside = [injected("kill", rank=draw.randrange(ranks), step=-1, phase=draw.choice(("join", "agree")))]
    steps = list(range(FIRST, LAST, APART))
    twice, *outside = draw.sample(steps, 1 + NUM_OUTSIDE)
    for step in steps:
        if step in outside:
            continue
        inside.append(_kill(draw, schedule, ranks, step, saved=saved))
        if step == twice:
            again = draw.choice(RECOVERING)
            inside.append(injected("kill", rank=draw.randrange(ranks), step=step, phase=again))
    blows = tuple(draw_blow(draw, draw.choice(OUTSIDE), step, ranks) for step in sorted(outside))
    return Layout(ranks, backend, tuple(args), tuple(inside), blows, STEPS)


def _kill(draw: random.Random, schedule: str, ranks: int, step: int, *, saved: bool) -> str:
    if saved and draw.random() < 0.25:
        step = -(-step // SAVED_EVERY) * SAVED_EVERY
        return injected("kill", rank=draw.randrange(ranks), step=step, phase=draw.choice(SOMETIMES))
    phase = draw.choice((*PHASES, *ONCE))
    entry = 1 if phase in ONCE else draw.randint(1, entries(schedule, ranks)[phase])
    late = {"after_ms": round(draw.uniform(0.1, LATE_MS), 1)} if draw.random() < 0.5 else {}
    return injected("kill", rank=draw.randrange(ranks), step=step, phase=phase, entry=entry, **late)


def entries(schedule: str, ranks: int) -> dict[str, int]:
    """How often a rank enters a phase in a step, at least."""
    batch = text_config.tiny().batch
    forwards = (
        batch.global_size // batch.micro_size // (ranks // PP) * (2 if schedule == "interleaved" else 1)
    )
    backwards = forwards * (2 if schedule == "zb-h1" else 1)
    return {
        "forward": forwards,
        "backward": backwards,
        "exchange": EXCHANGES,
        "script": forwards + backwards + EXCHANGES,
    }
