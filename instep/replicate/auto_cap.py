"""``bucket_cap_mb="auto"``: rank 0 measures the first reductions and chooses the bucket size for all ranks.

    reduction   0       1        2 3 4 5 6   7 ...
    buckets     small and large in turns    |of the chosen size
                order   warm-up  measured   '-- a broadcast

Exchanges of two sizes tell the cost of a bucket from the cost of a byte. The best size follows from both and
from the duration of backward: ``instep.comm.cost.best_bucket``. No bit depends on the size. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from instep.comm.cost import best_bucket, fit

AUTO = "auto"
DEFAULT_MB = 25.0  # where nothing can be chosen
SMALL_MB, LARGE_MB = 1.0, 8.0
MEBIBYTE = 1 << 20
WARM_UP, MEASURED = 1, 5  # reductions, after the one whose order of gradients all ranks adopt


class Sample(NamedTuple):
    """One reduction: (bytes, seconds) of each exchange of a bucket, and seconds of the last backward."""

    exchanges: Sequence[tuple[int, float]]
    backward_s: float


def probing_caps(sizes: Sequence[int]) -> list[float]:
    """Caps of buckets in turns small and, with room for two parameters of any of ``sizes``, large."""
    return [SMALL_MB, max(LARGE_MB, 2 * max(sizes) / MEBIBYTE)] * len(sizes)


def choose_cap_mb(samples: Sequence[Sample], hiding: float) -> float:
    """The best cap in MiB, rounded up to 0.1; ``hiding`` as for ``best_bucket``."""
    times: dict[int, list[float]] = {}
    for sample in samples:
        for size, seconds in sample.exchanges:
            times.setdefault(size, []).append(seconds)
    backward_s = median(sample.backward_s for sample in samples)
    if len(times) < 2 or backward_s <= 0:
        return DEFAULT_MB
    link = fit([*times], [*map(median, times.values())])
    total = sum(size for size, _ in samples[-1].exchanges)
    best = best_bucket(total, backward_s, link, hiding)
    return max(math.ceil(10 * best / MEBIBYTE) / 10, SMALL_MB)
