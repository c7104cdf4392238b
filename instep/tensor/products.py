"""Matrix products in chunks: the same calls of the same kernels, whichever rank makes them.

If two ranks share a product, each calls a kernel with other shapes than one rank would. Where the inner dim
is cut, the sum is rounded in two places instead of one; where columns are cut, a kernel may choose other
blocks for fewer columns. So a product has a fixed number of chunks, its *units*: each unit is one call, on
contiguous operands whose shapes do not depend on the number of ranks.

    column   y[:, u] = x w[u]'               of a rank: the columns of its units
    row      y = ((0 + 1) + (2 + 3)) + ...   of units: x[:, u] w[:, u]', added down the balanced tree
                   rank 0     rank 1         a rank adds its subtree, and ranks exchange theirs

The price: smaller products, a copy of each operand that is cut along its rows, and an addition per unit.

Letters: M rows (tokens), K input features, N output features of a rank, P parts of a fused weight, n rows or
columns of a unit. Operands are 2-d; ``unit`` is n, and only the last unit may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def columns_of(x: Tensor, unit: int, parts: int = 1) -> Iterator[Tensor]:
    """The columns of ``x`` (M, P N) of each unit, all parts side by side: (M, P n) contiguous."""
    yield from (each.flatten(1).contiguous() for each in x.unflatten(1, (parts, -1)).split(unit, 2))


def rows_of(w: Tensor, unit: int, parts: int = 1) -> Iterator[Tensor]:
    """The rows of ``w`` (P N, K) of each unit, one part after the other: (P n, K) contiguous."""
    yield from (each.flatten(0, 1) for each in w.unflatten(0, (parts, -1)).split(unit, 1))


def tree_sum(leaves: Iterable[Tensor]) -> Tensor:
    """The sum of a power of two of ``leaves``, pairwise; their memory is reused."""
    waiting: list[tuple[int, Tensor]] = []  # sums, with the number of their leaves
    for x in leaves:
        count = 1
        while waiting and waiting[-1][0] == count:
            x = waiting.pop()[1].add_(x)
            count *= 2
        waiting.append((count, x))
    ((_, total),) = waiting
    return total


def times_rows(x: Tensor, w: Tensor, unit: int, parts: int = 1) -> Tensor:
    """``x w'``, (M, P N), of ``x`` (M, K) and ``w`` (P N, K): a product for each unit."""
    y = x.new_empty(len(x), len(w))
    cut = y.unflatten(1, (parts, -1)).split(unit, 2)
    for rows, place in zip(rows_of(w, unit, parts), cut, strict=True):
        place.copy_(torch.mm(x, rows.t()).view(place.shape))
    return y


def gradient_of_rows(dy: Tensor, x: Tensor, unit: int, parts: int = 1) -> tuple[Tensor, Tensor]:
    """The gradients of ``w`` (P N, K), and of a bias (P N,), where ``times_rows`` has made y."""
    dw, db = dy.new_empty(dy.shape[1], x.shape[1]), dy.new_empty(dy.shape[1])
    places = dw.unflatten(0, (parts, -1)).split(unit, 1), db.unflatten(0, (parts, -1)).split(unit, 1)
    for columns, of_weight, of_bias in zip(columns_of(dy, unit, parts), *places, strict=True):
        of_weight.copy_(torch.mm(columns.t(), x).view(of_weight.shape))
        of_bias.copy_(columns.sum(0).view(of_bias.shape))
    return dw, db


def sum_over_rows(dy: Tensor, w: Tensor, unit: int, parts: int = 1) -> Tensor:
    """This rank's subtree of ``dy w``, (M, K), of ``dy`` (M, P N) and ``w`` (P N, K): cut inside."""
    units = zip(columns_of(dy, unit, parts), rows_of(w, unit, parts), strict=True)
    return tree_sum(torch.mm(columns, rows) for columns, rows in units)


def sum_over_columns(x: Tensor, w: Tensor, unit: int) -> Tensor:
    """This rank's subtree of ``x w'``, (M, N), of ``x`` (M, K) and ``w`` (N, K): the cut dim is inside."""
    units = zip(columns_of(x, unit), columns_of(w, unit), strict=True)
    return tree_sum(torch.mm(columns, of_weight.t()) for columns, of_weight in units)


def gradient_of_columns(dy: Tensor, x: Tensor, w: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` (M, K) and ``w`` (N, K), where ``sum_over_columns`` has made y."""
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    places = dx.split(unit, 1), dw.split(unit, 1)
    for columns, of_weight, to_x, to_w in zip(columns_of(x, unit), columns_of(w, unit), *places, strict=True):
        to_x.copy_(torch.mm(dy, of_weight))
        to_w.copy_(torch.mm(dy.t(), columns))
    return dx, dw
