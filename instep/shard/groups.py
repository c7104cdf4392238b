"""Parameter groups as lines of text, which ranks compare before they make an optimizer of them.

A rank whose optimizer had its parameters in another order would write its new values over those of other
parameters, and one with another learning rate would use it for its slice alone; nothing later could tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.shard import claims


def describe(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Parameter groups as lines."""
    return [line for i, group in enumerate(groups) for line in describe_group(i, group)]


def describe_group(index: int, group: Mapping[str, Any]) -> list[str]:
    """A parameter group as lines: its options, then each parameter."""
    lines = [f"parameter group {index}: {options_text(group)}"]
    names = group.get("param_names") or [""] * len(group["params"])
    for k, (name, p) in enumerate(zip(names, group["params"], strict=True)):
        called = f" {name!r}" if name else ""
        kind = "trainable" if p.requires_grad else "frozen"
        dtype = str(p.dtype).removeprefix("torch.")
        lines.append(
            f"parameter {k} of group {index}{called}: shape {tuple(p.shape)}, {dtype}, {p.device.type}, "
            f"{_layout(p)}, {kind}"
        )
    return lines


def _layout(p: Tensor) -> str:
    home = claims.home(p)
    if home is None:
        return f"strides {tuple(p.stride())}"
    return f"strides {tuple(home.strides_of(p))}, divided by fully_shard"


def class_name(kind: object) -> str:
    """Where a class is found; what else it is, if it is none."""
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else f"a {type(kind).__name__}"


def options_text(options: Mapping[str, Any]) -> str:
    """All options but the parameters, the same text for the same values."""
    own = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    return ", ".join(f"{key}={_plain(own[key])}" for key in sorted(own))


def _plain(value: object) -> str:
    if isinstance(value, Tensor):  # one on an accelerator would have to be waited for
        return repr(value.tolist()) if value.device.type == "cpu" else f"a tensor on {value.device.type}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype):
        return repr(value)
    return f"a {type(value).__name__}"  # whose repr may have an address in it
