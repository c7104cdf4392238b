"""Which optimizers step each element by itself, so that a part of a parameter gets the bits of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

# These classes themselves: a subclass may do anything.
ELEMENTWISE = frozenset({SGD, Adam, AdamW, NAdam, RAdam, Adagrad, Adadelta, Adamax, RMSprop, Rprop, ASGD})


def rounds_by_cut(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the bits of an elementwise step depend on how parameters are cut.

    At the end of each thread's part, torch's loops round some numbers of two bytes in another way than in
    vectors, and where these ends are depends on how long a tensor is. Fused optimizers round all alike.
    """
    loops = (p for group in groups if not group.get("fused") for p in group["params"])
    return torch.get_num_threads() > 1 and any(p.itemsize == 2 and p.is_cpu for p in loops)


def why_not_on_boxes(optimizer: Optimizer) -> str | None:
    """Why ``optimizer`` cannot step a rank's part of layers that are cut; None if it can."""
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        return f"is cut over ranks, and {kind.__name__} may look at whole parameters: use AdamW or SGD"
    if rounds_by_cut(optimizer.param_groups):
        return "is cut over ranks, and of 2 bytes per element, rounded by the cut: pass fused=True"
    return None
