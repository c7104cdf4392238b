"""Layers that the ranks along ``tp`` share, with the parameters of the layers they replace.

    tokens  --> VocabularyEmbedding --> x, the same on all ranks
    x --> ColumnLinear --> this rank's columns --> a function of columns --> RowLinear --> y, the same on all

The ranks compute the same micro-batch. In backward a ``ColumnLinear`` sums the gradient of its input over the
ranks, in forward a ``RowLinear`` its output: one exchange each, as in Megatron-LM (Shoeybi et al. 2019).
With ``is_sequence`` each rank has a slice of the sequence between a row and the next column (sequence
parallelism, Korthikanti et al. 2022): x is (B, T / t, D) there, the sum of a row gives slices, and a column
gathers them first. Norms and dropout in between work on slices (``SequenceNorm``, ``SequenceDropout``).

Parameters that all ranks have, those of norms and the biases of rows, get gradients with the same bits on all
ranks: sums over tokens, added over ``chunks`` stretches of the sequence, with slices or without.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from instep.hook import Hook
from instep.state.boxes import refuse_parts
from instep.tensor import products
from instep.tensor.exchange import TensorRanks


class _Column(Function):
    """x (B, T, K), w (P N, K), bias (P N,) or None -> (B, T, P N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, layer: ColumnLinear) -> Tensor:
        ctx.layer, ctx.has_bias = layer, bias is not None
        rows = flat(layer.ranks.gather_slices(x) if layer.is_sequence else x)
        ctx.save_for_backward(x if layer.is_sequence else rows, w)  # a slice is gathered again
        y = products.times_rows(rows, w, layer.unit, layer.parts)
        if bias is not None:
            y.add_(bias)
        return y.view(*layer.whole_shape(x), len(w))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        layer, (x, w) = ctx.layer, ctx.saved_tensors
        shape = (*dy.shape[:-1], w.shape[1])
        rows = flat(layer.ranks.gather_slices(x)) if layer.is_sequence else x
        dy = flat(dy)
        dx = dw = db = None
        if ctx.needs_input_grad[1] or (ctx.has_bias and ctx.needs_input_grad[2]):
            dw, db = products.gradient_of_rows(dy, rows, layer.unit, layer.parts)
        if ctx.needs_input_grad[0]:
            own = products.sum_over_rows(dy, w, layer.unit, layer.parts).view(shape)
            dx = layer.ranks.sum_slice(own) if layer.is_sequence else layer.ranks.sum(own)
        return dx, dw, db if ctx.has_bias else None, None


class _Row(Function):
    """x (B, T, K), of which this rank has K features, w (N, K), bias (N,) or None -> (B, T, N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, layer: RowLinear) -> Tensor:
        ctx.layer, ctx.has_bias, ctx.shape = layer, bias is not None, x.shape
        rows = flat(x)
        ctx.save_for_backward(rows, w)
        own = products.sum_over_columns(rows, w, layer.unit).view(*x.shape[:-1], len(w))
        y = layer.ranks.sum_slice(own) if layer.is_sequence else layer.ranks.sum(own)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        layer, (rows, w) = ctx.layer, ctx.saved_tensors
        db = None
        if ctx.has_bias and ctx.needs_input_grad[2]:
            parts = (flat(part).sum(0) for part in layer.stretches(dy))
            db = layer.total(products.tree_sum(parts))
        whole = layer.ranks.gather_slices(dy) if layer.is_sequence else dy
        dx, dw = products.gradient_of_columns(flat(whole), rows, w, layer.unit)
        return dx.view(ctx.shape), dw, db, None


def flat(x: Tensor) -> Tensor:
    """The rows of ``x`` (..., K): (M, K), contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


class TensorLayer(nn.Module):
    """A layer that ``ranks`` share. Gradients that are sums over tokens have ``chunks`` stretches of them."""

    cut_weight: Tensor  # the parameter in boxes, also while another is in its place
    options = ""  # of the layer that this one replaces

    def __init__(self, ranks: TensorRanks, chunks: int, *, is_sequence: bool = False) -> None:
        super().__init__()
        self.ranks, self.chunks, self.is_sequence = ranks, chunks, is_sequence
        self.register_state_dict_post_hook(Hook(refuse_parts))

    def whole_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of ``x`` without its features, with the whole sequence."""
        if not self.is_sequence:
            return tuple(x.shape[:-1])
        return (x.shape[0], x.shape[1] * self.ranks.size, *x.shape[2:-1])

    def require_slice(self, length: int) -> None:
        """Raise ``ValueError`` if this rank has seen slices of the sequence, and none of ``length``."""
        known = [tokens for size, tokens in self.ranks.slices if size == self.ranks.size]
        if self.is_sequence and known and length not in known:
            raise ValueError(
                f"expected a slice of {known[-1]} tokens, got {length}: the plan has this layer between "
                f"scatter and gather, {self}: leave a norm or dropout elsewhere out of the plan, and give "
                "gather to a module that holds the layers with whole sequences"
            )

    def stretches(self, x: Tensor) -> list[Tensor]:
        """``x`` (B, T, ...), all of the sequence or a slice, in stretches of a ``chunks``-th of it.

        Without slices, a sequence that is no multiple is one stretch, and so are rows (M, D) without one.
        """
        if not self.is_sequence and (x.dim() < 3 or x.shape[1] % self.chunks):
            return [x.contiguous()]
        whole = x.shape[1] * (self.ranks.size if self.is_sequence else 1)
        return [part.contiguous() for part in x.split(whole // self.chunks, 1)]

    def total(self, own: Tensor) -> Tensor:
        """The sum over all stretches, where ``own`` is the one over this rank's."""
        return self.ranks.sum(own) if self.is_sequence else own

    def extra_repr(self) -> str:
        """What the bits depend on, for the contract: neither ``tp`` nor slices."""
        return f"{self.options}, chunks={self.chunks}"


class ColumnLinear(TensorLayer):
    """A linear layer cut by output features, in units of ``unit``; each of its ``parts`` is cut.

    With ``gathers_output`` all ranks have all features of the output.
    """

    def __init__(
        self,
        linear: nn.Linear,
        ranks: TensorRanks,
        chunks: int,
        unit: int,
        *,
        parts: int = 1,
        gathers_output: bool = False,
        is_sequence: bool = False,
    ) -> None:
        super().__init__(ranks, chunks, is_sequence=is_sequence)
        self.weight, self.bias = linear.weight, linear.bias
        self.__dict__["cut_weight"] = linear.weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.unit, self.parts, self.gathers_output = unit, parts, gathers_output

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parts={self.parts}"

    def widths(self) -> list[int]:
        """How many output features each rank has."""
        boxes, size = self.ranks.boxes, self.ranks.size
        cut, shape = boxes.cut_of(self.cut_weight), boxes.shape_of(self.cut_weight)
        assert cut is not None
        units = [cut.units(shape, rank, size) for rank in range(size)]
        return [min(x.stop * self.unit, self.out_features) - x.start * self.unit for x in units]

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_sequence:
            self.ranks.require_same(x)
        self.require_slice(x.shape[-2] if x.dim() > 1 else 1)
        y = cast(Tensor, _Column.apply(*autocast(x, self.weight, self.bias), self))
        return cast(Tensor, _Gather.apply(y, self)) if self.gathers_output else y


class RowLinear(TensorLayer):
    """A linear layer cut by input features, in units of ``unit``; its bias is added after the sum."""

    def __init__(
        self, linear: nn.Linear, ranks: TensorRanks, chunks: int, unit: int, *, is_sequence: bool = False
    ) -> None:
        super().__init__(ranks, chunks, is_sequence=is_sequence)
        self.weight, self.bias = linear.weight, linear.bias
        self.__dict__["cut_weight"] = linear.weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[1]:
            raise ValueError(
                f"expected {self.weight.shape[1]} of {self.in_features} features for Row(), got "
                f"{x.shape[-1]}: the plan has to cut the layer before by Column(), without gathers_output"
            )
        return cast(Tensor, _Row.apply(*autocast(x, self.weight, self.bias), self))


class _Gather(Function):
    """This rank's columns (..., N) -> all columns, the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: ColumnLinear) -> Tensor:
        widths, rank = layer.widths(), layer.ranks.rank
        ctx.begin, ctx.width = sum(widths[:rank]), x.shape[-1]
        padded = F.pad(x, (0, max(widths) - x.shape[-1]))
        rows = layer.ranks.rows(padded)
        return torch.cat([row[..., :width] for row, width in zip(rows, widths, strict=True)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy.narrow(-1, ctx.begin, ctx.width).contiguous(), None


class VocabularyEmbedding(TensorLayer):
    """An embedding cut by rows: a rank looks up its own tokens, and has zeros for the other tokens."""

    def __init__(self, embedding: nn.Embedding, ranks: TensorRanks, chunks: int) -> None:
        super().__init__(ranks, chunks)
        self.weight = embedding.weight
        self.__dict__["cut_weight"] = embedding.weight
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim

    def forward(self, tokens: Tensor) -> Tensor:
        require_in_vocabulary(tokens, self.num_embeddings)
        self.ranks.require_same(tokens)
        first = own_rows(self).start
        inside = (tokens >= first) & (tokens < first + len(self.weight))
        x = F.embedding(torch.where(inside, tokens - first, 0), self.weight)
        return cast(Tensor, _SumOfOne.apply(torch.where(inside.unsqueeze(-1), x, 0.0), self.ranks))


class _SumOfOne(Function):
    """The sum over ranks, all but one of which have zeros; -0 becomes 0, on one rank as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        return ranks.sum(x) + 0.0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


class SequenceNorm(TensorLayer):
    """A norm of each token by itself; its weights' gradients are added over stretches of the sequence.

    Backward computes each stretch again.
    """

    norm: nn.Module

    def __init__(self, norm: nn.Module, ranks: TensorRanks, chunks: int, *, is_sequence: bool) -> None:
        super().__init__(ranks, chunks, is_sequence=is_sequence)
        self.__dict__["norm"] = norm  # not a module of this one: parameters keep their names
        self._parameters = norm._parameters  # one table: a parameter may be replaced in it

    def forward(self, x: Tensor) -> Tensor:
        self.require_slice(x.shape[-2])
        return cast(Tensor, _Norm.apply(x, self, *self._parameters.values()))


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SequenceNorm, *parameters: Tensor | None) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return cast(Tensor, layer.norm.forward(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        layer, (x,) = ctx.layer, ctx.saved_tensors
        parameters = [p for p in layer._parameters.values() if p is not None and p.requires_grad]
        of_x, of_parameters = [], []
        for part, its_dy in zip(layer.stretches(x), layer.stretches(dy), strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                y = layer.norm.forward(part)
                found = torch.autograd.grad(y, [part, *parameters], its_dy)
            of_x.append(found[0])
            of_parameters.append(found[1:])
        sums = iter([layer.total(products.tree_sum(each)) for each in zip(*of_parameters, strict=True)])
        return (
            torch.cat(of_x, 1),
            None,
            *(next(sums) if p is not None and p.requires_grad else None for p in layer._parameters.values()),
        )


class SequenceDropout(TensorLayer):
    """Dropout by the mask of the whole sequence, of which a rank takes its slice."""

    def __init__(self, dropout: nn.Dropout, ranks: TensorRanks, chunks: int, *, is_sequence: bool) -> None:
        super().__init__(ranks, chunks, is_sequence=is_sequence)
        self.p = dropout.p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        self.require_slice(x.shape[-2])
        mask = F.dropout(x.new_ones(*self.whole_shape(x), x.shape[-1]), self.p)
        return x * (self.ranks.own_slice(mask) if self.is_sequence else mask)


class ToSlices(Function):
    """x (B, T, ...), the same on all ranks -> this rank's slice of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.own_slice(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.ranks.gather_slices(dy.contiguous()), None


class FromSlices(Function):
    """All ranks' slices -> x (B, T, ...), the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather_slices(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.ranks.own_slice(dy), None


def own_rows(layer: ColumnLinear | VocabularyEmbedding) -> range:
    """This rank's rows of the layer's weight, by their numbers in the whole weight."""
    boxes, weight = layer.ranks.boxes, layer.cut_weight
    cut = boxes.cut_of(weight)
    assert cut is not None
    first = boxes.units(weight).start * cut.unit
    return range(first, first + boxes.local_shape(weight)[0])


def require_in_vocabulary(tokens: Tensor, size: int) -> None:
    """Raise ``RuntimeError`` unless ``tokens`` are below ``size``; on a GPU later, as torch's kernels do."""
    is_inside = ((tokens >= 0) & (tokens < size)).all()
    torch._assert_async(is_inside, f"expected tokens from 0 to {size - 1}, the vocabulary's")


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """``tensors`` as ``F.linear`` casts them under autocast."""
    kind = next(x.device.type for x in tensors if x is not None)
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if x is None else x.to(dtype) for x in tensors)
