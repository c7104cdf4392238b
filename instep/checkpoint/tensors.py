"""One file of named tensors: safetensors, with ties written once and nothing read that was not announced.

A tensor that several names share (weight tying) is written under its first name; the other names stand in the
file's metadata as ``alias -> first name``, the convention of ``safetensors.torch.save_model``. Tensors that
overlap in any other way, or are not contiguous, are written as copies of their own.

A file from elsewhere is bounded before it is parsed: the first eight bytes are a length that anyone may have
written. Names, shapes and dtypes are compared with what the caller expects before memory is allocated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from instep.checkpoint.files import opened
from instep.checkpoint.manifest import parse_json
from instep.errors import CheckpointRejected
from instep.state.shards import Shape
from instep.state.stored import CODES, MAX_DIMS, MAX_ELEMENTS, is_bounded

Layout: TypeAlias = Mapping[str, tuple[Shape, torch.dtype]]

MAX_HEADER_BYTES = 16 << 20  # the format allows 100 MB, more than the names of any model
MAX_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Contents:
    """What a file holds: ``layout`` of the tensors in it, ``ties`` from further names to those."""

    layout: dict[str, tuple[Shape, torch.dtype]]
    ties: dict[str, str]


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` to the new file ``path``; OSError with the path if the system refuses."""
    require_writable(tensors)
    firsts, ties = split_ties(tensors)
    try:
        save_file(_separate(firsts), path, metadata={"format": "pt", **ties})
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise ValueError(f"{path}: {error}") from error
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def require_writable(tensors: Mapping[str, Tensor]) -> None:
    """TypeError or ValueError, with the name, for what a file cannot hold."""
    for name, tensor in tensors.items():
        _require_writable(name, tensor)


def _require_writable(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}: put it into extra as JSON")
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else tensor.layout
        raise ValueError(f"{name}: expected a dense tensor with values, got a {kind} tensor")
    if tensor.dtype not in CODES.values():
        raise ValueError(f"{name}: safetensors has no {tensor.dtype}: convert it before saving")
    if name == "__metadata__":
        raise ValueError("'__metadata__' is reserved in a safetensors file: rename the tensor")


def split_ties(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each distinct tensor, detached, under its first name, and the further names it goes by."""
    seen: dict[tuple[object, ...], str] = {}
    firsts: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        values = tensor.detach().resolve_conj().resolve_neg()  # lazy views share bytes, not values
        key = (values.device, values.data_ptr(), values.dtype, values.shape, values.stride())
        if values.numel() and key in seen:
            ties[name] = seen[key]
        else:
            firsts[name] = values
            seen[key] = name
    return firsts, ties


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors of which no two share a byte; copies only where that needs one."""
    result = {name: tensor.contiguous() for name, tensor in tensors.items()}
    ends: dict[torch.device, int] = {}
    for name in sorted(result, key=lambda name: result[name].data_ptr()):
        tensor = result[name]
        if tensor.data_ptr() < ends.get(tensor.device, 0):
            result[name] = tensor.clone()
        else:
            ends[tensor.device] = tensor.data_ptr() + tensor.nbytes
    return result


def contents(path: Path) -> Contents:
    """Names, shapes and dtypes of a file, without its values; CheckpointRejected if it is not sound."""
    try:
        header = bounded_header(path)
        with safe_open(path, framework="pt", backend="pread") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            layout = {
                name: (_shape(name, s.get_shape()), _dtype(name, s.get_dtype())) for name, s in slices.items()
            }
            metadata = file.metadata() or {}
        parse_json(header, MAX_HEADER_BYTES)  # of two tensors with one name the reader above takes the last
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointRejected(f"{path}: {error}: take another checkpoint") from error
    return Contents(layout, {name: first for name, first in metadata.items() if first in layout})


def bounded_header(path: Path) -> bytes:
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"expected a header of at most {MAX_HEADER_BYTES} bytes in a file of {size}, "
                f"got one of {length}"
            )
        return file.read(length)


def _shape(name: str, sizes: list[int]) -> Shape:
    if not is_bounded(sizes):
        limits = f"at most {MAX_DIMS} dimensions and {MAX_ELEMENTS} elements"
        raise ValueError(f"{name}: expected {limits}, got {str(sizes)[:80]}")
    return tuple(sizes)


def _dtype(name: str, code: str) -> torch.dtype:
    if code not in CODES:
        raise ValueError(f"{name}: expected a dtype among {', '.join(CODES)}, got {code}")
    return CODES[code]


def require_layout(found: Layout, expected: Layout, firsts: Mapping[str, str] | None = None) -> None:
    """CheckpointRejected unless ``found``, what is there, is what was ``expected``: names, shapes, dtypes.

    ``firsts`` are the names in ``found`` of tensors that have another one there, as ties have.
    """
    there = {name: (firsts or {}).get(name, name) for name in expected}
    missing = [name for name in expected if there[name] not in found]
    unknown = sorted(found.keys() - there.values())
    fix = "build the model that the checkpoint was made with"
    if missing or unknown:
        parts = [f"missing {_some(missing)}"] * bool(missing) + [f"unknown {_some(unknown)}"] * bool(unknown)
        if any("_orig_mod." in name for name in (*missing, *unknown)):
            fix = "compile with block.compile(), which keeps the names"
        raise CheckpointRejected(
            f"expected {len(set(there.values()))} tensors, got {len(found)}: {'; '.join(parts)}: {fix}"
        )
    wrong = [
        f"{name}: expected {_shown(layout)}, got {_shown(found[there[name]])}"
        for name, layout in expected.items()
        if found[there[name]] != (tuple(layout[0]), layout[1])
    ]
    if wrong:
        raise CheckpointRejected(f"{len(wrong)} tensors differ from the model's: {_some(wrong)}: {fix}")


def _shown(layout: tuple[Shape, torch.dtype]) -> str:
    shape, dtype = layout
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" * (len(names) > MAX_NAMES_SHOWN)
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
