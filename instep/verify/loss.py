"""The loss of a model on a batch: what the user's function says, or the model itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

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
