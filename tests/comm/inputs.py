"""What each rank puts into a collective: every rank can draw everybody's, so it knows the result alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from instep.comm.messages import Messages, lengths

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
    return list(x.split(lengths(len(x), parts)))


def bits(x: Tensor) -> bytes:
    """The memory of ``x``; numpy does not know bfloat16."""
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def about(found: Tensor, expected: Tensor, addends: Sequence[Tensor]) -> bool:
    """Whether ``found`` is the sum up to its rounding, in whatever order."""
    if not found.is_floating_point() and not found.is_complex():
        return torch.equal(found, expected)
    size = sum((x.abs().double() for x in addends), torch.zeros(found.shape, dtype=torch.float64))
    error = (found.to(torch.complex128) - expected.to(torch.complex128)).abs()
    return bool((error <= 2 * len(addends) * torch.finfo(found.dtype).eps * size).all())


def counted(messages: Messages, operation: Callable[[], None]) -> tuple[int, int]:
    """How many messages and bytes this rank sends in ``operation``."""
    before = messages.num_messages, messages.bytes_sent
    operation()
    return messages.num_messages - before[0], messages.bytes_sent - before[1]
