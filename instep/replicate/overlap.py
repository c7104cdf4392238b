"""Overlap: naive's messages, each started by its gradient's hook while backward still runs.

Backward computes the gradients of the last layers first, so they can travel while those of the first
layers are computed:

    compute  |== forward ==|===== backward =====|      |= update
    network                   |-p9-|-p8-| ...|-p1-|-p0-|
                                                 '-----' exposed: what the step still waits for

Time of a step: max(compute, num_parameters * latency + bytes / bandwidth) + the last message. Bytes no
longer count where backward is long enough; the latency per parameter still does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from instep.net.lane import Work
from instep.reduce.buckets import Bucket
from instep.replicate.naive import Naive


class Overlap(Naive):
    """Naive that launches in ``ready`` and waits in ``finish``.

    Buckets leave in plan order even when one is ready earlier, because the ranks' exchanges are paired by
    their order, and gradients need not become ready in the same order on every rank.

    The last bucket waits for ``finish``, which costs no overlap, since it is whole only when backward ends.
    It is a rank's word that its part of the step has gone well: a rank that raises before has not sent it,
    and sends instead that it left, so that none of the others updates its weights.
    """

    overlaps = True

    def __init__(self, launch: Callable[[Bucket], Work]) -> None:
        super().__init__(launch)
        self.waiting: set[int] = set()
        self.works: list[Work] = []

    def begin(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self.waiting.clear()
        self.works.clear()

    def ready(self, bucket: Bucket) -> None:
        """Launch ``bucket``, and those that were waiting for it, but for the last."""
        self.waiting.add(bucket.index)
        while (following := len(self.works)) in self.waiting and following + 1 < len(self.buckets):
            self.works.append(self.launch(self.buckets[following]))

    def finish(self) -> None:
        for bucket in self.buckets[len(self.works) :]:
            self.works.append(self.launch(bucket))
        for work in self.works:
            work.wait()
