"""Collectives that gradients flow through, each the adjoint of another.

What is differentiated is the sum of all ranks' losses: rank r computes a loss L_r, calls backward, and its
x receives d(L_0 + L_1 + ...)/dx_r. A collective is linear in the ranks' inputs, and so its backward is its
transpose, a collective too:

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
tensors (but for ``copy_to_all``) and can be differentiated more than once. Each way costs what it does in
``direct``, a broadcast what it does in ``binomial_tree``, and its way back what a reduce does in ``naive``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from instep.comm import binomial_tree, direct, naive
from instep.comm.messages import Messages
from instep.comm.perform import perform


def all_reduce_sum(x: Tensor, messages: Messages) -> Tensor:
    """The sum of all ranks' ``x``, on each.

    Every y_s contains x_r once, so dL/dx_r is the sum over s of dL_s/dy_s: the all-reduce of the gradient.
    """
    return cast(Tensor, _AllReduceSum.apply(x, messages))


def copy_to_all(x: Tensor, messages: Messages) -> Tensor:
    """``x`` itself, which is the same on all ranks, for computations that differ from rank to rank.

    The ranks' results are parts of one loss, and each contributes to the gradient of the one x: their sum.
    """
    return cast(Tensor, _CopyToAll.apply(x, messages))


def reduce_from_all(x: Tensor, messages: Messages) -> Tensor:
    """The sum of all ranks' ``x``, for a loss that all ranks compute alike from it.

    With one loss L, dL/dx_r = dL/dy, which each rank has: nothing is sent.
    """
    return cast(Tensor, _ReduceFromAll.apply(x, messages))


def all_gather(x: Tensor, messages: Messages) -> Tensor:
    """The rows (n, ...) of all ranks in rank order, (W n, ...); n is the same on all ranks.

    y_s contains x_r as its r-th block, so dL/dx_r is the sum over s of the r-th block of dL_s/dy_s.

    Raises:
        ValueError: ``x`` has no rows.
    """
    if x.dim() == 0:
        raise ValueError("expected rows (n, ...), got a tensor without dimensions: pass x.view(1)")
    return cast(Tensor, _AllGather.apply(x, messages))


def reduce_scatter(x: Tensor, messages: Messages) -> Tensor:
    """Of the sum of all ranks' ``x`` (W n, ...) the rank-th of W blocks of rows, (n, ...).

    Block s of x_r goes into y_s alone, so dL/dx_r is made of all dL_s/dy_s, one after the other.

    Raises:
        ValueError: the rows cannot be divided by W.
    """
    if x.dim() == 0 or len(x) % messages.size:
        raise ValueError(
            f"expected as many rows for each of {messages.size} ranks, got shape {tuple(x.shape)}: "
            "pad them, or use all_to_all"
        )
    return cast(Tensor, _ReduceScatter.apply(x, messages))


def all_to_all(x: Tensor, messages: Messages, to: Sequence[int], source: Sequence[int]) -> Tensor:
    """Rows of ``x``: the first ``to[0]`` go to rank 0, the next ``to[1]`` to rank 1, ...

    ``source[s]`` rows come from rank s; they stand in rank order, (sum(source), ...). Each row is in one
    place before and in one after, so its gradient takes the same way back.

    Raises:
        ValueError: ``to`` does not divide the rows of ``x`` among W ranks.
    """
    if len(to) != messages.size or len(source) != messages.size or sum(to) != len(x):
        raise ValueError(
            f"expected {messages.size} numbers of rows that sum to {len(x)}, got to={list(to)}, "
            f"source={list(source)}"
        )
    return cast(Tensor, _AllToAll.apply(x, messages, tuple(to), tuple(source)))


def broadcast(x: Tensor, messages: Messages, root: int = 0) -> Tensor:
    """``x`` of rank ``root``, on each; the shapes are the same.

    Every y_s is x_root, so dL/dx_root is the sum over s of dL_s/dy_s; the other x are in no y.
    """
    return cast(Tensor, _Broadcast.apply(x, messages, root))


class _AllReduceSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: Messages) -> Tensor:
        ctx.messages = messages
        return _sum(x, messages)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_reduce_sum(grads[0], ctx.messages), None


class _CopyToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: Messages) -> Tensor:
        ctx.messages = messages
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return reduce_from_all(grads[0], ctx.messages), None


class _ReduceFromAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: Messages) -> Tensor:
        ctx.messages = messages
        return _sum(x, messages)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return copy_to_all(grads[0], ctx.messages), None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: Messages) -> Tensor:
        ctx.messages = messages
        own = _in_a_row(x)
        out = own.new_empty(messages.size, *own.shape)
        out[messages.rank] = own
        perform(direct.all_gather, out.unbind(), messages)
        return out.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return reduce_scatter(grads[0], ctx.messages), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: Messages) -> Tensor:
        ctx.messages = messages
        parts = _in_a_row(x).tensor_split(messages.size)
        perform(direct.reduce_scatter, parts, messages)
        return parts[messages.rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_gather(grads[0], ctx.messages), None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: Messages, to: Sequence[int], source: Sequence[int]) -> Tensor:
        ctx.messages, ctx.to, ctx.source = messages, to, source
        own = _in_a_row(x)
        out = own.new_empty(sum(source), *own.shape[1:])
        direct.all_to_all(own.split(list(to)), messages, out.split(list(source)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_to_all(grads[0], ctx.messages, ctx.source, ctx.to), None, None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: Messages, root: int) -> Tensor:
        ctx.messages, ctx.root = messages, root
        out = _in_a_row(x)
        perform(binomial_tree.broadcast, out, messages, root)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return cast(Tensor, _SumOnRoot.apply(grads[0], ctx.messages, ctx.root)), None, None


class _SumOnRoot(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: Messages, root: int) -> Tensor:
        ctx.messages, ctx.root = messages, root
        out = _in_a_row(x)
        perform(naive.reduce, out, messages, root)
        return out if messages.rank == root else torch.zeros_like(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return broadcast(grads[0], ctx.messages, ctx.root), None, None


def _sum(x: Tensor, messages: Messages) -> Tensor:
    out = _in_a_row(x)
    perform(direct.all_reduce, out, messages)
    return out


def _in_a_row(x: Tensor) -> Tensor:
    """A copy that messages can carry: gradients often are expanded or transposed views."""
    return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
