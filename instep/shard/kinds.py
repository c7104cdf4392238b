"""Which optimizers can be cut where: elementwise ones anywhere, others between parameters, some not at all.

An elementwise optimizer computes each new element from the old one, its gradient and its moments alone, so a
rank can update any part of a parameter. Others look at a whole parameter (Adafactor's factors are means over
rows and columns, Muon makes a matrix orthogonal), and one that is not known here may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from instep.shard.layout import Layout, cut, keep_whole

Place = Callable[[Sequence[int], int, int], Layout]

# These classes themselves: a subclass may do anything.
ELEMENTWISE = frozenset({SGD, Adam, AdamW, NAdam, RAdam, Adagrad, Adadelta, Adamax, RMSprop, Rprop, ASGD})

REFUSED: dict[type[Optimizer], str] = {
    LBFGS: "its step is made of dot products over all parameters and calls the closure again and again: use "
    "torch.optim.LBFGS itself on every rank, whose state is then not sharded",
    SparseAdam: "its gradients are lists of rows, which have no fixed owner: make the embeddings with "
    "sparse=False and use Adam, or give their parameters to a torch.optim.SparseAdam beside this optimizer",
}


def is_elementwise(optimizer_cls: object) -> bool:
    """Whether parts of a parameter can be updated apart."""
    return isinstance(optimizer_cls, type) and optimizer_cls in ELEMENTWISE


def placement(optimizer_cls: object) -> Place:
    """``cut`` or ``keep_whole``, whichever is right for the class."""
    return cut if is_elementwise(optimizer_cls) else keep_whole


def require_shardable(optimizer_cls: object, options: Mapping[str, Any]) -> None:
    """Raise unless this can be made a sharded optimizer.

    Raises:
        TypeError: it is not a class of optimizers.
        ValueError: one of those that are refused, or an option that is.
    """
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
        raise TypeError(
            f"optimizer_cls: expected a class such as torch.optim.AdamW, got {optimizer_cls!r}: pass the "
            "class, and its options as keywords"
        )
    for refused, reason in REFUSED.items():
        if issubclass(optimizer_cls, refused):
            raise ValueError(f"{optimizer_cls.__name__} cannot be sharded: {reason}")
    if options.get("differentiable"):
        raise ValueError(
            "differentiable=True cannot be sharded: the new values come from other ranks, and no graph leads "
            "there"
        )
