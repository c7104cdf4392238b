"""Which layers are one stage: cut so that the costliest stage costs as little as it can."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced(costs: Sequence[float], num_stages: int) -> list[int]:
    """The first layer of each stage, and the number of layers: ``num_stages + 1`` edges.

    The largest sum of ``costs`` within a stage is the smallest possible; every stage has a layer. Among cuts
    that are as good, earlier stages have fewer layers, because they hold more micro-batches.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    num_layers = len(costs)
    if num_layers < num_stages:
        raise ValueError(
            f"expected a layer for each of {num_stages} stages, got {num_layers}: take fewer ranks along pp, "
            "or fewer chunks, or name smaller blocks"
        )
    sums = [0.0, *accumulate(costs)]
    # worst[i]: of the first i layers, in so many stages, the costliest; first[i]: where the last one begins.
    worst = [0.0, *([float("inf")] * num_layers)]
    firsts = []
    for _ in range(num_stages):
        following, first = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(1, num_layers + 1):
            for begin in range(end):
                largest = max(worst[begin], sums[end] - sums[begin])
                if largest < following[end]:
                    following[end], first[end] = largest, begin
        worst = following
        firsts.append(first)
    edges = [num_layers]
    for first in reversed(firsts):
        edges.append(first[edges[-1]])
    return edges[::-1]
