"""The losses of a step: each micro-batch's is known to one rank, and every rank is told the mean of all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.mesh.process_group import Group


def gather(values: Mapping[int, float], length: int, group: Group) -> list[float]:
    """The ``length`` values of all ranks by position; each is known to one rank. Collective.

    A sum in which all addends but one are zero is exact, in whatever order it is added.
    """
    mine = torch.zeros(length, dtype=torch.float64)
    for position, value in values.items():
        mine[position] = value
    group.all_reduce(mine, "the exchange of losses")
    return mine.tolist()


class Shared(NamedTuple):
    """What all ranks know at the end of a step: the loss of each micro-batch, sums over ranks by name, and
    the figures of each rank, in group order."""

    losses: list[float]
    sums: dict[str, float]
    figures: list[list[float]]


def share(
    losses: Mapping[int, Tensor],
    num_leaves: int,
    addends: Mapping[str, float],
    group: Group,
    figures: Sequence[float] = (),
) -> Shared:
    """Tell each other the ``losses`` of this rank's micro-batches and, in one message, the others' arguments.

    All ranks name the same addends, and have as many figures. Collective.
    """
    names, width = sorted(addends), len(figures)
    first = num_leaves + len(names)
    values = {i: loss.item() for i, loss in losses.items()}
    values |= {num_leaves + k: addends[name] for k, name in enumerate(names)}
    values |= {first + group.rank * width + k: figure for k, figure in enumerate(figures)}
    told = gather(values, first + group.size * width, group)
    rows = [told[first + r * width : first + (r + 1) * width] for r in range(group.size)]
    return Shared(told[:num_leaves], dict(zip(names, told[num_leaves:first], strict=True)), rows)


def mean_loss(losses: Sequence[float]) -> float:
    """The mean, exactly rounded, so the same bits on any placement; nan if one is not finite."""
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan
