"""The documented order of additions of each algorithm, without messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.comm.inputs import cut
from tests.reduce.trees import left_fold, tree_sum


def in_turn(addends: Sequence[Tensor]) -> Tensor:
    """((x0 + x1) + x2) + ..."""
    return left_fold(addends, torch.add)


def rotated(addends: Sequence[Tensor]) -> Tensor:
    """Part j added from rank j + 1 around to rank j."""
    size = len(addends)
    rows = [cut(x, size) for x in addends]
    turns = [[rows[(j + 1 + k) % size][j] for k in range(size)] for j in range(size)]
    return torch.cat([left_fold(turn, torch.add) for turn in turns])


def folded_tree(addends: Sequence[Tensor]) -> Tensor:
    """Pairs of neighbours until a power of two is left, then the balanced tree."""
    addends = list(addends)
    folded = len(addends) - (1 << len(addends).bit_length() - 1)
    pairs = [torch.add(addends[2 * i], addends[2 * i + 1]) for i in range(folded)]
    return tree_sum([*pairs, *addends[2 * folded :]], torch.add)


ORDERS: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "naive": in_turn,
    "tree": lambda addends: tree_sum(addends, torch.add),
    "reduce_broadcast": lambda addends: tree_sum(addends, torch.add),
    "ring": rotated,
    "direct": in_turn,
    "recursive_doubling": folded_tree,
    "halving_doubling": folded_tree,
}
