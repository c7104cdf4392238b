"""The watchdog: which worker keeps the others from going on, judged by the heartbeats of all. Pure.

    stopped      the kernel does not run it: SIGSTOP, a debugger
    no progress  its main thread has been in one phase, which waits for no rank, for much longer than ever;
                 in one that beats from inside: has not beaten, read or written for as long
    left behind  others have left its generation, which has lost a rank, and it has not noticed for as long

A rank that waits for a stuck one makes no progress either, so phases that wait are never the cause; where
all wait, the deadline of the wait itself reports it, which knows for whom. A rank that is alone waits for
none, and none waits for it, so that deadline is looked at here, but in phases that do work of their own,
too. One that waits for a device has it as well: a disk may be slow, and that is no hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from instep.elastic.heartbeat import BEATING, OWN_WORK, UNLIMITED, WAITING, Position

CONFIRMED_S = 1.0  # a debugger's glance, or a suspended host, is over by then
LEAST_S, FACTOR = 5.0, 5.0


@dataclass(frozen=True)
class Reading:
    """One look at a worker's heartbeat.

    ``stopped_s``: for how long the kernel has not been running it. ``left_behind_s``: for how long its
    generation has been over without its having left. ``alone``: it is its generation's only rank. Where it is
    in a phase of ``BEATING``: ``idle_s``, for how long it has not been seen to read or write, and whether one
    of its threads ``waits_for_device``.
    """

    position: Position
    stopped_s: float = 0.0
    left_behind_s: float = 0.0
    alone: bool = False
    idle_s: float = inf
    waits_for_device: bool = False


def limit_s(slowest_s: float, timeout_s: float, *, beats: bool = False) -> float:
    """How long a phase may take whose slowest so far took ``slowest_s`` (0: none so far).

    From one beat to the next no first time is so long that there has to be patience with it.
    """
    return min(max(LEAST_S, FACTOR * slowest_s), timeout_s) if slowest_s or beats else timeout_s


def find_stuck(
    readings: Mapping[int, Reading], slowest_s: Callable[[str], float], timeout_s: float
) -> dict[int, str]:
    """The workers that hold the others up, by number, and why each does."""
    found = {}
    for worker, reading in readings.items():
        phase = reading.position.phase
        seconds = min(reading.position.seconds, reading.idle_s)
        limit = limit_s(slowest_s(phase), timeout_s, beats=phase in BEATING)
        waits = phase in WAITING
        alone = reading.alone and phase not in OWN_WORK
        if waits or reading.waits_for_device or phase in UNLIMITED:
            limit = timeout_s
        if reading.left_behind_s:  # it waits for nothing, so there is no first time to be patient with
            limit = min(limit, max(LEAST_S, FACTOR * slowest_s(phase)))
        if reading.stopped_s >= CONFIRMED_S:
            found[worker] = f"was stopped for {reading.stopped_s:.1f} s"
        elif seconds > limit and (not waits or alone or reading.left_behind_s > limit):
            found[worker] = f"made no progress in {phase} for {seconds:.1f} s (limit {limit:.1f} s)"
    return found
