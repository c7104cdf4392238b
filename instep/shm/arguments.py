"""Callers' tensors: checked, and as the flat bytes that collectives work on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from instep.memory import as_bytes


def is_plain(x: Tensor) -> bool:
    """Whether the memory of ``x`` is its elements in order."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


@contextmanager
def writable(xs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The bytes of each of ``xs``, (nbytes,); what the block writes there gets into ``xs``."""
    found = [as_bytes(x) for x in xs]
    yield found
    for x, data in zip(xs, found, strict=True):
        if not is_plain(x):
            x.detach().copy_(data.view(x.dtype).view(x.shape))


def require_equal(xs: Sequence[Tensor], count: int, numel: int, dtype: torch.dtype, kind: str) -> None:
    """Raise ``ValueError`` unless ``xs`` are ``count`` tensors of ``numel`` elements of ``dtype``."""
    found = [(x.numel(), x.dtype) for x in xs]
    if found != [(numel, dtype)] * count:
        odd = "; ".join(f"{n} of {name}" for n, name in dict.fromkeys(found))
        raise ValueError(f"{kind}: expected {count} x {numel} elements of {dtype}, got {len(xs)} x ({odd})")


def split_bytes(x: Tensor, size: int, lengths: Sequence[int]) -> list[int]:
    """Bytes of ``x`` for each of ``size`` ranks: equal parts, or ``lengths`` rows.

    Raises:
        ValueError: ``x`` cannot be divided so.
    """
    rows = x.shape[0] if x.dim() else 1
    if lengths and (len(lengths) != size or sum(lengths) != rows or min(lengths) < 0):
        raise ValueError(f"expected {size} splits that sum to {rows} rows, got {list(lengths)}")
    if not lengths and x.numel() % size:
        raise ValueError(f"expected a number of elements that {size} ranks divide, got {x.numel()}")
    return [x.nbytes * n // max(rows, 1) for n in lengths] or [x.nbytes // size] * size
