"""Whether a way to reduce gradients over ranks gives the bits of one process, and four ways that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from instep.events import Recorder
from instep.memory import Segment
from instep.net.process_group import Group
from instep.reduce.buckets import Bucket, flat_real, make_buckets
from instep.reduce.exchange import OrderedAllReduce
from instep.reduce.header import VERSION, Header
from instep.reduce.tree import plan_sum
from tests.reduce.trees import tree_sum

SHAPES = ((7, 13), (100,), (), (5, 3, 20))
NUM_ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES)

Leaves = Sequence[Sequence[int]]  # by rank
Reduce = Callable[[Group, dict[int, Tensor], Leaves], Tensor]


def drawn_gradients(num_leaves: int, dtype: str = "float32") -> list[np.ndarray]:
    """One flat gradient per leaf, the same on every rank, of magnitudes that make every order matter."""
    random = np.random.default_rng(num_leaves)
    exponents = random.uniform(-2, 2, (num_leaves, NUM_ELEMENTS))
    return list((random.standard_normal((num_leaves, NUM_ELEMENTS)) * 10**exponents).astype(dtype))


def one_process(gradients: list[np.ndarray], weight: int) -> np.ndarray:
    """The sum down the tree, multiplied once."""
    return tree_sum(gradients, np.add) * gradients[0].dtype.type(1.0 / weight)


def reduces_like_one_process(reduce: Reduce, group: Group, leaves: Leaves) -> bool:
    """Whether ``reduce`` gives rank ``group.rank`` the mean of all leaves to the last bit. Collective.

    Asserts that it gives the mean at least about, so that "no" is never due to a mistake of ``reduce``.
    """
    gradients = drawn_gradients(sum(map(len, leaves)))
    own = {leaf: torch.tensor(gradients[leaf]) for leaf in leaves[group.rank]}
    found = reduce(group, own, leaves).numpy()
    expected = one_process(gradients, len(gradients))
    scale = np.abs(gradients).mean(axis=0)
    assert (np.abs(found - expected) <= 0.01 * scale).all()
    return found.tobytes() == expected.tobytes()


def new_exchange(group: Group, *, ordered: bool = True, at_once_bytes: int | None = None) -> OrderedAllReduce:
    """``at_once_bytes``: 0 makes every bucket a large one."""
    exchange = OrderedAllReduce(group, Recorder(), ordered=ordered, max_parameters=len(SHAPES))
    if at_once_bytes is not None:
        exchange.transport.at_once_bytes = at_once_bytes
    return exchange


def drawn_bucket(group: Group, leaves: Leaves, dtype: str = "float32", **how) -> Bucket:
    """A bucket with this rank's share of ``drawn_gradients``; ``how``: as for ``filled_bucket``."""
    drawn = drawn_gradients(sum(map(len, leaves)), dtype)
    own = {leaf: torch.tensor(drawn[leaf]) for leaf in leaves[group.rank]}
    return filled_bucket(group, own, len(drawn), dtype=dtype, **how)


def run(exchange: OrderedAllReduce, bucket: Bucket, leaves: Leaves, weight: int | None = None) -> Bucket:
    """Exchange ``bucket``; the weight of a rank is its number of leaves."""
    weight = len(leaves[exchange.group.rank]) if weight is None else weight
    exchange.run(bucket, header_for(bucket, leaves, weight))
    return bucket


def is_mean(bucket: Bucket, num_leaves: int, weight: int | None = None) -> bool:
    """Whether ``bucket`` has the bits of one process for ``drawn_gradients``."""
    found = content(bucket).numpy()
    drawn = drawn_gradients(num_leaves, str(found.dtype))
    return found.tobytes() == one_process(drawn, num_leaves if weight is None else weight).tobytes()


def has_clean_padding(bucket: Bucket) -> bool:
    """Whether there is padding, and all of it is -0.0."""
    padding = torch.ones(bucket.num_elements, dtype=torch.bool)
    for slot in bucket.slots:
        padding[slot.offset : slot.offset + slot.length] = False
    found = bucket.home[padding]
    return len(found) > 0 and bool((found == 0).all()) and bool(torch.signbit(found).all())


def ordered_exchange(group: Group, own: dict[int, Tensor], leaves: Leaves) -> Tensor:
    """What instep does."""
    bucket = filled_bucket(group, own, sum(map(len, leaves)))
    return content(run(new_exchange(group), bucket, leaves))


def exchange_in_slices(group: Group, own: dict[int, Tensor], leaves: Leaves) -> Tensor:
    """What instep does with large buckets."""
    bucket = filled_bucket(group, own, sum(map(len, leaves)))
    return content(run(new_exchange(group, at_once_bytes=0), bucket, leaves))


def stacked_sum(group: Group, own: dict[int, Tensor], leaves: Leaves) -> Tensor:
    """Wrong: ``sum(0)`` adds in an order of its own."""
    rows = _gathered(group, tree_sum(list(own.values()), torch.add))
    return torch.stack(rows).sum(0) * (1 / sum(map(len, leaves)))


def scaled_before(group: Group, own: dict[int, Tensor], leaves: Leaves) -> Tensor:
    """Wrong: dividing by W before the sum, as DDP does, rounds every addend."""
    scale = 1 / sum(map(len, leaves))
    return tree_sum(_gathered(group, tree_sum(list(own.values()), torch.add) * scale), torch.add)


def narrow_wire(group: Group, own: dict[int, Tensor], leaves: Leaves) -> Tensor:
    """Wrong: partial sums that are rounded to bfloat16 where they cross ranks, and only there."""
    mine = tree_sum(list(own.values()), torch.add)
    rows = _gathered(group, mine.bfloat16().float() if group.size > 1 else mine)
    return tree_sum(rows, torch.add) * (1 / sum(map(len, leaves)))


def plain_all_reduce(group: Group, own: dict[int, Tensor], leaves: Leaves) -> Tensor:
    """Wrong: the backend chooses the order."""
    mine = tree_sum(list(own.values()), torch.add).clone()
    group.all_reduce(mine, "the all-reduce of a test")
    return mine * (1 / sum(map(len, leaves)))


def _gathered(group: Group, x: Tensor) -> list[Tensor]:
    out = torch.empty(group.size * len(x))
    group.all_gather(out, x, "the gathering of a test")
    return list(out.view(group.size, len(x)))


def filled_bucket(
    group: Group,
    own: dict[int, Tensor],
    num_leaves: int,
    *,
    dtype: str = "float32",
    memory: Callable[[int, int, torch.device], Segment] | None = None,
) -> Bucket:
    """A bucket of parameters of ``SHAPES`` whose counter holds the leaves of this rank.

    ``memory`` allocates, by default what the group can share.
    """
    parameters = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape in SHAPES]
    with mock.patch.object(group, "allocate", memory or group.allocate):
        (bucket,) = make_buckets(parameters, [range(len(SHAPES))], group)
        fill(bucket, own, num_leaves)
    return bucket


def fill(bucket: Bucket, own: dict[int, Tensor], num_leaves: int) -> None:
    """A step begins, and these are the leaves of this rank."""
    bucket.begin(num_leaves, lambda _: 0, (range(num_leaves),))
    for leaf, gradient in own.items():
        buffer = bucket.counter.open()
        parts = gradient.split([slot.length for slot in bucket.slots])
        for slot, view, part in zip(bucket.slots, bucket.views(buffer), parts, strict=True):
            view.copy_(part.view(slot.shape))
            slot.present = True
        bucket.counter.push(leaf, buffer)


def header_for(bucket: Bucket, leaves: Leaves, weight: int) -> Header:
    """Of ``bucket``, which is the sum of ``leaves``."""
    bucket.sum = plan_sum(tuple(map(tuple, leaves)), sum(map(len, leaves)))
    return Header(
        version=VERSION,
        declared=1,
        step=4,
        exchange=0,
        bucket=bucket.index,
        num_elements=bucket.num_elements,
        num_leaves=sum(map(len, leaves)),
        weight=weight,
        ready_ns=0,
        launched_ns=0,
        left=0,
    )


def content(bucket: Bucket) -> Tensor:
    """All gradients of the bucket, without the padding."""
    return torch.cat([flat_real(bucket.view(slot, bucket.home)) for slot in bucket.slots])
