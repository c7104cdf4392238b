"""Parts of the state that training carries on: what each rank holds of each entry, and who answers for what.

The entries are those of ``instep.ordered.hash``: parameters, persistent buffers, moments, by name. Where
nothing is sharded each rank has all of each. Edges inside an entry lie on canonical blocks of its elements.

    rank 0 holds   | weight       | bias | moment 0..1 |         ranks that hold the same blocks share them
    rank 1 holds   | weight       | bias |     moment 2..3 |     out in runs of equal length:
    rank 0's runs  | wei          |      | moment 0..1 |         each block has one rank that answers for it
    rank 1's runs  |    ght       | bias |     moment 2..3 |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.ordered.blocks import BLOCK_ELEMENTS


class Part(NamedTuple):
    """Elements ``first`` to ``last`` (exclusive), in logical order, of the entry ``name`` of ``shape``.

    ``tensor`` is the live memory: of the entry's shape if it is all of it, else flat. Entries that are put
    together from several ranks are sorted by ``order``, in which no rank has to know those of another: the
    place of the parameter or buffer in the module, and for moments the key.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int
    last: int
    tensor: Tensor
    order: tuple[int, str] = (0, "")

    @staticmethod
    def whole(name: str, x: Tensor, order: tuple[int, str] = (0, "")) -> Part:
        """All of ``x``."""
        return Part(name, tuple(x.shape), x.dtype, 0, x.numel(), x.detach(), order)

    @property
    def is_whole(self) -> bool:
        return self.tensor.numel() == self.shape_numel

    @property
    def shape_numel(self) -> int:
        """Elements of the whole entry."""
        return torch.Size(self.shape).numel()

    def blocks(self, first: int, last: int) -> Tensor:
        """Blocks ``first`` to ``last`` (exclusive) of the entry, which are in this part."""
        start, stop = first * BLOCK_ELEMENTS, min(last * BLOCK_ELEMENTS, self.last)
        return elements(self.tensor, start - self.first, stop - self.first)


class Run(NamedTuple):
    """Blocks ``first`` to ``last`` (exclusive), for which ``rank`` of the group answers."""

    rank: int
    first: int
    last: int


@dataclass(frozen=True)
class Row:
    """An entry of the state of all ranks together; ``dtype`` as torch writes it, ``runs`` in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]

    @property
    def num_blocks(self) -> int:
        """Of the whole entry."""
        return _num_blocks(self.shape)


def describe(parts: Iterable[Part]) -> bytes:
    """What others have to know of this rank's ``parts`` for the ``table``."""
    said = [[*part.order, part.name, str(part.dtype), part.shape, part.first, part.last] for part in parts]
    return json.dumps(said).encode()


def table(everyone: Sequence[bytes], ranks: Sequence[int]) -> list[Row]:
    """The entries of the state, in the manifest's order, from what each of ``ranks`` tells of its parts.

    Raises:
        ValueError: the parts are not those of one state, or not all of it.
    """
    said: dict[str, list[tuple[int, Any]]] = {}
    for rank, data in enumerate(everyone):
        for one in json.loads(data):
            said.setdefault(one[2], []).append((rank, one))
    ordered = sorted(said.items(), key=lambda item: item[1][0][1][:2])
    return [_row(name, told, ranks) for name, told in ordered]


def own_runs(parts: Iterable[Part], rows: Sequence[Row], rank: int) -> Iterator[tuple[Row, Run, Part]]:
    """What ``rank``, which holds ``parts``, answers for, in the order of ``rows``."""
    held: dict[str, list[Part]] = {}
    for part in parts:
        held.setdefault(part.name, []).append(part)
    for row in rows:
        for run in row.runs:
            if run.rank == rank:
                start = run.first * BLOCK_ELEMENTS
                yield row, run, next(x for x in held[row.name] if x.first <= start < x.last)


def elements(x: Tensor, start: int, stop: int) -> Tensor:
    """Elements ``start`` to ``stop`` of ``x`` in logical order: a view if it is contiguous."""
    if x.is_contiguous():
        return x.view(-1)[start:stop]
    row = x.numel() // len(x)
    first, last = start // row, (stop - 1) // row
    start, stop = start - first * row, stop - first * row
    return elements(x[first], start, stop) if first == last else x[first : last + 1].reshape(-1)[start:stop]


def _row(name: str, told: Sequence[tuple[int, Any]], ranks: Sequence[int]) -> Row:
    """``told``: group rank, and what it has said of ``name``."""
    first_rank, (*order, _, dtype, shape, _, _) = told[0]
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, (*its_order, _, its_dtype, its_shape, first, last) in told:
        if (its_order, its_dtype, its_shape) != (order, dtype, shape):
            raise ValueError(
                f"{name!r}: expected {dtype} of shape {shape}, as on rank {ranks[first_rank]}, got "
                f"{its_dtype} of shape {its_shape} on rank {ranks[rank]}: ranks must hold parts of one state"
            )
        if first < last:
            holders.setdefault((first, last), []).append(rank)
    end, length, runs = 0, torch.Size(shape).numel(), list[Run]()
    for (first, last), its in sorted(holders.items()):
        if first != end or first % BLOCK_ELEMENTS or (last % BLOCK_ELEMENTS and last != length):
            break
        runs += _shared_out(its, first // BLOCK_ELEMENTS, -(-last // BLOCK_ELEMENTS))
        end = last
    if end != length:
        raise ValueError(
            f"{name!r}: expected parts that follow on each other at multiples of {BLOCK_ELEMENTS}, up "
            f"to its end at {length}, got {', '.join(f'{a} to {b}' for a, b in sorted(holders)) or 'none'}"
        )
    return Row(name, dtype, tuple(shape), tuple(runs))


def _shared_out(ranks: Sequence[int], first: int, last: int) -> Iterator[Run]:
    """Blocks ``first`` to ``last``, which all of ``ranks`` hold, in runs of equal length."""
    edges = [first + i * (last - first) // len(ranks) for i in range(len(ranks) + 1)]
    for rank, start, stop in zip(ranks, edges, edges[1:], strict=False):
        if start < stop:
            yield Run(rank, start, stop)


def _num_blocks(shape: Sequence[int]) -> int:
    return -(-torch.Size(shape).numel() // BLOCK_ELEMENTS)
