"""The binary counter: adds a rank's leaves as they come, in the order of the sum tree.

Like adding one to a binary number: a leaf is put on a stack, and while the two top entries are siblings
in the tree they are merged, left plus right. Peak memory is log2(k) + 1 buffers for k leaves that make one
node, against one for plain accumulation: 8 leaves of 1 GB take 4 GB. Leaves that straddle nodes leave more
roots, and take at most twice as many buffers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from instep.ordered.tree import Node, are_siblings


class Counter:
    """The partial sums of one bucket on one rank, during one step.

    A step begins with ``reset``. Each leaf is written into the buffer that ``open`` returns, then
    ``push``ed. At the end ``roots`` are the maximal subtrees of what was pushed. The leftmost partial sum
    always lies in ``home``, the bucket's own memory: where one root is all, nothing has to be copied.
    """

    def __init__(self, home: Tensor, spare: Callable[[], Tensor], *, ordered: bool = True) -> None:
        self.home = home
        self.ordered = ordered
        self._spare = spare
        self._spares: list[Tensor] = []
        self.reset(0)

    def reset(self, num_leaves: int) -> None:
        """Forget everything; the next leaf belongs to a tree over ``num_leaves``."""
        self.num_leaves = num_leaves
        self.roots: list[tuple[Node, Tensor]] = []
        self._free = list(self._spares)

    def open(self) -> Tensor:
        """The buffer for the next leaf; what it holds is left over from another use."""
        if not self.roots:
            return self.home
        if not self._free:
            self._spares.append(self._spare())
            return self._spares[-1]
        return self._free.pop()

    def push(self, leaf: int, buffer: Tensor) -> None:
        """Leaf number ``leaf`` is whole in ``buffer``, which came from ``open``."""
        self.roots.append(((leaf, leaf + 1), buffer))
        while len(self.roots) > 1 and self._merge_now():
            (_, hi), right = self.roots.pop()
            (lo, _), left = self.roots[-1]
            torch.add(left, right, out=left)
            self._free.append(right)
            self.roots[-1] = ((lo, hi), left)

    def _merge_now(self) -> bool:
        # Unordered sums are a left fold: what .grad accumulation does.
        return not self.ordered or are_siblings(self.roots[-2][0], self.roots[-1][0], self.num_leaves)
