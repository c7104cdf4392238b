"""What a contestant needs at its peak, measured where it is alone.

Contestants that take turns share a process, and the high-water mark of its resident memory is that of all of
them. So each has a world of its own for three steps, in which buckets are laid out, used, and laid out anew.
The mark counts everything: torch itself, weights, activations, gradients, buckets. A page of shared memory
counts on every rank that has touched it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instep.bench.contestants import Absent, Contestant, Stage
from instep.bench.ranks import World
from instep.bench.settings import Setting

NUM_STEPS = 3


def peak(world: World, told: dict[str, Any]) -> int | None:
    """The high-water mark of one rank, in bytes, after some steps of a contestant; None if it is absent.

    ``told``: "setting", "contestant" (the fields of each).
    """
    stage = Stage(world, Setting(**told["setting"]))
    try:
        player = Contestant(**told["contestant"]).play(stage)
    except Absent:
        return None
    for _ in range(NUM_STEPS):
        player.step()
    world.barrier()
    return high_water_bytes(Path("/proc/self/status").read_text())


def high_water_bytes(status: str) -> int:
    """``VmHWM`` of a ``/proc/PID/status``."""
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
