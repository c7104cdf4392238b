"""Which layers are one stage: as many in each, such as take least time or memory, or those given. Pure.

A cut is told by its *edges*, the first layer of each stage and the number of layers: [0, 3, 7] are layers 0
to 2 and 3 to 6. What it is worth, the costliest stage alone does not say: by the schedule others wait for it
or do not, stages share a rank, and hold few micro-batches or many. So cuts are tried, in the simulator or by
their memory: all of them where they are few, else from an even one as long as moving an edge helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from math import comb
from typing import Any, NamedTuple

from instep.pipeline.actions import Schedule
from instep.pipeline.check import peak_activations
from instep.pipeline.simulate import StageTimes, run

LAYERS, COST, MEMORY = BY = ("layers", "cost", "memory")
TRIED_ACTIONS = 40_000  # of all cuts that are tried: a second or two
ADAM = 2  # moments


class LayerCost(NamedTuple):
    """What a layer takes for one micro-batch, in seconds, and its memory, in bytes.

    ``trained_bytes`` are those of its ``weight_bytes`` that have gradients, a shared parameter's only in the
    first layer that uses it. ``saved_bytes`` are kept from forward to backward, without weights and without
    what goes from layer to layer, of which ``output_bytes`` are this one's. ``shared`` are the numbers of its
    parameters that other layers use, too.
    """

    forward_s: float
    backward_s: float
    weight_bytes: int = 0
    trained_bytes: int = 0
    saved_bytes: int = 0
    output_bytes: int = 0
    shared: tuple[int, ...] = ()

    @property
    def time_s(self) -> float:
        return self.forward_s + self.backward_s


class Pace(NamedTuple):
    """How a rank computes: so many times what layers cost, and which share of a backward is for weights."""

    forward: float = 1.0
    backward: float = 1.0
    weight_share: float = 0.5

    def slowness(self, costs: Sequence[LayerCost]) -> float:
        """How many times as long as these ``costs`` it takes for all of them."""
        taken_s = sum(self.forward * cost.forward_s + self.backward * cost.backward_s for cost in costs)
        return taken_s / max(sum(cost.time_s for cost in costs), 1e-12)


def require_known(cuts: str | Sequence[int], *, is_measured: bool) -> None:
    """Refuse words that say no cut, or one by costs where layers are not measured.

    Raises:
        ValueError: with what there is.
    """
    if cuts not in BY if isinstance(cuts, str) else not isinstance(cuts, Sequence):
        raise ValueError(
            f"cuts: expected one of {', '.join(BY)}, or a list of the first layers, got {cuts!r}"
        )
    if cuts in (COST, MEMORY) and not is_measured:
        raise ValueError(
            f'cuts="{cuts}" measures the layers: pass example=, what the first one is called with for one '
            "micro-batch"
        )


def edges_of(
    cuts: str | Sequence[int],
    num_layers: int,
    schedule: Schedule,
    costs: Sequence[LayerCost] | None = None,
    moments: int = ADAM,
) -> list[int]:
    """The edges of ``cuts``, one of ``BY`` or the first layers of all stages but the first.

    Raises:
        ValueError: they are not those of ``num_layers`` layers and the schedule's stages.
    """
    num_stages = schedule.num_stages
    if cuts == LAYERS:
        return balanced([1.0] * num_layers, num_stages)
    if isinstance(cuts, str):
        assert costs is not None, "who asks for measured cuts gives an example"
        return fastest(costs, schedule) if cuts == COST else leanest(costs, schedule, moments)
    return edges_at(cuts, num_layers, num_stages, f"cuts={list(cuts)}")


def edges_at(first_layers: Sequence[int], num_layers: int, num_stages: int, named: str) -> list[int]:
    """The edges of stages whose first layers, but that of stage 0, are these, called ``named``.

    Raises:
        ValueError: they are not those of so many layers and stages.
    """
    edges = [0, *first_layers, num_layers]
    if len(edges) != num_stages + 1 or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(
            f"{named}: expected {num_stages - 1} of the layers 1 to {num_layers - 1}, in order, the first "
            f"layer of each of {num_stages} stages but stage 0, so that none is empty"
        )
    return edges


def balanced(costs: Sequence[float], num_stages: int, speeds: Sequence[float] | None = None) -> list[int]:
    """The edges whose costliest stage costs as little as it can: the sum of its ``costs``, by its speed.

    ``speeds`` are those of the stages' ranks, by default the same. Every stage has a layer. Among cuts that
    are as good, earlier stages have fewer layers, because they hold more micro-batches.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    sums = [0.0, *accumulate(costs)]
    by = [1.0] * num_stages if speeds is None else speeds
    return _smallest(len(costs), num_stages, lambda stage, a, b: (sums[b] - sums[a]) / by[stage])


def _smallest(num_layers: int, num_stages: int, cost: Callable[[int, int, int], float]) -> list[int]:
    """The edges whose largest ``cost(stage, first, end)`` is as small as it can be."""
    if num_layers < num_stages:
        raise ValueError(
            f"expected a layer for each of {num_stages} stages, got {num_layers}: take fewer ranks along pp, "
            "or fewer chunks, or name smaller blocks"
        )
    # worst[i]: of the first i layers, in so many stages, the costliest; first[i]: where the last one begins.
    worst = [0.0, *([float("inf")] * num_layers)]
    firsts = []
    for stage in range(num_stages):
        following, first = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(1, num_layers + 1):
            for begin in range(end):
                largest = max(worst[begin], cost(stage, begin, end))
                if largest < following[end]:
                    following[end], first[end] = largest, begin
        worst = following
        firsts.append(first)
    edges = [num_layers]
    for first in reversed(firsts):
        edges.append(first[edges[-1]])
    return edges[::-1]


def fastest(
    costs: Sequence[LayerCost],
    schedule: Schedule,
    paces: Sequence[Pace] | None = None,
    message_s: float = 0.0,
) -> list[int]:
    """The edges with which ``schedule`` ends first, on ranks of these ``paces``."""
    by_rank = [Pace()] * schedule.num_ranks if paces is None else paces
    speeds = [1 / by_rank[rank].slowness(costs) for rank in schedule.stage_ranks]
    start = balanced([cost.time_s for cost in costs], schedule.num_stages, speeds)

    def score(edges: Sequence[int]) -> float:  # in ns: cuts that differ by rounding alone are as good
        try:
            return round(simulated_s(costs, edges, schedule, by_rank, message_s) * 1e9)
        except ValueError:  # by its ties it does not come to its end
            return math.inf

    return _best(start, schedule, score)


def simulated_s(
    costs: Sequence[LayerCost],
    edges: Sequence[int],
    schedule: Schedule,
    paces: Sequence[Pace],
    message_s: float = 0.0,
) -> float:
    """What ``schedule`` takes with these stages and the ties between them, by the simulator.

    Raises:
        ValueError: it does not come to its end with these ties.
    """
    times = replace(stage_times(costs, edges, schedule, paces), message_s=message_s)
    return max(one.end_s for one in run(replace(schedule, ties=ties_at(costs, edges)), times))


def ties_at(costs: Sequence[LayerCost], edges: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ties of a ``Schedule`` of these stages: of each parameter that several of them use, which."""
    users: dict[int, dict[int, None]] = {}  # in order
    for stage, (a, b) in enumerate(pairwise(edges)):
        for cost in costs[a:b]:
            for number in cost.shared:
                users.setdefault(number, {})[stage] = None
    return tuple(tuple(stages) for _, stages in sorted(users.items()) if len(stages) > 1)


def stage_times(
    costs: Sequence[LayerCost], edges: Sequence[int], schedule: Schedule, paces: Sequence[Pace]
) -> StageTimes:
    """What the actions of each stage take, on the ranks of ``schedule``."""
    forward_s, inputs_s, weights_s = [], [], []
    for (a, b), rank in zip(pairwise(edges), schedule.stage_ranks, strict=True):
        pace = paces[rank]
        backward_s = pace.backward * sum(cost.backward_s for cost in costs[a:b])
        forward_s.append(pace.forward * sum(cost.forward_s for cost in costs[a:b]))
        inputs_s.append(backward_s * (1 - pace.weight_share))
        weights_s.append(backward_s * pace.weight_share)
    return StageTimes(forward_s, inputs_s, weights_s)


def leanest(costs: Sequence[LayerCost], schedule: Schedule, moments: int = ADAM) -> list[int]:
    """The edges with which the rank that holds most holds least: see ``peak_bytes``."""
    counts = [
        peak_activations(schedule, sizes=[float(stage == one) for one in range(schedule.num_stages)])[rank]
        for stage, rank in enumerate(schedule.stage_ranks)
    ]  # micro-batches that each stage holds

    def size(stage: int, a: int, b: int) -> float:
        return _state_bytes(costs[a:b], moments) + counts[stage] * _activation_bytes(costs, a, b)

    start = _smallest(len(costs), schedule.num_stages, size)

    def score(edges: Sequence[int]) -> tuple[float, float]:  # of those that take as much, the most even
        longest_s = max(sum(cost.time_s for cost in costs[a:b]) for a, b in pairwise(edges))
        return max(peak_bytes(costs, edges, schedule, moments)), longest_s

    return _best(start, schedule, score)


def peak_bytes(
    costs: Sequence[LayerCost], edges: Sequence[int], schedule: Schedule, moments: int = ADAM
) -> list[float]:
    """The most that each rank holds: weights, gradients, so many ``moments`` of the optimizer, activations.

    Of these, as many micro-batches' as the schedule has under way on it, over all its stages.
    """
    spans = list(pairwise(edges))
    peaks = peak_activations(schedule, sizes=[_activation_bytes(costs, a, b) for a, b in spans])
    for (a, b), rank in zip(spans, schedule.stage_ranks, strict=True):
        peaks[rank] += _state_bytes(costs[a:b], moments)
    return peaks


def _state_bytes(costs: Sequence[LayerCost], moments: int) -> int:
    return sum(cost.weight_bytes + (1 + moments) * cost.trained_bytes for cost in costs)


def _activation_bytes(costs: Sequence[LayerCost], a: int, b: int) -> int:
    """What a stage of layers ``a`` to ``b`` keeps of one micro-batch, what has come in and goes out too."""
    inside = sum(cost.saved_bytes + cost.output_bytes for cost in costs[a:b])
    return inside + (costs[a - 1].output_bytes if a else 0)


def _best(start: list[int], schedule: Schedule, score: Callable[[Sequence[int]], Any]) -> list[int]:
    """The edges of the smallest ``score``: of all where these are few, else of those found from ``start``."""
    num_layers, num_inner = start[-1], len(start) - 2
    affordable = max(TRIED_ACTIONS // max(sum(map(len, schedule.rows)), 1), 1)
    if comb(num_layers - 1, num_inner) <= affordable:
        every = combinations(range(1, num_layers), num_inner)
        return min(([0, *inner, num_layers] for inner in every), key=score)
    found, least = start, score(start)
    while affordable:
        for edges in _nearby(found)[:affordable]:
            affordable -= 1
            if (value := score(edges)) < least:
                found, least = edges, value
                break
        else:
            break
    return found


def _nearby(edges: list[int]) -> list[list[int]]:
    """``edges`` with one of them a layer earlier or later, where every stage keeps a layer."""
    return [
        [*edges[:i], at, *edges[i + 1 :]]
        for i in range(1, len(edges) - 1)
        for at in (edges[i] - 1, edges[i] + 1)
        if edges[i - 1] < at < edges[i + 1]
    ]
