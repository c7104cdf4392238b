"""Bucketed: overlap's timing with flat's economy, by sending gradients in buckets of a chosen size.

    compute  |== forward ==|===== backward =====|  |= update
    network                      |--b0--|--b1--|-b2-|

Small buckets start early but pay more latencies, large ones pay few but start late, so there is a best
size between. It follows from latency and bandwidth; 25 MiB is where DDP begins.

Time of a step: max(compute, num_buckets * latency + bytes / bandwidth) + the last bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from instep.reduce.buckets import Caps, group_by_cap
from instep.replicate.overlap import Overlap


class Bucketed(Overlap):
    """Overlap with several parameters to a bucket."""

    @staticmethod
    def group(parameters: Sequence[Tensor], order: Sequence[int], caps: Caps) -> list[list[int]]:
        return group_by_cap(parameters, order, caps)
