"""Where a flat tensor is cut into chunks of nearly equal length: arithmetic only."""

from __future__ import annotations

from itertools import pairwise


def edges(num_elements: int, parts: int) -> list[int]:
    """The ``parts + 1`` edges of the chunks: chunk i is [edges[i], edges[i + 1]).

    Lengths differ by one element at most; with fewer elements than parts some chunks are empty.
    """
    return [i * num_elements // parts for i in range(parts + 1)]


def lengths(num_elements: int, parts: int) -> list[int]:
    """The length of each chunk."""
    return [hi - lo for lo, hi in pairwise(edges(num_elements, parts))]
