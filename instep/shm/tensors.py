"""From the tensors that callers pass to the flat memory that collectives work on, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.shm.call import DTYPES
from instep.shm.sums import reduction_name


def dtype_name(x: Tensor) -> str:
    """ "float32" and the like."""
    return str(x.dtype).removeprefix("torch.")


def check(x: Tensor) -> None:
    """Raise ``TypeError`` for a tensor that this backend cannot carry."""
    if x.device.type != "cpu":
        raise TypeError(f"shm: expected a tensor on the CPU, got one on {x.device}: use nccl")
    if dtype_name(x) not in DTYPES:
        raise TypeError(f"shm: dtype {x.dtype} is none of {', '.join(DTYPES[1:])}")


def reduction_of(x: Tensor, opts: Any) -> str:
    """The name of the reduction in ``opts``, by default a sum."""
    return reduction_name(opts.reduceOp if opts is not None else dist.ReduceOp.SUM, x.dtype)


def flat_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes."""
    return x.view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


@contextmanager
def contiguous(xs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """``xs``, with copies in place of those that are not contiguous; what the block writes gets into ``xs``."""
    copies = [x.detach() if x.is_contiguous() else x.detach().contiguous() for x in xs]
    yield copies
    for x, copied in zip(xs, copies, strict=True):
        if not x.is_contiguous():
            x.detach().copy_(copied)


def on_flat(x: Tensor, function: Callable[[Tensor], None]) -> Callable[[], None]:
    """``function`` of ``x`` as a flat tensor that it may write to."""

    def run() -> None:
        with contiguous([x]) as (copied,):
            function(copied.view(-1))

    return run


def split(x: Tensor, size: int, lengths: Sequence[int] = ()) -> list[Tensor]:
    """``x`` cut along its first dimension for ``size`` ranks: equal parts, or rows as ``lengths`` say.

    Raises:
        ValueError: it cannot be cut so, or not be written to in parts.
    """
    if lengths:
        if len(lengths) != size or sum(lengths) != x.shape[0]:
            raise ValueError(
                f"expected {size} splits that sum to {x.shape[0]} rows, got {list(lengths)}, sum {sum(lengths)}"
            )
        return list(x.split(list(lengths)))
    if x.numel() % size:
        raise ValueError(f"expected a number of elements that {size} ranks divide, got {x.numel()}")
    flat = x.reshape(-1) if not x.is_contiguous() else x.view(-1)
    return list(flat.view(size, -1))


def require_parts(parts: Sequence[Tensor], x: Tensor, size: int, kind: str) -> None:
    """Raise ``ValueError`` unless there is one part per rank, each with as many elements as ``x``."""
    if len(parts) != size:
        raise ValueError(f"expected {size} {kind} tensors, one per rank, got {len(parts)}")
    for i, part in enumerate(parts):
        if part.numel() != x.numel() or part.dtype != x.dtype:
            raise ValueError(
                f"{kind} tensor {i}: expected {x.numel()} elements of {x.dtype}, got {part.numel()} of {part.dtype}"
            )
