"""What ranks put into collectives, and what has to come out, computed by numpy in the order of the ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
MOVED = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128)
REDUCTIONS: dict[str, Any] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def op(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def defined(name: str, dtype: torch.dtype) -> bool:
    """Whether gloo, which is the measure, or arithmetic knows this reduction of this dtype."""
    if dtype is torch.bool:
        return name in ("min", "max", "band", "bor", "bxor")
    return not (dtype.is_floating_point and name.startswith("b"))


def values(rank: int, length: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """(length,) numbers of ``rank``, of mixed magnitudes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 256, (length,), generator=generator).to(dtype)
    # Powers that keep every sum, product and average of five finite in float16.
    scales = torch.randint(-6, 2, (length,), generator=generator)
    x = torch.randn(length, generator=generator, dtype=torch.float64) * 2.0**scales
    return x.to(dtype)


def reduced(parts: Sequence[Tensor], name: str) -> Tensor:
    """The reduction of ``parts``, one after the other; half-precision numbers in float32, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    arrays = [part.to(wide).numpy() for part in parts]
    total = functools.reduce(REDUCTIONS[name], arrays)
    if name == "avg" and len(parts) > 1:
        total = total / total.dtype.type(len(parts)) if wide.is_floating_point else _cut(total, len(parts))
    return torch.from_numpy(np.asarray(total, dtype=arrays[0].dtype)).to(dtype)


def _cut(total: Any, count: int) -> Any:
    """Divide integers, cutting off towards zero."""
    wide = total.astype(object)
    return np.array([int(abs(t) // count * (1 if t >= 0 else -1)) for t in wide.flat], dtype=total.dtype)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Equal in dtype, shape and every bit, NaNs and signed zeros included."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    return found.numel() == 0 or bytes_of(found) == bytes_of(expected)


def bytes_of(x: Tensor) -> bytes:
    return (
        torch.empty(x.numel(), dtype=x.dtype)
        .copy_(x.detach().reshape(-1))
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )
