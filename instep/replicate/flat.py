"""Flat: naive's latency paid once, by sending all gradients as one message.

    compute  |== forward ==|===== backward =====|                     |= update
    network                                      |-p9 p8 p7 ... p1 p0-|

Time of a step: compute + latency + bytes / bandwidth. Where bandwidth is what limits, this is no faster
than naive: the same bytes travel, and still nothing is computed meanwhile. The price is a second copy of
all gradients in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from instep.reduce.buckets import Caps, group_by_cap
from instep.replicate.naive import Naive


class Flat(Naive):
    """Naive with one bucket (one per dtype and device)."""

    @staticmethod
    def group(parameters: Sequence[Tensor], order: Sequence[int], caps: Caps) -> list[list[int]]:
        return group_by_cap(parameters, order, float("inf"))
