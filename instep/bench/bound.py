"""How fast the memory lets an all-reduce be: measured bandwidth, and the time that no algorithm goes below.

For every rank to have the sum in its own memory, the S bytes of each of W ranks have to be read once and
written once: 2 W S bytes of traffic. Divided by what the memory moves in a second, that is a lower bound of
the time, as long as the tensors do not fit into the caches.

B_mem is measured in the same run: all ranks copy between two arrays of four times the last-level cache at
once; a copy of S bytes counts as 2 S, one read and one written, as in J. McCalpin's STREAM. A store to a line
that is not in the cache reads it first, so the hardware moves more than is counted here; an algorithm that
writes where it has just read does not pay that, and may come below what this bound says.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch

from instep.bench.ranks import World
from instep.bench.tables import quantiles

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
FALLBACK_BYTES = 32 << 20
TIMES_CACHE = 4
COPIES = 5


def cache_bytes(folder: Path = CACHES) -> int:
    """Size of the last-level cache; 32 MiB where the system does not tell."""
    sizes = [_bytes_of(path.read_text()) for path in folder.glob("index*/size")]
    return max(sizes, default=FALLBACK_BYTES)


def _bytes_of(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]] if found else 0


def available_bytes() -> int:
    """Memory that can be used without swapping; without an answer, that of a small machine."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return int(found[1]) << 10 if found else 4 << 30


def array_bytes(num_ranks: int) -> int:
    """Size of each of the two arrays that a rank copies between; less than wanted if memory is short."""
    return min(TIMES_CACHE * cache_bytes(), available_bytes() // (4 * num_ranks))


def memory_bytes_per_s(world: World) -> float:
    """B_mem: what all ranks together read and write per second while all of them copy; collective."""
    nbytes = array_bytes(world.size)
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    target.copy_(source)  # so that the pages are there
    found = []
    for _ in range(COPIES):
        world.barrier()
        start = time.perf_counter()
        target.copy_(source)
        found.append(world.slowest(time.perf_counter() - start))
    return 2 * nbytes * world.size / quantiles(found).median


def bound_s(size_bytes: int, num_ranks: int, bytes_per_s: float) -> float:
    """Least time of an all-reduce of S bytes on W ranks of one host: 2 W S / B_mem."""
    return 2 * num_ranks * size_bytes / bytes_per_s


def applies(size_bytes: int, num_ranks: int) -> bool:
    """Whether the tensors of all ranks together are at least twice the last-level cache."""
    return size_bytes * num_ranks >= 2 * cache_bytes()
