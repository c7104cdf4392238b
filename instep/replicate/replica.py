"""A replica: a copy of a module tree over the same memory, whose gradients are its own.

Two ways to train one, which the caller chooses by the ``weights``:

    batch split     weight --Broadcast--> alias r --- forward of replica r      one graph, whose backward adds
                                                                                the gradients of the aliases
    declared step   leaf r over the weight's memory --- forward of replica r    one graph per replica
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from instep.reduce.tree import split
from instep.step.micro_batches import MicroBatch

Gradients = Sequence[Tensor | None]


class Broadcast(torch.autograd.Function):
    """(R, weights) -> R aliases of all weights; backward adds their gradients in the order of the tree."""

    @staticmethod
    def forward(ctx: Any, num: int, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.num = num
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for _ in range(num) for x in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        size = len(gradients) // ctx.num
        return None, *tree_sum([gradients[r * size : (r + 1) * size] for r in range(ctx.num)])


def tree_sum(leaves: Sequence[Gradients]) -> Gradients:
    """The sum of ``leaves`` in the order of the sum tree, tensor by tensor; None counts as absent."""
    if len(leaves) == 1:
        return leaves[0]
    middle = split(0, len(leaves))
    pairs = zip(tree_sum(leaves[:middle]), tree_sum(leaves[middle:]), strict=True)
    return [b if a is None else a if b is None else a + b for a, b in pairs]


def replicate(
    module: nn.Module, weights: Mapping[int, Tensor], *, owns_buffers: bool
) -> dict[int, nn.Module]:
    """Copies of all parts of ``module``, by the part's id, over ``weights``, by the parameter's id."""
    copies = {id(part): part._replicate_for_data_parallel() for part in module.modules()}
    buffers = {id(x): x if owns_buffers else x.clone() for x in module.buffers()}
    for part in module.modules():
        copy = copies[id(part)]
        for hooks in ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"):
            setattr(copy, hooks, getattr(copy, hooks).copy())
        copy._modules = {name: copies.get(id(child)) for name, child in part._modules.items()}
        copy._buffers = {name: buffers.get(id(x)) for name, x in part._buffers.items()}
        for name, p in part._parameters.items():
            setattr(copy, name, weights.get(id(p), p))  # recurrent layers keep a list, too
    return copies


def take_leaf(weights: Iterable[Tensor], one: MicroBatch) -> Gradients:
    """The gradients of micro-batch ``one``, in float32 at least: as leaves of the sum tree."""
    found = [p.grad for p in weights]
    for p in weights:
        p.grad = None
    if one.checked_weight() and all(x is None for x in found):
        fix = "call backward() on a loss of the model that the function is given, or set its weight to 0"
        raise ValueError(f"micro-batch {one.index} ended without a gradient: {fix}")
    if any(x is not None and x.is_sparse for x in found):
        raise ValueError("sparse gradients are not supported: build the embedding with sparse=False")
    return [x if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) for x in found]


def has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0


def joined(*outputs: Any) -> Any:
    """One leaf of the output of a split batch, from those of the replicas."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs) if has_rows(outputs[0]) else torch.stack(outputs)
    if any(x != outputs[0] for x in outputs):
        raise ValueError(f"replicas returned {outputs[0]!r} and other values: expected tensors")
    return outputs[0]
