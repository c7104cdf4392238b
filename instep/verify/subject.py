"""The model on trial: what ``verify`` has to know of it where gradients and weights are in slices; its loss.

replicas    rank 0  | d d d d |    rank 1  | d d d d |     two copies of the gradient d
slices      rank 0  | d d . . |    rank 1  | . . d d |     one copy, of both ranks together
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.step.backward import Backward


class GradientPiece(NamedTuple):
    """What this rank has of the gradient of trainable parameter number ``position``.

    ``of(x)`` are the same elements of ``x``, which has the parameter's shape. ``gradient()`` is the piece,
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
    """A parameter or buffer as it counts between steps, or the piece from element ``first`` that is here."""

    name: str
    first: int
    tensor: Tensor


@dataclass(frozen=True)
class Subject:
    """A model on trial, and what this rank has of it.

    ``model``      what is called; ``backward.module`` is the same without its wrapper, if it has one
    ``strategy``   what a report calls the way in which gradients travel
    ``seed``       keys the random numbers of the trial
    ``copy``       number of the copy of the gradient that this rank has, or has ``pieces`` of; rank 0's is 0
    ``values``     of all parameters, frozen ones too
    ``memory``     what else a step writes to
    ``follow``     takes part in what rank 0 gathers to compute alone; called by rank 0 too, when it has
    """

    model: nn.Module
    backward: Backward
    strategy: str
    seed: int
    copy: int
    pieces: Sequence[GradientPiece]
    values: Sequence[Value]
    memory: Sequence[Tensor] = ()
    follow: Callable[[], None] = lambda: None


Loss = Callable[[nn.Module, Any], Tensor]
"""The loss of a model on a batch: a scalar, the mean over the batch."""


def loss_of(model: nn.Module, batch: Any, loss: Loss | None) -> Tensor:
    """``loss(model, batch)``, or what the model computes from ``batch``, to be walked backwards.

    Raises:
        ValueError: it is no scalar with a gradient.
    """
    value = loss(model, batch) if loss is not None else _own_loss(_call(model, batch))
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"expected the loss to be a scalar tensor with a gradient, got {kind}: let loss be the mean "
            "over the batch"
        )
    return value


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def _own_loss(output: Any) -> Any:
    """The loss that the model has computed: its output, ``output.loss`` or ``output["loss"]``."""
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(getattr(output, "loss", None), Tensor):
        return output.loss
    kind = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise ValueError(
        "verify() without loss expects model(batch) to be a scalar, or to have one as .loss or ['loss'], "
        f"got {kind}: pass loss=lambda model, batch: ..."
    )
