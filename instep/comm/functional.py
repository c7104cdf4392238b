"""Differentiable collectives, each the adjoint of another.

The loss is the sum of all ranks' losses: rank r computes L_r, calls backward, and its x receives
d(L_0 + L_1 + ...)/dx_r. A collective is linear in the ranks' inputs, so its backward is its transpose, a
collective too. Arguments that do not fit are a ``ValueError``.

    forward                                         backward
    all_reduce_sum    y_r = sum of x                all_reduce_sum
    all_gather        y_r = x_0, x_1, ...           reduce_scatter
    reduce_scatter    y_r = part r of the sum       all_gather
    all_to_all        part s of r to rank s         all_to_all, back
    broadcast         y_r = x_root                  the sum, on the root; zero elsewhere
    copy_to_all       y_r = x                       all-reduce         x and its gradient the same on all
    reduce_from_all   y_r = sum of x                identity           ranks, which share one loss

The last two are for a loss that all ranks compute alike and that counts once. Megatron-LM calls them f and
g (Shoeybi et al. 2019, section 3): with ``all_reduce_sum`` such a loss would count W times.

Backward communicates, so every rank must run it, and in the same order: x requires a gradient on all ranks
or on none, and each rank's loss depends on the result. All sums are added in rank order. Results are new
tensors (except for ``copy_to_all``) and can be differentiated more than once. Each direction costs what it
does in ``direct``, a broadcast what it does in ``binomial_tree``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from instep.comm import binomial_tree, direct
from instep.comm.perform import perform
from instep.net.messages import Messages


def all_reduce_sum(x: Tensor, messages: Messages) -> Tensor:
    """The sum of all ranks' ``x``, on each rank."""
    return _linear(x, lambda x: _sum(x, messages), lambda grad: all_reduce_sum(grad, messages))


def copy_to_all(x: Tensor, messages: Messages) -> Tensor:
    """``x`` itself, the same on all ranks, for computations that differ by rank: gradients are summed."""
    return _linear(x, lambda x: x.view_as(x), lambda grad: reduce_from_all(grad, messages))


def reduce_from_all(x: Tensor, messages: Messages) -> Tensor:
    """The sum of all ranks' ``x``, for a loss that all ranks compute alike: backward sends nothing."""
    return _linear(x, lambda x: _sum(x, messages), lambda grad: copy_to_all(grad, messages))


def all_gather(x: Tensor, messages: Messages) -> Tensor:
    """The rows (n, ...) of all ranks in rank order, (W n, ...); n is the same on all ranks."""
    if x.dim() == 0:
        raise ValueError("expected rows (n, ...), got a tensor without dimensions: pass x.view(1)")

    def gather(x: Tensor) -> Tensor:
        own = _contiguous_copy(x)
        out = own.new_empty(messages.size, *own.shape)
        out[messages.rank] = own
        perform(direct.all_gather, out.unbind(), messages)
        return out.flatten(0, 1)

    return _linear(x, gather, lambda grad: reduce_scatter(grad, messages))


def reduce_scatter(x: Tensor, messages: Messages) -> Tensor:
    """Of the sum of all ranks' ``x`` (W n, ...) the rank-th of W blocks of rows, (n, ...)."""
    if x.dim() == 0 or len(x) % messages.size:
        raise ValueError(
            f"expected as many rows for each of {messages.size} ranks, got shape {tuple(x.shape)}: "
            "pad them, or use all_to_all"
        )

    def scatter(x: Tensor) -> Tensor:
        parts = _contiguous_copy(x).tensor_split(messages.size)
        perform(direct.reduce_scatter, parts, messages)
        return parts[messages.rank].clone()

    return _linear(x, scatter, lambda grad: all_gather(grad, messages))


def all_to_all(x: Tensor, messages: Messages, to: Sequence[int], source: Sequence[int]) -> Tensor:
    """Rows of ``x``: the first ``to[0]`` go to rank 0, the next ``to[1]`` to rank 1, ...

    ``source[s]`` rows come from rank s; the result has them in rank order, (sum(source), ...).
    """
    if len(to) != messages.size or len(source) != messages.size or sum(to) != len(x):
        raise ValueError(
            f"expected {messages.size} numbers of rows that sum to {len(x)}, got to={list(to)}, "
            f"source={list(source)}"
        )

    def exchange(x: Tensor) -> Tensor:
        own = _contiguous_copy(x)
        out = own.new_empty(sum(source), *own.shape[1:])
        perform(direct.all_to_all, own.split(list(to)), messages, out=out.split(list(source)))
        return out

    return _linear(x, exchange, lambda grad: all_to_all(grad, messages, source, to))


def broadcast(x: Tensor, messages: Messages, root: int = 0) -> Tensor:
    """``x`` of rank ``root``, on each rank; the shapes are the same."""

    def spread(x: Tensor) -> Tensor:
        out = _contiguous_copy(x)
        perform(binomial_tree.broadcast, out, messages, root)
        return out

    def sum_on_root(x: Tensor) -> Tensor:
        total = _sum(x, messages)  # not ``reduce``, which adds in an order that depends on the root
        return total if messages.rank == root else torch.zeros_like(total)

    return _linear(
        x, spread, lambda grad: _linear(grad, sum_on_root, lambda again: broadcast(again, messages, root))
    )


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Any) -> Tensor:
        ctx.adjoint = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.adjoint(grads[0]), None, None


def _linear(x: Tensor, forward: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
    """``forward(x)``, whose gradient is ``adjoint`` of the gradient of the result."""
    return cast(Tensor, _Linear.apply(x, forward, adjoint))


def _sum(x: Tensor, messages: Messages) -> Tensor:
    out = _contiguous_copy(x)
    perform(direct.all_reduce, out, messages)
    return out


def _contiguous_copy(x: Tensor) -> Tensor:
    """A copy that messages can carry: gradients often are expanded or transposed views."""
    return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
