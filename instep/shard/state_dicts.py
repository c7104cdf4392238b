"""``state_dict`` of a sharded module: refused, unless its parameters are whole.

A state dict of shards would be saved by one rank and be taken for the model. ``keep_vars=True`` gives the
parameters themselves, whose shapes say what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from instep.hook import Hook
from instep.shard.unit import Unit

HOW = (
    "call it on every rank inside `with instep.gathered(model):`, take instep.full_state_dict(model), or use "
    "instep.save and instep.load"
)


def state_dict_hooks(module: nn.Module, units: Sequence[Unit]) -> list[Any]:
    """Hooks on ``module`` and all in it, which refuse state dicts while parameters are shards."""
    by_parameter = {id(p): unit for unit in units for p in unit.parameters}
    hooks: list[Any] = []
    for m in module.modules():
        own = [
            (key, by_parameter[id(p)])
            for key, p in m._parameters.items()
            if p is not None and id(p) in by_parameter
        ]
        if own:
            hooks.append(m.register_state_dict_post_hook(Hook(partial(_refuse_state_dict, own))))
            hooks.append(m.register_load_state_dict_pre_hook(Hook(partial(_refuse_load, own))))
    return hooks


def _refuse_state_dict(
    own: Sequence[tuple[str, Unit]], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for key, unit in own:
        p = module._parameters[key]
        if not unit.is_made_whole and state.get(prefix + key, p) is not p:
            raise RuntimeError(f"state_dict(): parameter {prefix + key!r} is this rank's shard: {HOW}")


def _refuse_load(
    own: Sequence[tuple[str, Unit]], module: nn.Module, state: Mapping[str, Any], prefix: str, *others: Any
) -> None:
    for key, unit in own:
        p = module._parameters[key]
        if not unit.is_made_whole and state.get(prefix + key, p) is not p:
            raise RuntimeError(f"load_state_dict(): parameter {prefix + key!r} is this rank's shard: {HOW}")
