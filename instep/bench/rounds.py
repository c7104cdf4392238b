"""Steps in turns: in every round each contestant makes one step, and everything that can be timed is.

A machine is not the same from minute to minute, so what is to be compared has to be measured at the same
time: a round takes seconds, and what disturbs it disturbs all contestants. Another one begins every two
rounds, and every other round goes backwards, so nobody always follows the same one.

    round 0   none   DDP    naive  flat     dropped: DDP and instep lay their buckets out anew
    round 1   flat   naive  DDP    none     dropped
    round 2   DDP    naive  flat   none     counts
    round 3   none   flat   naive  DDP      counts
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.bench.contestants import Absent, Contestant, Player, Stage
from instep.bench.hosts import INTERFACE
from instep.bench.ranks import World
from instep.bench.settings import Setting
from instep.events import Event

DROPPED = 2
# Spans of the communication lane's name in which nothing is sent or received.
WAITING = ("queued", "wait", "aggregate")

# What a rank has measured of one contestant, a list with one entry per round in each.
Measured = dict[str, list[Any]]


def perform(world: World, told: dict[str, Any]) -> dict[str, Measured]:
    """All rounds on one rank: what it has measured, by contestant; those that cannot take part are not in it.

    ``told``: "setting", "contestants" (the fields of each), "samples".
    """
    stage = Stage(world, Setting(**told["setting"]))
    players: dict[str, Player] = {}
    for fields in told["contestants"]:
        one = Contestant(**fields)
        try:
            players[one.name] = one.play(stage)
        except Absent as error:
            world.say(f"  without {one.name}: {error}")
    measured: dict[str, Measured] = {name: {key: [] for key in _KEYS} for name in players}
    for number in range(DROPPED + told["samples"]):
        for name in order(list(players), number):
            found = _step(world, players[name])
            if number >= DROPPED:
                for key, value in found.items():
                    measured[name][key].append(value)
        world.say(f"  round {number + 1} of {DROPPED + told['samples']}")
    return measured


def order(names: Sequence[str], number: int) -> list[str]:
    """Who steps after whom in round ``number``."""
    shift = number // 2 % len(names)
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if number % 2 else turned


_KEYS = ("step_s", "forward_s", "guard_s", "busy_s", "agree_s", "sent_bytes", "received_bytes")


def _step(world: World, player: Player) -> dict[str, Any]:
    world.barrier()
    before = traffic()
    began, began_ns = time.perf_counter(), time.monotonic_ns()
    player.step()
    step_s = time.perf_counter() - began
    after = traffic()
    recorded = [] if player.recorder is None else player.recorder.events
    events = [event for event in recorded if event.start_ns >= began_ns]
    return {
        "step_s": step_s,
        "forward_s": player.forward_s,
        "guard_s": player.guard_s,
        "busy_s": busy_s(events),
        "agree_s": [event.duration_s for event in events if event.name == "agree"],
        "sent_bytes": after[0] - before[0],
        "received_bytes": after[1] - before[1],
    }


def busy_s(events: Sequence[Event]) -> float:
    """How long the communication lane was at work: the union of its spans, in seconds."""
    spans = sorted(
        (e.start_ns, e.end_ns) for e in events if e.lane == "communication" and e.name not in WAITING
    )
    total, until = 0, 0
    for start, end in spans:
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total / 1e9


def traffic(table: Path = Path("/proc/self/net/dev"), interface: str = INTERFACE) -> tuple[int, int]:
    """Bytes that have left and entered this host through its link; zeros without one."""
    for line in table.read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8]), int(numbers.split()[0])
    return 0, 0
