"""One batch per rank, as bytes: tensors in nested dicts, lists and tuples travel to the group's first rank.

Structure, dtypes and shapes go as JSON, values as one message of raw bytes; nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from instep.mesh.group import Group

SCALARS = (bool, int, float, str, type(None))
CONTAINERS = {"list": list, "tuple": tuple}


def pack(batch: Any) -> tuple[str, Tensor]:
    """``batch`` as JSON and a uint8 tensor on the CPU with the bytes of its tensors, one after the other.

    Raises:
        TypeError: something in it is neither a tensor, nor a container of them, nor what JSON can carry.
        ValueError: a tensor has no values or is not dense.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_described(batch, "batch", tensors))
    parts = [x.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1) for x in tensors]
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    return text, torch.cat([nothing, *(part.view(torch.uint8) for part in parts)])


def unpack(text: str, data: Tensor, device: torch.device) -> Any:
    """The batch that ``pack`` was given; its GPU tensors come to ``device``. Every tensor is a copy."""
    return _built(json.loads(text), _Reader(data), device)


def gather(text: str, data: Tensor, group: Group) -> list[tuple[str, Tensor]]:
    """What every rank has packed, in group order, on the first rank; nothing on the others. Collective."""
    operation = "the gathering of batches"
    lengths = group.all_gather_bytes(str(data.numel()).encode(), operation)
    texts = group.all_gather_bytes(text.encode(), operation)
    splits = [int(length) if group.rank == 0 else 0 for length in lengths]
    received = torch.empty(sum(splits), dtype=torch.uint8, device="cpu")
    group.all_to_all(received, data, splits, [data.numel()] + [0] * (group.size - 1), operation)
    if group.rank != 0:
        return []
    return [(text.decode(), part) for text, part in zip(texts, received.split(splits), strict=True)]


def _described(x: Any, where: str, tensors: list[Tensor]) -> dict[str, Any]:
    if isinstance(x, Tensor):
        if x.layout != torch.strided or x.is_meta or x.is_quantized or x.is_nested:
            raise ValueError(f"{where} is no dense tensor with values: convert it before verify()")
        tensors.append(x)
        dtype = str(x.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(x.shape), x.is_cuda, x.requires_grad and x.is_leaf]}
    if isinstance(x, Mapping):
        if odd := [key for key in x if not isinstance(key, str)]:
            raise TypeError(f"{where} has the key {odd[0]!r}: expected strings as keys")
        return {"dict": {key: _described(x[key], f"{where}[{key!r}]", tensors) for key in x}}
    for name, kind in CONTAINERS.items():
        if type(x) is kind:
            return {name: [_described(part, f"{where}[{i}]", tensors) for i, part in enumerate(x)]}
    if type(x) in SCALARS:
        return {"value": x}
    raise TypeError(
        f"{where} is a {type(x).__name__}: expected a tensor, a number, a string, None, or a dict, list or "
        "tuple of them, because verify() sends it to another process"
    )


class _Reader:
    """Takes tensors off the front of ``data``."""

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self._at = 0

    def next(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        part = self._data[self._at : self._at + nbytes].clone()  # of its own, so aligned for any dtype
        self._at += nbytes
        return part.view(dtype).view(shape)


def _built(entry: dict[str, Any], reader: _Reader, device: torch.device) -> Any:
    ((kind, content),) = entry.items()
    if kind == "value":
        return content
    if kind == "dict":
        return {key: _built(part, reader, device) for key, part in content.items()}
    if kind in CONTAINERS:
        return CONTAINERS[kind](_parts(content, reader, device))
    name, shape, on_gpu, requires_grad = content
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a rank sent a tensor of the unknown dtype {name!r}")
    x = reader.next(dtype, shape)
    return (x.to(device) if on_gpu else x).requires_grad_(requires_grad)


def _parts(entries: list[dict[str, Any]], reader: _Reader, device: torch.device) -> Iterator[Any]:
    return (_built(entry, reader, device) for entry in entries)
