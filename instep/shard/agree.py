"""Do all ranks mean the same? Asked before anything changes, so that all raise or none does.

A rank whose optimizer had its parameters in another order would write its new values over those of other
parameters, and one with another learning rate would use it for its slice alone; nothing later could tell.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from instep.mesh.exits import as_told
from instep.mesh.group import Group
from instep.shard import claims

T = TypeVar("T")


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What ``function`` returns, or what it raises, for ``agree``."""
    try:
        return function(), None
    except Exception as problem:
        return None, problem


def agree(problem: Exception | None, lines: Sequence[str], group: Group, operation: str) -> None:
    """Go on if no rank has a ``problem`` and all have the same ``lines``. Collective.

    Raises:
        ValueError: on all ranks; this rank's ``problem``, another's, or the first line that differs.
    """
    text = json.dumps(list(lines)).encode()
    mine = {
        "digest": hashlib.sha256(text).hexdigest(),
        "problem": "" if problem is None else str(problem)[:1000],
    }
    if problem is not None:
        mine["problem"] = mine["problem"] or type(problem).__name__
    rows = [json.loads(row) for row in group.all_gather_bytes(json.dumps(mine).encode(), operation)]
    if problem is not None:
        raise problem
    for rank, row in zip(group.ranks, rows, strict=True):
        if row["problem"]:
            raise as_told(ValueError(f"rank {rank}: {row['problem']}"))
    if len({row["digest"] for row in rows}) > 1:
        everybody = group.all_gather_bytes(text, f"{operation}, line by line")
        difference = _first_difference([json.loads(data) for data in everybody], group.ranks)
        raise ValueError(f"the ranks differ in {operation.removeprefix('the comparison of ')}: {difference}")


def _first_difference(by_rank: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    for lines in zip_longest(*by_rank, fillvalue="nothing more"):
        for rank, line in zip(ranks, lines, strict=True):
            if line != lines[0]:
                return f"{lines[0]} on rank {ranks[0]}, but {line} on rank {rank}"
    return "in nothing that can be shown"


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
