"""The gradient norm and clipping, with the same bits however the gradients are placed.

The norm of the norms of shards is not the norm of the whole to the last bit, and through the clipping
factor one bit changes every weight. So the squares are summed per canonical block in float64, each block
by one owner, and the sums of blocks are added exactly (``math.fsum``), which has no order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from instep.ordered.blocks import BLOCK_ELEMENTS
from instep.ordered.buckets import flat_real


def block_square_sums(x: Tensor) -> Tensor:
    """Sum of squares of every block of ``x``, in order: (ceil(numel / 4096),) float64 on ``x``'s device."""
    flat = flat_real(x)
    whole = flat.numel() - flat.numel() % BLOCK_ELEMENTS
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK_ELEMENTS), dim=1, dtype=torch.float64)
    if whole == flat.numel():
        return norms.square()
    rest = torch.linalg.vector_norm(flat[whole:].view(1, -1), dim=1, dtype=torch.float64)
    return torch.cat([norms, rest]).square()


def grad_norm(gradients: Iterable[Tensor]) -> float:
    """The 2-norm over all ``gradients``: inf or nan if one of their elements is."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        by_device.setdefault(dense.device, []).append(block_square_sums(dense.detach()))
    squares = [value for sums in by_device.values() for value in torch.cat(sums).tolist()]
    if not all(map(math.isfinite, squares)):
        return math.nan if any(map(math.isnan, squares)) else math.inf
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:  # fsum raises where + gives inf
        return math.inf


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients in place so that their common 2-norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, with a norm whose bits do not depend on the placement. No
    communication: call it after backward, when the gradients are reduced.

    Returns:
        The norm before clipping, a float64 scalar on CPU.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = grad_norm(gradients)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the gradient norm is {norm}: expected a finite number")
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1.0:  # also when it is nan
        with torch.no_grad():  # after backward(create_graph=True) gradients have a graph of their own
            for gradient in gradients:
                gradient.mul_(factor)
    return torch.tensor(norm, dtype=torch.float64)


clip_grad_norm_.__module__ = "instep"
