"""How far the clocks of a group's hosts are apart, and by how much that may be wrong.

Every host counts nanoseconds from its own boot. On one picture, unaligned, the same exchange lies days apart
on two hosts; aligned by the wall clock, still by what NTP leaves, some milliseconds, which is what a bucket
takes. Then the rank whose clock is ahead looks like the one that everybody waits for, and messages arrive
before they are sent. A tracer that names a slow rank therefore has to know how sure it can be.

Causality tells, without an assumption about the network. Nobody leaves an exchange of everybody with
everybody before all have entered it, so, entering at e and leaving at x, each by its own clock:

    rank 0   --e0---------x0----->        e0 before xr:   clock r - clock 0 < xr - e0
                 `.     .'
                   `. .'
                   .' `.
    rank r   ----er-----xr------->        er before x0:   clock r - clock 0 > er - x0

A message each way bounds the offset from both sides; the middle is the estimate, half the width the error, as
small as half a round trip. Each round can only narrow it. It costs a few dozen bytes and as many round trips
as there are rounds, once: the bound holds when it is measured, and clocks of hosts that nothing disciplines
drift apart by some milliseconds a minute.

Ranks under one kernel read one clock, and nothing is measured between them: the offset is zero, exactly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from instep.mesh.process_group import Group

OPERATION = "the comparison of clocks"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TIME_SPACE = Path("/proc/self/ns/time")
MAX_BOOT_BYTES = 256


@dataclass(frozen=True)
class Clocks:
    """By group rank: its clock minus that of group rank 0, and the most by which that is wrong, in ns."""

    offsets_ns: tuple[int, ...]
    errors_ns: tuple[int, ...]


def boot() -> str:
    """What exactly those processes have in common that read the same clock; empty where nothing tells.

    The kernel's boot and the time namespace: containers of one host share them, whatever their names.
    """
    try:
        text = BOOT_ID.read_text().strip()
    except OSError:
        return ""
    try:
        return f"{text}/{os.stat(TIME_SPACE).st_ino}"
    except OSError:  # a kernel without time namespaces
        return text


def measure(
    group: Group,
    rounds: int = 8,
    now: Callable[[], int] = time.monotonic_ns,
    boot: Callable[[], str] = boot,
) -> Clocks:
    """Compare the clocks ``now`` of all ranks; every rank gets the same. Collective.

    One gathering of ``boot()``; if it is not the same everywhere, ``rounds`` exchanges of a byte with every
    rank and one gathering of 16 * ``rounds`` bytes.

    Raises:
        ValueError: ``rounds`` is not positive.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    if group.size == 1:
        return Clocks((0,), (0,))
    boots = group.all_gather_bytes(boot().encode(), OPERATION, limit=MAX_BOOT_BYTES)
    hosts = [name or rank for rank, name in enumerate(boots)]
    if len(set(hosts)) == 1:
        return Clocks((0,) * group.size, (0,) * group.size)
    times = torch.empty(group.size, rounds, 2, dtype=torch.int64, device="cpu")
    group.all_gather(times.view(-1), _visits(group, rounds, now).view(-1), OPERATION)
    return estimate(hosts, times.tolist())


def _visits(group: Group, rounds: int, now: Callable[[], int]) -> torch.Tensor:
    """When this rank entered and left each round, (rounds, 2)."""
    out = torch.empty(group.size, dtype=torch.uint8, device="cpu")
    x, ones, visits = torch.zeros_like(out), [1] * group.size, []
    for _ in range(rounds):
        entered = now()
        group.all_to_all(out, x, ones, ones, OPERATION)
        visits.append((entered, now()))
    return torch.tensor(visits, dtype=torch.int64, device="cpu")


def estimate(hosts: Sequence[Hashable], times: Sequence[Sequence[Sequence[int]]]) -> Clocks:
    """What follows from ``times[rank][round]``, when the rank entered and left by the clock of its host.

    If a clock was put forward or back meanwhile, the rounds contradict each other; then the error covers all
    that any of them allows.
    """
    found = {hosts[0]: (0, 0)}
    for host in hosts:
        if host not in found:
            theirs = [visits for name, visits in zip(hosts, times, strict=True) if name == host]
            ours = [visits for name, visits in zip(hosts, times, strict=True) if name == hosts[0]]
            found[host] = _middle(*_bounds(theirs, ours))
    return Clocks(tuple(found[host][0] for host in hosts), tuple(found[host][1] for host in hosts))


def _bounds(
    theirs: Sequence[Sequence[Sequence[int]]], ours: Sequence[Sequence[Sequence[int]]]
) -> tuple[list[int], list[int]]:
    """Round by round what their clock minus ours is more than, and what it is less than."""
    lower, upper = [], []
    for there, here in zip(zip(*theirs, strict=True), zip(*ours, strict=True), strict=True):
        lower.append(max(entered for entered, _ in there) - min(left for _, left in here))
        upper.append(min(left for _, left in there) - max(entered for entered, _ in here))
    return lower, upper


def _middle(lower: Sequence[int], upper: Sequence[int]) -> tuple[int, int]:
    """The estimate and its error."""
    least, most = max(lower), min(upper)
    if least > most:
        least, most = min(*lower, *upper), max(*lower, *upper)
    offset = (least + most) // 2
    return offset, most - offset
