"""The physical memory of a process: how much the kernel counts, and how to keep freed memory. Pure.

A page counts as resident in every process that has touched it, so the sum over the ranks of a host counts
shared memory (segments of "shm", libraries, everything a forkserver has loaded) once per rank:

    VmHWM              /proc/PID/status          the peak of the resident memory
    Rss                /proc/PID/smaps_rollup    resident now
    Private_*          /proc/PID/smaps_rollup    the part of Rss that no other process has
    Pss                /proc/PID/smaps_rollup    Rss, each page divided by the processes that have it

The kernel does not say, without privileges, which pages two processes share, but there are two lower bounds
on the memory that the ranks have together:

    sum of Pss                               misses the share of processes that are no ranks (a forkserver)
    sum of private + largest shared part     misses pages that the rank with the largest part does not have

The second is exact where all ranks share the same pages. Neither has a high-water mark, but shared memory is
laid out once and stays, so memory that a process had only at its peak was its own.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SELF = Path("/proc/self")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
TRIM_BYTES = 256 << 20  # free memory kept at the end of the heap
MMAP_BYTES = 32 << 20  # larger blocks are mapped separately; glibc's own limit grows up to this


@dataclass(frozen=True)
class ResidentMemory:
    """Bytes of one process."""

    peak: int
    now: int
    private: int
    pss: int


def resident_memory(process: Path = SELF) -> ResidentMemory | None:
    """The memory of the process with this folder of /proc; None where the kernel does not say.

    The kernel walks the page tables once: some milliseconds per GB.
    """
    try:
        text = (process / "status").read_text() + (process / "smaps_rollup").read_text()
        kb = {name: int(number) << 10 for name, number in re.findall(r"^(\w+):\s*(\d+) kB$", text, re.M)}
        now, private = kb["Rss"], kb["Private_Clean"] + kb["Private_Dirty"] + kb.get("Private_Hugetlb", 0)
        # The kernel updates the peak in batches of pages per thread, so it may lag behind a little.
        return ResidentMemory(max(kb["VmHWM"], now), now, private, kb["Pss"])
    except (OSError, KeyError):
        return None


def total_resident(processes: Sequence[ResidentMemory]) -> int:
    """The memory of these processes of one host together at their peaks, shared pages once: a lower bound.

    It is exact where they share all the same pages, and at least the memory of each.
    """
    shared = max((each.now - each.private for each in processes), default=0)
    now = max(sum(each.pss for each in processes), shared + sum(each.private for each in processes))
    return now + sum(each.peak - each.now for each in processes)


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Keep memory that a step frees for the next step, in this process of ``environ``; whether that works.

    A training step frees most of the memory that it has taken. glibc returns the end of its heap to the
    system when a few megabytes are free there, and then the kernel has to find and zero every page again:
    2,000 to 28,000 page faults in each step of a model of 50 M parameters.

    Limits set by MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES stay; other C libraries and
    allocators are left alone. Source: mallopt(3).
    """
    if "MALLOC_TRIM_THRESHOLD_" in environ or "MALLOC_MMAP_THRESHOLD_" in environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "glibc.malloc." in environ.get("GLIBC_TUNABLES", ""):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES))
