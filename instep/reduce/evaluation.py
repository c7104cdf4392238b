"""What a user prints and evaluates over all ranks: the mean of values, and rows, each sample's once.

A rank's own loss is that of its own micro-batches, so it depends on the number of ranks, although training
does not. These results do not: a sum is exact before it is rounded, so it has no order, and rows are sorted
by their samples, whichever rank computed which.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from instep.events import GLOBAL_LOSS
from instep.memory import bytes_of, tensor_of
from instep.mesh.join import find_ranks, ranks_meant
from instep.mesh.mesh import Mesh
from instep.net.agree import all_or_none, all_tell, attempt, require_same_lines
from instep.net.process_group import Group, alone
from instep.reduce.norm import rounded

Ranks = Mesh | ProcessGroup | None
Values = float | Tensor | Iterable[Any]
"""A number, a tensor of any shape, or a list of these."""

LIMIT_BYTES = 1 << 40  # of a rank's rows: memory is the limit
_groups: WeakKeyDictionary[Any, Group] = WeakKeyDictionary()  # made for process groups without a mesh


def mean(values: Values, weights: Values | None = None, *, process_group: Ranks = None) -> float:
    """The mean of the values of all ranks, which may pass any number of values. Collective.

    The mean is exact, and rounded once to float64: the same bits for every number of ranks. Costs a small
    all-gather: a rank sends its exact sums of values and weights, two fractions.

    Args:
        values: a number, a tensor of any shape, dtype and device, or a list of these.
        weights: of each value, in the same form; or one number for all. By default all are equal.
        process_group: as for ``DataParallel``: a ``Mesh`` or a process group; by default the registered mesh,
            else torch's default group, else this process alone.

    Returns:
        A Python float; nan or inf if a value is; nan if there is none, or all weights are zero.

    Raises:
        ValueError: on all ranks: the numbers of weights and values differ, or a weight is negative.
        TypeError: on all ranks: a value is no number, tensor or list of these.
        PeerLost: a rank is missing.

    Example:
        >>> instep.mean([torch.tensor([1.0, 2.0]), 6.0])  # on every rank, each with its own values
        3.0
        >>> instep.mean([0.25, 1.0], weights=[2, 1])  # losses of batches of 2 and 1: each sample counts once
        0.5
    """
    group, waiting = group_of(process_group)

    def sums() -> list[Any]:
        numbers = _numbers(values)
        pairs = list(zip(numbers, _weights(weights, len(numbers)), strict=True))
        total = sum((Fraction(x) * Fraction(n) for x, n in pairs if math.isfinite(x)), Fraction())
        not_finite = sum(x * n for x, n in pairs if not math.isfinite(x))
        return [str(total), str(sum((Fraction(n) for _, n in pairs), Fraction())), not_finite]

    mine = attempt(sums)  # before the span: it may wait for a device, but for no rank
    with waiting:
        _, everyone = all_tell(group, "instep.mean", mine, lambda sums: json.dumps(sums).encode())
    totals, counts, not_finite = zip(*map(json.loads, everyone), strict=True)
    count = sum(map(Fraction, counts))
    if not count:
        return math.nan
    return sum(not_finite) or rounded(sum(map(Fraction, totals)) / count)


def gather(*tensors: Tensor, index: Tensor | Sequence[int] | None = None, process_group: Ranks = None) -> Any:
    """The rows of all ranks, on every rank. Collective.

    Args:
        tensors: of shape (num_rows, ...) each, on any device. Ranks may have different numbers of rows, or
            none; dtype and the other dims are the same on all. A number, shape (), is one row.
        index: (num_rows,) integers: the samples that the rows belong to. The result is sorted by sample,
            each sample once, because a ``DistributedSampler`` repeats some to give all ranks the same
            number. Without it the rows are in the order of the ranks.
        process_group: as for ``mean``.

    Returns:
        For one tensor, one of shape (rows of all ranks, ...), without a graph, on its device; for several, a
        tuple of them.

    Raises:
        ValueError: on all ranks: numbers of rows differ between tensors and index, ranks pass different kinds
            of tensors, or nothing is passed.
        TypeError: on all ranks: an argument is no tensor.
        PeerLost: a rank is missing.

    Example:
        >>> rows = torch.tensor([[30.0], [10.0], [10.0]])  # predictions for samples 3, 1 and, repeated, 1
        >>> instep.gather(rows, index=[3, 1, 1])
        tensor([[10.],
                [30.]])
    """
    group, waiting = group_of(process_group)
    with waiting:
        rows, order = all_or_none(group, "instep.gather", lambda: _checked(tensors, index))
        kinds = [f"tensor {i} of {x.dtype} and shape {('rows', *x.shape[1:])}" for i, x in enumerate(rows)]
        kinds.append("an index" if order is not None else "no index")
        require_same_lines(group, "what they gather", kinds, fix=". Pass tensors of one kind on every rank")
        whole = [_rows_of_all(x, group) for x in rows]
        if order is not None:
            samples = _rows_of_all(order, group).numpy()
            firsts = torch.from_numpy(np.unique(samples, return_index=True)[1])
            whole = [x[firsts.to(x.device)] for x in whole]
    return whole[0] if len(whole) == 1 else tuple(whole)


def group_of(process_group: Ranks, cause: str = GLOBAL_LOSS) -> tuple[Group, AbstractContextManager[Any]]:
    """A group for the training thread, which waits for every exchange, and the span of a wait."""
    ranks = ranks_meant(process_group)
    if ranks is None:
        return alone(), nullcontext()
    if isinstance(ranks, Mesh):
        group = (ranks.whole if ranks.is_view else ranks.data).group
        return group, ranks.recorder.span(cause, lane="host")
    if ranks not in _groups:
        _groups[ranks] = find_ranks(ranks, what="instep.mean, gather or nn")[0]
    return _groups[ranks], nullcontext()


def _numbers(values: Values) -> list[float]:
    if isinstance(values, Tensor):
        return [*values.detach().to("cpu", torch.float64).reshape(-1).tolist()]
    if hasattr(values, "tolist"):  # an array
        values = values.tolist()
    if isinstance(values, Real):
        return [float(values)]
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        return [x for value in values for x in _numbers(value)]
    raise TypeError(
        f"instep.mean: expected numbers, tensors, arrays or a list of these, got a {type(values).__name__}"
    )


def _weights(weights: Values | None, num_values: int) -> list[float]:
    if weights is None:
        return [1.0] * num_values
    found = _numbers(weights)
    if len(found) == 1:
        found *= num_values
    if len(found) != num_values:
        raise ValueError(
            f"instep.mean: expected as many weights as values, got {len(found)} for {num_values}: pass one "
            "for each, or one number for all"
        )
    if any(not 0 <= x < math.inf for x in found):
        raise ValueError(f"instep.mean: expected finite weights of 0 or more, got {found}: pass item counts")
    return found


def _checked(
    tensors: Sequence[Tensor], index: Tensor | Sequence[int] | None
) -> tuple[list[Tensor], Tensor | None]:
    """The rows of each tensor, and their samples."""
    if not tensors:
        raise ValueError("instep.gather: expected a tensor, got none: pass what to gather")
    for x in tensors:
        if not isinstance(x, Tensor):
            raise TypeError(
                f"instep.gather: expected tensors, got a {type(x).__name__}: pass torch.as_tensor(x)"
            )
    rows = [x.detach().reshape(1) if x.dim() == 0 else x.detach() for x in tensors]
    order = None if index is None else torch.as_tensor(index, device="cpu").to(torch.int64).reshape(-1)
    lengths = [len(x) for x in rows] + ([] if order is None else [len(order)])
    if len(set(lengths)) > 1:
        raise ValueError(
            f"instep.gather: expected as many rows in each tensor{'' if order is None else ' and in index'}, "
            f"got {', '.join(map(str, lengths))}: pass one row per sample"
        )
    return rows, order


def _rows_of_all(x: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, in group order, on the device of ``x``."""
    rows = group.all_gather_bytes(bytes_of(x), "instep.gather", limit=LIMIT_BYTES)
    if not any(rows):  # the number of rows cannot be inferred from no elements
        return x.clone()
    return tensor_of(b"".join(rows), x.dtype).view(-1, *x.shape[1:]).to(x.device)
