"""A collective with its buffers: filled with numbers whose sums are exact, compared with what must come out.

Element i of rank r's message is (i mod 7) + 8 r, so that every sum is a small integer, which float32 holds
exactly in any order of adding; no tolerance is needed, and a number that came from a wrong place shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from instep.bench.bandwidth import IN_PARTS, whole_count

Allocate = Callable[[int], Tensor]  # elements -> flat float32 tensor

ROOT = 0
BLOCK = 1 << 20  # elements that are made or compared at a time, so that a check needs no memory to speak of


def private(num_elements: int) -> Tensor:
    """Ordinary memory."""
    return torch.zeros(num_elements)


class Case:
    """Rank ``rank``'s buffers for ``collective`` on messages of ``num_elements`` in all, of W ranks.

    ``x`` is what it sends, ``out`` what it receives: the same tensor where the operation is in place.
    ``x_parts`` and ``out_parts`` are the same memory in W equal parts, None where it has no parts.
    """

    def __init__(
        self, collective: str, size_bytes: int, rank: int, num_ranks: int, allocate: Allocate = private
    ) -> None:
        self.collective = collective
        self.rank, self.num_ranks = rank, num_ranks
        self.num_elements = whole_count(size_bytes, num_ranks)
        self.part = self.num_elements // num_ranks
        whole_in, whole_out = (
            collective not in ("all_gather", "gather"),
            collective not in ("reduce_scatter",),
        )
        if collective == "scatter":
            whole_out = False
        self.x = allocate(self.num_elements if whole_in else self.part)
        in_place = collective in ("all_reduce", "reduce", "broadcast")
        self.out = self.x if in_place else allocate(self.num_elements if whole_out else self.part)
        self.x_parts = list(self.x.split(self.part)) if whole_in else None
        self.out_parts = list(self.out.split(self.part)) if whole_out else None

    @property
    def size_bytes(self) -> int:
        """The size of the message as nccl-tests counts it."""
        return self.num_elements * self.x.element_size()

    @property
    def count(self) -> int:
        """Elements of the message, or of one rank's part of it."""
        return self.part if self.collective in IN_PARTS else self.num_elements

    def fill(self) -> None:
        """Put this rank's numbers into ``x``, and into ``out`` what cannot be right."""
        if self.out is not self.x:
            self.out.fill_(-1)
        for start, block in _blocks(self.x):
            block.copy_(_sent(self.rank, start, block.numel()))

    def clear(self) -> None:
        """Zeros, which stay finite however often they are summed."""
        self.x.zero_()
        self.out.zero_()

    def wrong(self) -> int:
        """Number of elements of ``out`` that are not what they must be."""
        if self.collective in ("reduce", "gather") and self.rank != ROOT:
            return 0
        return sum(
            int((block != self._expected(start, block.numel())).sum()) for start, block in _blocks(self.out)
        )

    def _expected(self, start: int, length: int) -> Tensor:
        own = self.rank * self.part  # where this rank's part begins in a message
        match self.collective:
            case "all_reduce" | "reduce":
                return _summed(self.num_ranks, start, length)
            case "reduce_scatter":
                return _summed(self.num_ranks, own + start, length)
            case "broadcast":
                return _sent(ROOT, start, length)
            case "scatter":
                return _sent(ROOT, own + start, length)
        # The others receive a part from every rank: their own first one, or the one meant for this rank.
        first = own if self.collective == "all_to_all" else 0
        place = torch.arange(start, start + length)
        source = place // self.part
        return ((place % self.part + first) % 7 + 8 * source).float()


def _blocks(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, x.numel(), BLOCK):
        yield start, x[start : start + BLOCK]


def _sent(rank: int, start: int, length: int) -> Tensor:
    return (torch.arange(start, start + length) % 7 + 8 * rank).float()


def _summed(num_ranks: int, start: int, length: int) -> Tensor:
    return num_ranks * _sent(0, start, length) + 8 * (num_ranks * (num_ranks - 1) // 2)
