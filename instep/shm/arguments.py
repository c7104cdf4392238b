"""What callers pass: checked, and as the flat memory that collectives work on, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from instep.memory import flat
from instep.shm.call import DTYPES

_NAMES = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}


def dtype_name(x: Tensor) -> str:
    """ "float32" and the like."""
    return _NAMES.get(x.dtype) or str(x.dtype).removeprefix("torch.")


def check(x: Tensor) -> None:
    """Raise ``TypeError`` for a tensor that this backend cannot carry."""
    if x.device.type != "cpu":
        raise TypeError(f"shm: expected a tensor on the CPU, got one on {x.device}: use nccl")
    if x.dtype not in _NAMES:
        raise TypeError(
            f"shm: expected one of {', '.join(DTYPES[1:])}, got {x.dtype}: view it as one of these"
        )


def require_writable(x: Tensor) -> None:
    """Raise ``ValueError`` for an expanded tensor: several of its elements are one place in memory."""
    if x.layout is not torch.strided or x.is_contiguous():
        return
    if any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"shape {tuple(x.shape)} is expanded, strides {x.stride()}: pass x.contiguous()")


def flat_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes, (nbytes,)."""
    return flat(x).view(torch.uint8)


def is_plain(x: Tensor) -> bool:
    """Whether the memory of ``x`` is its elements in order."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def plain(x: Tensor) -> Tensor:
    """``x`` without a graph, as memory in the order of its elements: itself where it is that, else a copy."""
    return x.detach().resolve_conj().resolve_neg().contiguous()


@contextmanager
def writable(xs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """``xs`` as plain memory; what the block writes there gets into ``xs``."""
    copies = [plain(x) for x in xs]
    yield copies
    for x, copied in zip(xs, copies, strict=True):
        if not is_plain(x):
            x.detach().copy_(copied)


def on_flat(x: Tensor, function: Callable[[Tensor], None]) -> Callable[[], None]:
    """``function`` of ``x`` as a flat tensor that it may write to."""

    def run() -> None:
        if is_plain(x):
            function(flat(x.detach()))
            return
        with writable([x]) as (copied,):
            function(flat(copied))

    return run


def split(x: Tensor, size: int, lengths: Sequence[int] = ()) -> list[Tensor]:
    """Plain memory, cut along its first dimension for ``size`` ranks: equally, or as ``lengths`` say."""
    return list(x.split(list(lengths))) if lengths else list(x.view(size, -1))


def require_splits(x: Tensor, size: int, lengths: Sequence[int] = ()) -> None:
    """Raise ``ValueError`` for what ``split`` cannot cut."""
    rows = x.shape[0] if x.dim() else 1
    if lengths and (len(lengths) != size or sum(lengths) != rows or min(lengths) < 0):
        raise ValueError(f"expected {size} splits that sum to {rows} rows, got {list(lengths)}")
    if not lengths and x.numel() % size:
        raise ValueError(f"expected a number of elements that {size} ranks divide, got {x.numel()}")


def require_list(xs: Sequence[Tensor], size: int, kind: str) -> None:
    """Raise unless there is one tensor per rank that this backend carries, all of one dtype."""
    if len(xs) != size:
        raise ValueError(f"expected {size} {kind} tensors, one per rank, got {len(xs)}")
    for i, x in enumerate(xs):
        check(x)
        if x.dtype != xs[0].dtype:
            raise ValueError(f"{kind} tensor {i}: expected {xs[0].dtype} as the first one, got {x.dtype}")


def require_parts(parts: Sequence[Tensor], x: Tensor, size: int, kind: str) -> None:
    """Raise ``ValueError`` unless there is one part per rank, each with as many elements as ``x``."""
    require_list(parts, size, kind)
    for i, part in enumerate(parts):
        if part.numel() != x.numel() or part.dtype != x.dtype:
            raise ValueError(
                f"{kind} tensor {i}: expected {x.numel()} elements of {x.dtype}, "
                f"got {part.numel()} of {part.dtype}"
            )


def tensors_in(xs: Any) -> Iterator[Tensor]:
    """The tensors in lists of tensors, or of lists of them."""
    for x in xs:
        if isinstance(x, Tensor):
            yield x
        else:
            yield from tensors_in(x)
