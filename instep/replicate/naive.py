"""Naive: after backward, one reduction per parameter, one after the other.

The least that is correct. Every parameter pays the latency of a message, and while the messages travel
nothing is computed:

    compute  |== forward ==|===== backward =====|                              |= update
    network                                      |-p9-|-p8-|-p7-| ... |-p1-|-p0-|

Time of a step: compute + num_parameters * latency + bytes / bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from instep.net.lane import Work
from instep.reduce.buckets import Bucket, Caps


class Naive:
    """A step: ``begin``; ``ready`` with each whole bucket during backward; ``finish`` after it."""

    overlaps = False  # whether ``ready`` is called as soon as a bucket is whole, or when backward has ended

    def __init__(self, launch: Callable[[Bucket], Work]) -> None:
        self.launch = launch

    @staticmethod
    def group(parameters: Sequence[Tensor], order: Sequence[int], caps: Caps) -> list[list[int]]:
        """Which parameters travel together, as positions: none."""
        return [[i] for i in order]

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """A step begins, with ``buckets`` in plan order."""
        self.buckets = buckets

    def ready(self, bucket: Bucket) -> None:
        """The gradients in ``bucket`` are whole: nothing to do yet."""

    def finish(self) -> None:
        """Backward has ended: reduce, and return when every gradient is reduced."""
        for bucket in self.buckets:
            self.launch(bucket).wait()
