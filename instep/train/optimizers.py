"""Optimizers with their implementation spelled out, and the learning rate of a step.

torch chooses between a loop, foreach and fused by device and version, and they differ in the last bit. The
fused AdamW and the SGD loop give the same bits for a parameter however it is sliced, so among however many
ranks the update is divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep.mesh.mesh import Mesh
from instep.ordered.homes import offered
from instep.shard.optimizer import ShardedOptimizer
from instep.train.run_config import OptimConfig


def make_optimizer(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> Optimizer:
    """The optimizer that ``optim`` names. Vectors (norms, biases) are not decayed."""
    kind, groups, options = _named(parameters, optim)
    made: Optimizer = kind(groups, **options)
    return made


def make_sharded(
    parameters: Iterable[nn.Parameter], optim: OptimConfig, ranks: Mesh, *, one_copy: bool = False
) -> ShardedOptimizer:
    """The same, with its state and its update divided among ``ranks``. Collective."""
    kind, groups, options = _named(parameters, optim)
    return ShardedOptimizer(groups, kind, ranks, one_copy=one_copy, **options)


def forget(optimizer: Optimizer) -> None:
    """As before its first step; on this rank alone, where its state is divided."""
    divided = offered(optimizer)
    (optimizer if divided is None else divided.local).state.clear()


def learning_rate(optim: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of ``step``, counted from 0: linear warm-up, then a cosine down to ``min_lr_ratio``."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    progress = (step - optim.warmup_steps) / max(num_steps - 1 - optim.warmup_steps, 1)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * cosine)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Use ``rate`` in all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _named(
    parameters: Iterable[nn.Parameter], optim: OptimConfig
) -> tuple[type[Optimizer], list[dict[str, Any]], dict[str, Any]]:
    """Class, groups of parameters, and options."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if optim.name == "adamw":
        return (
            torch.optim.AdamW,
            groups,
            {"lr": optim.lr, "betas": optim.betas, "fused": True, "foreach": False},
        )
    return (
        torch.optim.SGD,
        groups,
        {"lr": optim.lr, "momentum": optim.momentum, "foreach": False, "fused": False},
    )
