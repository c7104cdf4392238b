"""A rank's part of ``instep bench collectives``: every size in every way, alternately, with its check."""

from __future__ import annotations

from typing import Any

from instep.bench.bandwidth import whole_count
from instep.bench.bound import available_bytes, memory_bytes_per_s
from instep.bench.cases import Case
from instep.bench.ranks import World
from instep.bench.ways import IN_PLACE, Way
from instep.bench.words import size_text

WARM_UP = 2  # calls, of which the check is one
SHARE_OF_MEMORY = 0.6


def body(world: World, told: dict[str, Any]) -> dict[str, Any]:
    """Seconds per call, by size and way, on this rank; ``told``: see ``collectives.measure``."""
    results = []
    for size in told["sizes"]:
        world.say(f"{told['collective']}, {world.size} ranks, {size_text(size)}")
        results.append(
            _measure(world, told["collective"], told["ways"], size, told["samples"], told["budget_s"])
        )
    return {"memory": memory_bytes_per_s(world) if told["bound"] else None, "sizes": results}


def _measure(
    world: World, collective: str, names: list[str], size: int, samples: int, budget_s: float
) -> dict[str, Any]:
    shared = Case(collective, size, world.rank, world.size)
    ways = [Way(name, shared, world) for name in names]
    wrong = {way.name: way.wrong() for way in ways}
    times, calls = world.interleave(
        {way.name: way.run for way in ways}, samples, warm_up=WARM_UP - 1, budget_s=budget_s
    )
    for way in ways:
        wrong[way.name] += way.wrong()
    return {
        "size": shared.size_bytes,
        "count": shared.count,
        "times": times,
        "calls": calls,
        "wrong": wrong,
    }


def fits(collective: str, names: list[str], size: int, num_ranks: int) -> bool:
    """Whether all ranks together have memory for messages of ``size`` bytes.

    One buffer per kind of memory (two where it is not in place), and two for what a way needs on top.
    """
    one = whole_count(size, num_ranks) * 4
    buffers = (1 if collective == "all_reduce" else 2) * (2 if IN_PLACE in names else 1) + 2
    return one * buffers * num_ranks <= SHARE_OF_MEMORY * available_bytes()
