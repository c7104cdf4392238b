"""From time to bandwidth, as in nccl-tests, and the memory bound of an all-reduce. Pure.

    algbw   S / time: how fast it was for the caller
    busbw   algbw x a factor that depends on the collective and on W: what each of W links would have to carry
            if the algorithm moved no byte too many; so it can be compared with the hardware, and between
            collectives and numbers of ranks. 2 (W-1)/W for all_reduce; (W-1)/W for all_gather,
            reduce_scatter, all_to_all, gather and scatter; 1 for broadcast and reduce

GB are 10^9 bytes. Older tables of all-reduces have 2 S / time in GiB/s, whatever W is: that is
algbw x 2 / 1.0737.

S is the size of the message as nccl-tests counts it: of the whole result of all_gather and gather, of the
whole input of reduce_scatter, scatter and all_to_all, of the tensor of the others. W is the number of ranks.

Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.

The bound: for every rank of one host to have the sum in its own memory, the S bytes of each of W ranks have
to be read once and written once: 2 W S bytes of traffic. Divided by what the memory moves in a second
(B_mem), that is a lower bound of the time, as long as the tensors do not fit into the caches. B_mem is
measured in the same run: all ranks copy between two arrays of four times the last-level cache at once; a copy
of S bytes counts as 2 S, one read and one written, as in J. McCalpin's STREAM. A store to a line that is not
in the cache reads it first, so the hardware moves more than is counted here; an algorithm that writes where
it has just read does not pay that, and may come below what this bound says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

# busbw / algbw.
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda W: 2 * (W - 1) / W,
    "all_gather": lambda W: (W - 1) / W,
    "reduce_scatter": lambda W: (W - 1) / W,
    "all_to_all": lambda W: (W - 1) / W,
    "broadcast": lambda W: 1.0,
    "reduce": lambda W: 1.0,
    "gather": lambda W: (W - 1) / W,
    "scatter": lambda W: (W - 1) / W,
}
# Those whose message is cut into W equal parts; ``count`` is then the elements of one part.
IN_PARTS = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
WITH_SUM = frozenset({"all_reduce", "reduce_scatter", "reduce"})
WITH_ROOT = frozenset({"broadcast", "reduce", "gather", "scatter"})
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
FALLBACK_BYTES = 32 << 20
TIMES_CACHE = 4


def bus_factor(collective: str, num_ranks: int) -> float:
    """busbw / algbw of ``collective``; of one rank 0, because nothing has to travel."""
    return FACTORS[collective](num_ranks) if num_ranks > 1 else 0.0


def figures(collective: str, size_bytes: int, num_ranks: int, time_us: float) -> dict[str, float]:
    """Both bandwidths in GB/s, by the names of their columns."""
    algbw = size_bytes / time_us / 1e3
    return {"algbw(GB/s)": algbw, "busbw(GB/s)": algbw * bus_factor(collective, num_ranks)}


def whole_count(size_bytes: int, num_ranks: int, itemsize: int = 4) -> int:
    """Elements of a message of about ``size_bytes`` in ``num_ranks`` equal parts of at least one element.

    Rounded down, as in nccl-tests.
    """
    return max(size_bytes // itemsize // num_ranks, 1) * num_ranks


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


def bound_s(size_bytes: int, num_ranks: int, bytes_per_s: float) -> float:
    """Least time of an all-reduce of S bytes on W ranks of one host: 2 W S / B_mem."""
    return 2 * num_ranks * size_bytes / bytes_per_s


def bound_applies(size_bytes: int, num_ranks: int) -> bool:
    """Whether the tensors of all ranks together are at least twice the last-level cache."""
    return size_bytes * num_ranks >= 2 * cache_bytes()
