"""How far the clocks of a group's hosts are apart, and the error of that estimate.

Every host counts nanoseconds from its own boot, so unaligned times of one exchange lie days apart; aligned by
the wall clock, they are apart by the error of NTP, some milliseconds, which is the time of a bucket. Then the
rank whose clock is ahead looks like the straggler, and messages arrive before they are sent. A tracer that
names a slow rank therefore has to know how sure it can be.

Causality bounds the offset, without an assumption about the network. No rank leaves an all-to-all exchange
before all ranks have entered it, so, entering at e and leaving at x, each by its own clock:

    rank 0   --e0---------x0----->        e0 before xr:   clock r - clock 0 < xr - e0
                 `.     .'
                   `. .'
                   .' `.
    rank r   ----er-----xr------->        er before x0:   clock r - clock 0 > er - x0

The middle of the bounds is the estimate, half their width the error, as small as half a round trip. Each
round can only narrow it. The bounds hold for the moment of the measurement; undisciplined clocks of hosts
drift apart by some milliseconds a minute. Ranks under one kernel read one clock: their offset is zero,
exactly.
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
    from instep.net.process_group import Group

OPERATION = "the comparison of clocks"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TIME_SPACE = Path("/proc/self/ns/time")
MAX_BOOT_BYTES = 256


@dataclass(frozen=True)
class Clocks:
    """By group rank: its clock minus that of group rank 0, and the largest error of that, in ns."""

    offsets_ns: tuple[int, ...]
    errors_ns: tuple[int, ...]


def boot() -> str:
    """The kernel's boot and the time namespace, which the processes with one clock share; "" if unknown."""
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
    """Compare the clocks ``now`` of all ranks; every rank gets the same result. Collective.

    One all-gather of ``boot()``; if that differs, ``rounds`` all-to-alls of a byte for every rank and one
    all-gather of 16 * ``rounds`` bytes.

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
    out = torch.empty(group.size, dtype=torch.uint8, device="cpu")
    x, ones = torch.zeros_like(out), [1] * group.size
    visits: list[int] = []
    for _ in range(rounds):
        entered = now()
        group.all_to_all(out, x, ones, ones, OPERATION)
        visits += entered, now()
    times = torch.empty(group.size, rounds, 2, dtype=torch.int64, device="cpu")
    group.all_gather(times.view(-1), torch.tensor(visits, dtype=torch.int64, device="cpu"), OPERATION)
    return estimate(hosts, times.tolist())


def estimate(hosts: Sequence[Hashable], times: Sequence[Sequence[Sequence[int]]]) -> Clocks:
    """The clocks that follow from ``times[rank][round]``, the rank's (entered, left) by its host's clock."""
    rounds = {  # by host: for each round the last entry and the first exit of its ranks
        host: [
            (max(entered for entered, _ in each), min(left for _, left in each))
            for each in zip(
                *(its for name, its in zip(hosts, times, strict=True) if name == host), strict=True
            )
        ]
        for host in hosts
    }
    found = {host: _middle(rounds[host], rounds[hosts[0]]) for host in rounds} | {hosts[0]: (0, 0)}
    return Clocks(tuple(found[host][0] for host in hosts), tuple(found[host][1] for host in hosts))


def _middle(theirs: Sequence[tuple[int, int]], ours: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Their clock minus ours, and the error.

    If a clock was set meanwhile, the rounds contradict each other; then the error covers the bounds of all.
    """
    lower = [there[0] - here[1] for there, here in zip(theirs, ours, strict=True)]
    upper = [there[1] - here[0] for there, here in zip(theirs, ours, strict=True)]
    least, most = max(lower), min(upper)
    if least > most:
        least, most = min(*lower, *upper), max(*lower, *upper)
    offset = (least + most) // 2
    return offset, most - offset
