"""The input of each rank of a collective: every rank can draw them all, and so knows the result alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from instep.comm.schedule import edges
from instep.net.messages import Messages

# Fewer elements than ranks, none, one, not divisible, divisible by all sizes up to six.
NUM_ELEMENTS = (0, 1, 2, 5, 7, 13, 60)


def drawn(rank: int, num_elements: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Numbers of magnitudes that make the order of a floating-point sum visible."""
    random = torch.Generator().manual_seed(1000 * seed + 10 * num_elements + rank)
    if dtype == torch.bool:
        return torch.rand(num_elements, generator=random) < 0.3
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 20, (num_elements,), generator=random).to(dtype)
    exponents = torch.rand(num_elements, generator=random, dtype=torch.float64) * 4 - 2
    real = torch.float64 if not dtype.is_complex else torch.complex128
    return (torch.randn(num_elements, generator=random, dtype=real) * 10**exponents).to(dtype)


def everybodys(size: int, num_elements: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [drawn(rank, num_elements, dtype) for rank in range(size)]


def cut(x: Tensor, parts: int) -> list[Tensor]:
    return [x[lo:hi] for lo, hi in pairwise(edges(len(x), parts))]


def bits(x: Tensor) -> bytes:
    """The memory of ``x``; numpy does not know bfloat16."""
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


class CountingMessages(Messages):
    """Counts what this rank sends."""

    num_messages = bytes_sent = 0

    def together(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        super().together(sends, receives)
        self.num_messages += sum(x.numel() > 0 for x, _ in sends)
        self.bytes_sent += sum(x.nbytes for x, _ in sends)
