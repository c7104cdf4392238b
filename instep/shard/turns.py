"""Units leave in plan order, leaf after leaf, whichever is whole first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from instep.ordered.buckets import Bundle, Caps
from instep.work import Work


class Turns:
    """A strategy whose every leaf travels on its own: ``begin`` for each, then ``ready``, then ``finish``.

    The last unit of a leaf waits for ``finish``: it is the rank's word that the leaf has gone well.
    """

    overlaps = True

    def __init__(self, launch: Callable[[Bundle], Work]) -> None:
        self.launch = launch
        self.buckets: Sequence[Bundle] = ()
        self.num_launched = 0
        self._waiting: set[int] = set()

    @staticmethod
    def group(parameters: Sequence[Tensor], order: Sequence[int], caps: Caps) -> list[list[int]]:
        """All in one: what travels together is cut by the module's units instead."""
        return [list(order)]

    def begin(self, buckets: Sequence[Bundle]) -> None:
        self.buckets = buckets
        self.num_launched = 0
        self._waiting.clear()

    def ready(self, bucket: Bundle) -> None:
        """Launch ``bucket``, and those that were waiting for it, but for the last."""
        self._waiting.add(bucket.index)
        while self.num_launched in self._waiting and self.num_launched + 1 < len(self.buckets):
            self._launch_next()

    def finish(self) -> None:
        """Launch what has not been; all are whole."""
        while self.num_launched < len(self.buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        self.num_launched += 1
        self.launch(self.buckets[self.num_launched - 1])
