"""Contestants of which each rank holds less: they move their weights, so each has weights of its own.

    stage1             ``DataParallel`` and ``ShardedOptimizer``: the optimizer's state in slices
    stage2, stage3     ``fully_shard``: the gradients too, the weights too
    ...-one-copy       the ranks of a host have the same memory of the weights

They begin with the values that all contestants have, and in stage 3 no rank is given all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.ordered.keys import initialize
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer

SEED = 0  # of the weights of all contestants


@dataclass(frozen=True)
class Kind:
    """What is divided, and whether weights that are not are there once per host."""

    stage: int
    one_copy: bool = False

    @property
    def label(self) -> str:
        return f"stage {self.stage}{', one copy' if self.one_copy else ''}"


KINDS: Mapping[str, Kind] = {
    "stage1": Kind(1),
    "stage1-one-copy": Kind(1, one_copy=True),
    "stage2": Kind(2),
    "stage2-one-copy": Kind(2, one_copy=True),
    "stage3": Kind(3),
}


def whole(config: GPTConfig) -> nn.Module:
    """A model with the first values."""
    module = GPT(config)
    initialize(module, SEED)
    return module


def shard(
    kind: Kind,
    config: GPTConfig,
    group: ProcessGroup,
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
) -> tuple[Any, ShardedOptimizer]:
    """A model of its own and its optimizer, divided among the ranks of ``group``. Collective."""
    if kind.stage == 3:
        with torch.device("meta"):
            module: nn.Module = GPT(config)
        model: Any = fully_shard(module, group, stage=3)
        model.materialise(seed=SEED)
    elif kind.stage == 2:
        model = fully_shard(whole(config), group, stage=2, one_copy=kind.one_copy)
    else:
        model = DataParallel(whole(config), process_group=group, init_sync=False)
    one_copy = kind.one_copy and kind.stage == 1
    return model, ShardedOptimizer(model.parameters(), optimizer, group, one_copy=one_copy, **options)
