"""The algorithms by name; ``cost`` has a formula under each of these names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from instep.comm import binomial_tree, butterfly, direct, naive, ring
from instep.comm.messages import Messages


class Rooted(Protocol):
    """From or to one rank, in place."""

    def __call__(self, x: Tensor, messages: Messages, root: int = 0) -> None: ...


Whole = Callable[[Tensor, Messages], None]  # x, in place
Partwise = Callable[[Sequence[Tensor], Messages], None]  # one part for each rank, in place

BROADCAST: dict[str, Rooted] = {
    "naive": naive.broadcast,
    "tree": binomial_tree.broadcast,
    "scatter_allgather": ring.broadcast,
}
REDUCE: dict[str, Rooted] = {"naive": naive.reduce, "tree": binomial_tree.reduce}
ALL_REDUCE: dict[str, Whole] = {
    "naive": naive.all_reduce,
    "reduce_broadcast": binomial_tree.all_reduce,
    "ring": ring.all_reduce,
    "direct": direct.all_reduce,
    "recursive_doubling": butterfly.recursive_doubling,
    "halving_doubling": butterfly.halving_doubling,
}
REDUCE_SCATTER: dict[str, Partwise] = {"ring": ring.reduce_scatter, "direct": direct.reduce_scatter}
ALL_GATHER: dict[str, Partwise] = {"ring": ring.all_gather, "direct": direct.all_gather}
ALL_TO_ALL = {"direct": direct.all_to_all}
SCATTER = {"naive": naive.scatter}
GATHER = {"naive": naive.gather}
