"""A batch as bytes, for other ranks: structure and shapes as JSON, values raw. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.memory import as_bytes

SCALARS = (bool, int, float, str, type(None))


def pack(batch: Any) -> tuple[str, Tensor]:
    """``batch`` as JSON and a uint8 tensor on the CPU with the bytes of its tensors, one after the other.

    Raises:
        TypeError: a part is neither a tensor, nor a container of them, nor what JSON can carry.
        ValueError: a tensor has no values or is not dense.
    """
    leaves: list[tuple[str, Any]] = []
    structure = _structure(batch, "batch", leaves)
    forms: list[Any] = []
    parts = [torch.empty(0, dtype=torch.uint8, device="cpu")]
    for where, x in leaves:
        if type(x) in SCALARS:
            forms.append(x)
            continue
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{where} is a {type(x).__name__}: expected a tensor, a number, a string, None, or a dict, "
                "list or tuple of them, because verify() sends it to all ranks"
            )
        if x.layout != torch.strided or x.is_meta or x.is_quantized or x.is_nested:
            raise ValueError(f"{where} is no dense tensor with values: convert it before verify()")
        name = str(x.dtype).removeprefix("torch.")
        forms.append([name, list(x.shape), x.is_cuda, x.requires_grad and x.is_leaf])
        parts.append(as_bytes(x.detach().cpu().resolve_conj().resolve_neg()))
    return json.dumps([structure, forms]), torch.cat(parts)


def unpack(text: str, data: Tensor, device: torch.device) -> Any:
    """The batch that ``pack`` was given; its GPU tensors go to ``device``. Every tensor is a copy."""
    structure, forms = json.loads(text)
    leaves, at = [], 0
    for form in forms:
        if not isinstance(form, list):
            leaves.append(form)
            continue
        name, shape, on_gpu, requires_grad = form
        dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        x = data[at : at + size].clone().view(dtype).view(shape)  # a copy is aligned for any dtype
        leaves.append((x.to(device) if on_gpu else x).requires_grad_(requires_grad))
        at += size
    return _built(structure, leaves)


def _structure(x: Any, where: str, leaves: list[tuple[str, Any]]) -> Any:
    """``x`` for JSON, with the number of each of its ``leaves`` in their place."""
    if isinstance(x, Mapping):
        if odd := [key for key in x if not isinstance(key, str)]:
            raise TypeError(f"{where} has the key {odd[0]!r}: expected strings as keys")
        return {key: _structure(x[key], f"{where}[{key!r}]", leaves) for key in x}
    if type(x) in (list, tuple):
        return [type(x).__name__, *(_structure(part, f"{where}[{i}]", leaves) for i, part in enumerate(x))]
    leaves.append((where, x))
    return len(leaves) - 1


def _built(entry: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(entry, int):
        return leaves[entry]
    if isinstance(entry, dict):
        return {key: _built(part, leaves) for key, part in entry.items()}
    kind, *parts = entry
    return (tuple if kind == "tuple" else list)(_built(part, leaves) for part in parts)
