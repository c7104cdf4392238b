"""Adding (or multiplying, comparing, ...) what several ranks have, in the order of the ranks.

Rank 0's addend comes first, then rank 1's, and so on, whoever computes and however fast: the same bits on
every rank and in every run. Half-precision numbers are added in float32 and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Combine = Callable[[Tensor, Tensor, Tensor], object]

COMBINE: dict[str, Combine] = {
    "sum": lambda a, b, out: torch.add(a, b, out=out),
    "avg": lambda a, b, out: torch.add(a, b, out=out),
    "product": lambda a, b, out: torch.mul(a, b, out=out),
    "min": lambda a, b, out: torch.minimum(a, b, out=out),
    "max": lambda a, b, out: torch.maximum(a, b, out=out),
    "band": lambda a, b, out: torch.bitwise_and(a, b, out=out),
    "bor": lambda a, b, out: torch.bitwise_or(a, b, out=out),
    "bxor": lambda a, b, out: torch.bitwise_xor(a, b, out=out),
}
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_NAMES = {getattr(dist.ReduceOp, name.upper()): name for name in COMBINE}


def reduction_name(op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype) -> str:
    """The name of a torch reduction in ``COMBINE``.

    Raises:
        TypeError: it is none of these, or not defined for ``dtype``.
    """
    name = next((name for known, name in _NAMES.items() if op == known), None)
    if name is None:
        raise TypeError(f"shm: expected a reduction out of {', '.join(COMBINE)}, got {op}")
    if name in ("band", "bor", "bxor") and (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"shm: {name} is defined for integers and bool, got {dtype}")
    if name in ("min", "max") and dtype.is_complex:
        raise TypeError(f"shm: complex numbers have no {name}")
    if name == "avg" and dtype is torch.bool:
        raise TypeError("shm: the average of bool is not a bool")
    return name


def combine(parts: Sequence[Tensor], name: str, out: Tensor) -> None:
    """``out`` = parts[0] o parts[1] o ..., all of one shape (n,) and dtype; ``out`` may be one of them."""
    wide = WIDER.get(out.dtype)
    if len(parts) == 1 or wide is None:
        _fold(parts, name, out)
        return
    total = parts[0].to(wide)
    _fold([total, *(part.to(wide) for part in parts[1:])], name, total)
    out.copy_(total)


def _fold(parts: Sequence[Tensor], name: str, out: Tensor) -> None:
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    function = COMBINE[name]
    # The first addend may be overwritten, but no later one before it has been read.
    total = out if all(out.data_ptr() != part.data_ptr() for part in parts[2:]) else torch.empty_like(out)
    function(parts[0], parts[1], total)
    for part in parts[2:]:
        function(total, part, total)
    if name == "avg":
        mean(total, len(parts))
    if total is not out:
        out.copy_(total)


def mean(total: Tensor, count: int) -> None:
    """Divide a sum of ``count`` addends; integers are cut off towards zero."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.div_(count)
    else:
        total.div_(count, rounding_mode="trunc")
