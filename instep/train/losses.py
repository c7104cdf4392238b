"""Losses of the text recipe: of one micro-batch, of a step over all ranks, of held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.data.loader import next_tokens
from instep.data.text import ByteText
from instep.mesh.group import Group


def text_loss(model: nn.Module, windows: Tensor, *, device: torch.device, autocast: str) -> Tensor:
    """Mean cross-entropy in nats per byte of ``windows`` (B, T + 1)."""
    inputs, targets = next_tokens(windows)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast == "bf16"):
        logits = model(inputs.to(device))
    return F.cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())


def gather(values: Mapping[int, float], length: int, group: Group) -> list[float]:
    """The ``length`` values of all ranks by position; each is known to one rank. Collective.

    A sum in which all addends but one are zero is exact, whoever adds.
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
    """The mean, exactly rounded, so the same bits whoever computed which; nan if one is not finite."""
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    text: ByteText,
    group: Group,
    *,
    num_windows: int,
    micro_size: int,
    device: torch.device,
    autocast: str,
    before_gather: Callable[[], None] = lambda: None,
) -> float:
    """Mean loss over ``num_windows`` windows at even distances through ``text``. Collective.

    Ranks take turns at micro-batches; the result does not depend on how many they are.
    """
    num_windows = min(num_windows, len(text))
    chosen = [i * len(text) // num_windows for i in range(num_windows)]
    batches = [chosen[i : i + micro_size] for i in range(0, num_windows, micro_size)]
    was_training = model.training
    model.eval()
    sums = {
        i: text_loss(model, text.windows(batches[i]), device=device, autocast=autocast).item()
        * len(batches[i])
        for i in range(group.rank, len(batches), group.size)
    }
    model.train(was_training)
    before_gather()
    return math.fsum(gather(sums, len(batches), group)) / num_windows
