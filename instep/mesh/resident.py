"""How much physical memory a process takes, as the kernel counts it: pure, from two files of /proc.

Resident memory has a page in every process that has touched it, so the sum over the ranks of a host has
shared memory (segments of "shm", libraries, what a forkserver has loaded for all) once per rank:

    VmHWM              /proc/PID/status          the most that was ever resident
    Rss                /proc/PID/smaps_rollup    what is resident now
    Private_*          /proc/PID/smaps_rollup    of that, what no other process has
    Pss                /proc/PID/smaps_rollup    Rss, each page divided by the processes that have it

Which pages two processes share the kernel tells nobody without privileges, but there are two bounds from
below on how many the ranks have together:

    sum of Pss                               misses what belongs to processes that are no ranks (a forkserver)
    sum of private + largest shared part     misses what some ranks share and the one with most does not

The second is exact where all ranks share the same. Of neither there is a high-water mark. But what is shared
is laid out once and stays, so what a process had more at its peak was its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SELF = Path("/proc/self")
NEEDED = {"VmHWM", "Rss", "Pss", "Private_Clean", "Private_Dirty"}


@dataclass(frozen=True)
class Resident:
    """Bytes of one process."""

    peak: int
    now: int
    private: int
    pss: int


def resident(process: Path = SELF) -> Resident | None:
    """What the process of this folder of /proc takes; None where the kernel does not tell.

    The kernel walks the page tables once: some milliseconds per GB.
    """
    try:
        status = (process / "status").read_text()
        rollup = (process / "smaps_rollup").read_text()
    except OSError:
        return None
    found = _bytes([*status.splitlines(), *rollup.splitlines()])
    if not found.keys() >= NEEDED:
        return None
    private = found["Private_Clean"] + found["Private_Dirty"] + found["Private_Hugetlb"]
    # The mark is kept in batches of pages per thread, and may lag behind by some.
    return Resident(max(found["VmHWM"], found["Rss"]), found["Rss"], private, found["Pss"])


def together(processes: Sequence[Resident]) -> int:
    """What these processes of one host take together at their peaks, shared pages once; a bound from below.

    It is reached where they share all the same pages, and at least what each of them takes.
    """
    shared = max((each.now - each.private for each in processes), default=0)
    now = max(sum(each.pss for each in processes), shared + sum(each.private for each in processes))
    return now + sum(each.peak - each.now for each in processes)


def _bytes(lines: Iterable[str]) -> Counter[str]:
    """The fields that are given in kB, by name."""
    found = Counter[str]()
    for line in lines:
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB":
            found[name] = int(number) << 10
    return found
