"""The value of an expression as tensors by name and JSON: to compare it, and to move it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.memory import as_bytes
from instep.notebook.folding import fold, span
from instep.notebook.wire import Tensors
from instep.state.hash import tensor_digest
from instep.state.homes import Wrapped, homes, offered
from instep.state.objects import take_apart

MAX_NAMED = 8  # tensors of a comparison, each with its place


def parts(value: Any) -> tuple[Any, Tensors]:
    """``value`` as JSON and live tensors: parameters and buffers of a module, the state of an optimizer.

    Raises:
        ValueError: it has something else.
    """
    module = _module_of(value)
    if is_divided(value):
        raise ValueError(
            "expected replicated parameters, got those of which each rank has a part: take "
            "instep.full_state_dict(model), on all ranks"
        )
    if isinstance(module, nn.Module):
        value = dict(sorted([*module.named_parameters(), *module.named_buffers()]))
    elif isinstance(value, Optimizer):
        value = value.state_dict()
    try:
        return take_apart("", value)
    except ValueError as error:
        raise ValueError(
            "expected a tensor, a module, an optimizer, or numbers, text, lists and dicts with tensors in "
            f"them, got {type(value).__name__}: {error}"
        ) from None


def is_divided(value: Any) -> bool:
    """Whether ``value`` is a module with parameters of which each rank has a part."""
    module = _module_of(value)
    if not isinstance(module, nn.Module):
        return False
    return any(there.group.size > 1 and not there.resident for there in homes(module.parameters()))


def _module_of(value: Any) -> Any:
    said = offered(value)
    return said.module if isinstance(said, Wrapped) else value


def digests(value: Any) -> dict[str, str]:
    """Of each tensor of ``value``, and of all else; all NaNs count as one."""
    body, tensors = parts(value)
    found = {name: tensor_digest(x).hex() for name, x in tensors.items()}
    if len(body if isinstance(body, dict) else [body]) != len(found) or not found:  # not tensors alone
        found["the values beside the tensors"] = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return found


def odd_names(by_rank: Mapping[int, Mapping[str, str]]) -> dict[str, list[list[int]]]:
    """The names of which ranks have different digests, each with the ranks that agree, the most first."""
    found = {}
    for name in dict.fromkeys(name for each in by_rank.values() for name in each):
        groups = [*fold({rank: each.get(name, "") for rank, each in by_rank.items()}).values()]
        if len(groups) > 1:
            found[name] = sorted(groups, key=len, reverse=True)
    return found


def difference(a: Tensor, b: Tensor) -> str:
    """Where two tensors of one name differ, in words."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{_kind(a)} against {_kind(b)}"
    unequal = (as_bytes(a).view(-1, a.itemsize) != as_bytes(b).view(-1, b.itemsize)).any(dim=1)
    first = int(unequal.nonzero()[0])
    place = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)]
    values = f"{a.flatten()[first].item()!r} against {b.flatten()[first].item()!r}"
    largest = (a.to(torch.complex128) - b.to(torch.complex128)).abs().max().item()
    count = f"{int(unequal.sum()):,} of {a.numel():,} elements"
    return f"{count} differ, first at {place} ({values}), by at most {largest:.3g}"


def named(groups: list[list[int]]) -> str:
    """ "ranks 0-2 | rank 3"."""
    return " | ".join(f"rank{'s' * (len(ranks) > 1)} {span(ranks)}" for ranks in groups)


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
