"""The update of this rank's pieces, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from instep.shard.saved import options
from instep.shard.shards import Shards


def step_pieces(shards: Shards, local: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """``local`` steps the pieces of ``shards``, with the options that ``groups`` have now."""
    for group, own in zip(groups, local.param_groups, strict=True):
        own.update(options(group))
    try:
        shards.set_gradients()
        with torch.no_grad():
            local.step()
    finally:
        shards.drop_gradients()
    for group, own in zip(groups, local.param_groups, strict=True):
        group.update(options(own))  # some count or adapt there
