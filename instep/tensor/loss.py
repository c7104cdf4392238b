"""The split softmax: cross-entropy where each rank has the logits of a part of the vocabulary.

Per token the ranks exchange a maximum, then a sum of exponentials and the target's logit: 12 bytes instead of
V logits. The maximum is exact in any order; the sum is added unit by unit down the tree.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3. Letters: M tokens, V size of the vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from instep.events import SPLIT_SOFTMAX
from instep.tensor import products
from instep.tensor.layers import ColumnLinear, own_rows, require_in_vocabulary


class _SplitSoftmax(Function):
    """logits (M, V of this rank), targets (M,) -> losses (M,), the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, layer: ColumnLinear) -> Tensor:
        ranks, unit = layer.ranks, layer.unit
        most = ranks.rows(logits.amax(1), SPLIT_SOFTMAX).amax(0)  # (M,)
        powers = [(x - most.unsqueeze(1)).exp_() for x in products.columns_of(logits, unit)]
        own = products.tree_sum(columns.sum(1) for columns in powers)
        here = own_rows(layer)
        inside = (targets >= here.start) & (targets < here.stop)
        place = torch.where(inside, targets - here.start, 0).unsqueeze(1)
        wanted = torch.where(inside, logits.gather(1, place).squeeze(1), 0.0)
        rows = ranks.rows(torch.stack([own, wanted]), SPLIT_SOFTMAX)  # (t, 2, M)
        total = products.tree_sum(rows[:, 0].contiguous().unbind())
        wanted = rows[:, 1].sum(0)  # all but one are zeros
        ctx.save_for_backward(torch.cat([x.div_(total.unsqueeze(1)) for x in powers], 1), place, inside)
        return total.log() + most - wanted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, losses: Tensor) -> Any:
        shares, place, inside = ctx.saved_tensors
        gradient = shares.scatter_add(1, place, -inside.unsqueeze(1).to(shares.dtype))
        return gradient.mul_(losses.unsqueeze(1)), None, None


def cross_entropy(
    logits: Tensor, targets: Tensor, layer: ColumnLinear, *, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    """As ``torch.nn.functional.cross_entropy`` of class indices, where each rank has a part of the classes.

    Collective over the ranks of ``layer``, in forward. Logits are converted to float32 first.

    Args:
        logits: (..., V of this rank), as ``layer`` has made them.
        targets: (...) int64, of all V classes, the same on all ranks.
        layer: the layer that made the logits, cut by ``Column()``.
        reduction: "mean" over the tokens that are not ignored, "sum" or "none".
        ignore_index: tokens with this target do not count.

    Returns:
        The loss, the same on all ranks: (), or the shape of ``targets``.

    Raises:
        TypeError: ``layer`` is no layer that ``shard`` has made.
        ValueError: the logits are not those of the layer, or another reduction.
        RuntimeError: a target is no class.
        PeerLost: a rank did not come.

    Example:
        >>> head = torch.nn.Sequential(torch.nn.Linear(8, 100))
        >>> plan = {"0": instep.tensor.Column(is_vocabulary=True)}
        >>> head = instep.tensor.shard(head, instep.init(), plan, chunks=2)
        >>> loss = instep.tensor.cross_entropy(head(x), torch.arange(len(x)), head[0])
    """
    if not isinstance(layer, ColumnLinear):
        raise TypeError(
            f"expected the layer that made the logits, cut by instep.tensor.Column(), got a "
            f"{type(layer).__name__}: use torch's cross_entropy where each rank has all logits"
        )
    own = len(own_rows(layer))
    if logits.shape[-1] != own or layer.gathers_output:
        raise ValueError(
            f"expected the {own} logits of this rank, got {logits.shape[-1]}: take them from a "
            "Column() without gathers_output"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: expected 'mean', 'sum' or 'none'")
    flat, known = logits.float().flatten(0, -2), targets.flatten()
    counted = known != ignore_index
    require_in_vocabulary(torch.where(counted, known, 0), layer.out_features)
    losses = cast(Tensor, _SplitSoftmax.apply(flat, known, layer))
    losses = torch.where(counted, losses, 0.0)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()
