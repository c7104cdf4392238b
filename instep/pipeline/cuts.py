"""Where a pipeline is cut: as many layers in each stage, as many parameters, or as given. Pure.

A cut is written as its *edges*, the first layer of each stage and the number of layers: [0, 3, 7] are layers
0 to 2 and 3 to 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

LAYERS, COST = BY = ("layers", "cost")


def edges_of(cuts: str | Sequence[int], num_parameters: Sequence[int], num_stages: int) -> list[int]:
    """The edges of ``cuts`` for layers with so many parameters each.

    Raises:
        ValueError: ``cuts`` is neither one of ``BY`` nor the first layers of all stages but the first.
    """
    if cuts == LAYERS:
        return balanced([1] * len(num_parameters), num_stages)
    if cuts == COST:  # a layer without parameters takes some time, too
        return balanced([max(count, 1) for count in num_parameters], num_stages)
    if isinstance(cuts, str) or not isinstance(cuts, list | tuple):
        raise ValueError(
            f"cuts: expected one of {', '.join(BY)}, or a list of the first layers, got {cuts!r}"
        )
    return edges_at(cuts, len(num_parameters), num_stages, f"cuts={list(cuts)}")


def edges_at(first_layers: Sequence[int], num_layers: int, num_stages: int, named: str) -> list[int]:
    """The edges of stages with these first layers, without that of stage 0, which ``named`` calls in errors.

    Raises:
        ValueError: they do not fit the numbers of layers and stages.
    """
    edges = [0, *first_layers, num_layers]
    if len(edges) != num_stages + 1 or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(
            f"{named}: expected {num_stages - 1} of the layers 1 to {num_layers - 1}, in order, the first "
            f"layer of each of {num_stages} stages but stage 0, so that none is empty"
        )
    return edges


def balanced(costs: Sequence[int], num_stages: int) -> list[int]:
    """The edges whose costliest stage, by the sum of its layers' ``costs``, is as cheap as possible.

    Every stage has a layer. Among equally good cuts earlier stages have fewer layers, because they hold more
    micro-batches.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    num_layers, sums = len(costs), [0, *accumulate(costs)]
    if num_layers < num_stages:
        raise ValueError(
            f"expected a layer for each of {num_stages} stages, got {num_layers}: take fewer ranks along pp, "
            "or fewer chunks, or name smaller blocks"
        )
    # worst[i]: the costliest stage of the first i layers; first[i]: where their last stage begins.
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
