"""What a module keeps beside its parameters and buffers: extra state, and what its hooks add to a state dict.

It is loaded by torch's own protocol, ``set_extra_state`` and hooks, and is stored unhashed:

    a tensor               "model:0._extra_state"
    any other data         "model:0._extra_state.json", bytes, and its tensors "model:0._extra_state/amax"
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from instep.checkpoint.listed import modules
from instep.checkpoint.manifest import canonical, parse_json, require_json
from instep.errors import CheckpointRejected
from instep.hook import Hook
from instep.state.objects import put_together, take_apart, tensors_of

JSON = ".json"
MAX_BYTES = 1 << 24
EXTRA = ("get_extra_state", "set_extra_state", "_save_to_state_dict", "state_dict")
LOADING = ("_load_from_state_dict", "load_state_dict")


def keeps_state(module: nn.Module) -> bool:
    """Whether some module in it has a part of torch's protocol of its own."""
    return any(_overrides(m, EXTRA) or _hooks(m._state_dict_hooks) for m in modules(module)) or loads(module)


def loads(module: nn.Module) -> bool:
    """Whether code of some module in it runs on loading, which may read weights."""
    return any(
        _overrides(m, LOADING)
        or _hooks(m._load_state_dict_pre_hooks)
        or _hooks(m._load_state_dict_post_hooks)
        for m in modules(module)
    )


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict carries, in registration order."""
    found = list(module.named_buffers())
    kept = set(map(id, module.state_dict(keep_vars=True).values())) if found else ()
    return {name: b for name, b in found if id(b) in kept}


def divided(module: nn.Module, away: Collection[int] = ()) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Its parameters and buffers themselves, by all names, also those that hooks give them; and what it keeps
    beside. ValueError if the parameters that are ``away``, by their identity, are changed by a hook."""
    given = module.state_dict(keep_vars=True)
    own = dict(module.named_parameters()) | buffers(module)
    known, kept = set(map(id, own.values())), set(map(id, given.values()))
    for name, p in own.items():
        if id(p) in away and id(p) not in kept:
            raise ValueError(
                f"a state dict hook leaves out or changes {name!r}, of which this rank has a part: let it "
                "only rename parameters, or train the model replicated, with DataParallel"
            )
    beside = {name: x for name, x in given.items() if id(x) not in known}
    return own | {name: x for name, x in given.items() if name not in beside}, beside


def to_tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """What is stored of ``values``; ValueError for what is neither data nor a tensor."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        body, tensors = take_apart(name, value)
        found |= tensors
        if set(tensors) != {name}:
            found[name + JSON] = torch.frombuffer(bytearray(canonical(body)), dtype=torch.uint8)
    return found


def names_of(value: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` under which ``value`` is stored."""
    return [name for name in names if name in (value, value + JSON) or name.startswith(f"{value}/")]


def from_tensors(value: str, stored: Mapping[str, Tensor], device: torch.device) -> Any:
    """The inverse of ``to_tensors``, with tensors of another kind of device on ``device``.

    Raises:
        CheckpointRejected: ``to_tensors`` did not make this.
    """
    if value in stored:
        return stored[value].to(device)
    try:
        body = parse_json(stored[value + JSON].numpy().tobytes(), MAX_BYTES)
        require_json(value, body)  # which bounds its depth
    except ValueError as error:
        raise CheckpointRejected(f"{value[:80]}: {error}: take another checkpoint") from error
    kinds = dict(tensors_of(body))
    there = {name: x.to(device) if kinds.get(name) == device.type else x for name, x in stored.items()}
    return put_together(value, body, there)


def _overrides(module: nn.Module, names: Iterable[str]) -> bool:
    found = (getattr(type(module), name) for name in names)
    return any(not x.__module__.startswith("torch.nn.modules.") for x in found)  # batch norm reads versions


def _hooks(hooks: Mapping[int, Any]) -> bool:
    return any(not isinstance(getattr(hook, "hook", hook), Hook) for hook in hooks.values())
