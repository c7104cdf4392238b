"""The sum tree once more, written down from its definition and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")
Node = tuple[int, int]


def half(length: int) -> int:
    """The largest power of two below ``length``."""
    return max(1 << k for k in range(length.bit_length()) if 1 << k < length)


def tree_sum(values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The sum of ``values`` down the left-complete tree."""
    if len(values) == 1:
        return values[0]
    middle = half(len(values))
    return add(tree_sum(values[:middle], add), tree_sum(values[middle:], add))


def left_fold(values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """((a + b) + c) + ...: what a plain loop does."""
    total = values[0]
    for value in values[1:]:
        total = add(total, value)
    return total


def parenthesised(a: str, b: str) -> str:
    """Addition that remembers its order."""
    return f"({a}+{b})"


def rounded(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One addition per element, each rounded to the dtype of ``a``, one element after the other."""
    return np.array([x + y for x, y in zip(a, b, strict=True)], dtype=a.dtype)


def children(num_leaves: int) -> dict[Node, tuple[Node, Node]]:
    """Every inner node of the tree over ``num_leaves``, with its left and its right child."""

    def below(lo: int, hi: int) -> dict[Node, tuple[Node, Node]]:
        if hi - lo == 1:
            return {}
        middle = lo + half(hi - lo)
        return {(lo, hi): ((lo, middle), (middle, hi)), **below(lo, middle), **below(middle, hi)}

    return below(0, num_leaves)


def maximal_nodes(leaves: set[int], num_leaves: int) -> list[Node]:
    """The nodes whose leaves are all in ``leaves`` while their parent's are not."""
    inner = children(num_leaves)
    nodes = {*inner, *((leaf, leaf + 1) for leaf in range(num_leaves))}
    inside = {node for node in nodes if leaves.issuperset(range(*node))}
    return sorted(inside - {child for node in inside & inner.keys() for child in inner[node]})
