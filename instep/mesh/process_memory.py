"""The physical memory of a process: how much the kernel counts, and how to keep what was freed. Pure.

Resident memory has a page in every process that has touched it, so the sum over the ranks of a host has
shared memory (segments of "shm", libraries, what a forkserver has loaded for all) once per rank:

    VmHWM              /proc/PID/status          the most that was ever resident
    Rss                /proc/PID/smaps_rollup    what is resident now
    Private_*          /proc/PID/smaps_rollup    of that, what no other process has
    Pss                /proc/PID/smaps_rollup    Rss, each page divided by the processes that have it

Which pages two processes share the kernel does not tell without privileges, but there are two bounds from
below on how many the ranks have together:

    sum of Pss                               misses what belongs to processes that are no ranks (a forkserver)
    sum of private + largest shared part     misses what some ranks share and the one with most does not

The second is exact where all ranks share the same. Of neither there is a high-water mark. But what is shared
is laid out once and stays, so what a process had more at its peak was its own.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SELF = Path("/proc/self")
NEEDED = {"VmHWM", "Rss", "Pss", "Private_Clean", "Private_Dirty"}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
TRIM_BYTES = 256 << 20  # what may be free at the end of the heap
MMAP_BYTES = 32 << 20  # of blocks that are mapped apart; glibc's own limit grows so far


@dataclass(frozen=True)
class ResidentMemory:
    """Bytes of one process."""

    peak: int
    now: int
    private: int
    pss: int


def resident_memory(process: Path = SELF) -> ResidentMemory | None:
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
    return ResidentMemory(max(found["VmHWM"], found["Rss"]), found["Rss"], private, found["Pss"])


def total_resident(processes: Sequence[ResidentMemory]) -> int:
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


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Keep what a step frees for the next step, in this process of ``environ``; whether that can be done.

    A training step takes memory and frees most of it again. glibc gives the end of its heap back to the
    system when a few megabytes are free there, and then the kernel has to find and zero every page once more:
    2,000 to 28,000 page faults in each step of a model of 50 M parameters. A process that trains needs the
    same again a moment later.

    Where MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES set these limits already, they
    stay; other C libraries and allocators are left alone. Source: mallopt(3).
    """
    if "MALLOC_TRIM_THRESHOLD_" in environ or "MALLOC_MMAP_THRESHOLD_" in environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "glibc.malloc." in environ.get("GLIBC_TUNABLES", ""):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES))
