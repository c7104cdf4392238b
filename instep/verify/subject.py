"""The model under test: what a kind of wrapper tells ``verify`` about it, and its loss.

replicas    rank 0  | d d d d |    rank 1  | d d d d |     two copies of the gradient d
shards      rank 0  | d d . . |    rank 1  | . . d d |     one copy, on both ranks together
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.step.backward import Backward


class GradientPiece(NamedTuple):
    """What this rank has of the gradient of trainable parameter number ``position``.

    ``of(x)`` are the same elements of ``x``, a tensor of the parameter's shape. ``gradient()`` is the piece,
    after an exchange; None if there is none.
    """

    position: int
    of: Callable[[Tensor], Tensor]
    gradient: Callable[[], Tensor | None]

    @staticmethod
    def whole(position: int, parameter: Tensor) -> GradientPiece:
        """All of the gradient of ``parameter``."""
        return GradientPiece(position, lambda x: x, lambda: parameter.grad)


class Value(NamedTuple):
    """A parameter between two steps, or the piece from element ``first`` that is on this rank."""

    name: str
    first: int
    tensor: Tensor


@dataclass(frozen=True)
class Subject:
    """A model under test, and what this rank has of it.

    ``model``      is called in the distributed step; ``backward.module`` computes the reference
    ``strategy``   how gradients are reduced, for the report
    ``seed``       keys the random numbers of the test
    ``copy``       number of the copy of the gradient that this rank has, or has ``pieces`` of; rank 0 has 0
    ``values``     all parameters, frozen ones too
    ``memory``     what else a step writes to
    ``alone``      computes inside as one process, with the trainable parameters that it yields
    """

    model: nn.Module
    backward: Backward
    strategy: str
    seed: int
    copy: int
    pieces: Sequence[GradientPiece]
    values: Sequence[Value]
    memory: Sequence[Tensor] = ()
    alone: Callable[[], AbstractContextManager[Sequence[Tensor]]] | None = None


Loss = Callable[[nn.Module, Any], Tensor]
"""The loss of a model on a batch: a scalar, the mean over the batch."""


def loss_of(model: nn.Module, batch: Any, loss: Loss | None) -> Tensor:
    """``loss(model, batch)``; without ``loss`` the model's output, ``output.loss`` or ``output["loss"]``.

    Raises:
        ValueError: the loss is not a scalar with a gradient.
    """
    if loss is not None:
        value: Any = loss(model, batch)
        fix = "let loss be the mean over the batch"
    else:
        if isinstance(batch, Mapping):
            value = model(**batch)
        else:
            value = model(*batch) if isinstance(batch, list | tuple) else model(batch)
        if not isinstance(value, Tensor):
            value = value.get("loss") if isinstance(value, Mapping) else getattr(value, "loss", value)
        fix = (
            "pass loss=lambda model, batch: ..., or let the model return it, or have it as .loss or ['loss']"
        )
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"expected the loss to be a scalar tensor with a gradient, got {kind}: {fix}")
    return value
