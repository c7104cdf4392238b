"""The layers of a random model: each (B, T, width) -> (B, T, width), small, and odd in one way."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from benchmarks.placement.fuzz.programs import Layer, Program
from tests.parity import filled, numbers

VOCABULARY = 11
STEP = 0.25  # of each layer on what comes before it, so that numbers stay small


@dataclass(frozen=True)
class Sample:
    """What a layer is told beside its input."""

    tokens: Tensor  # (B, T)
    index: int  # of the micro-batch


class Odd(nn.Module):
    """A layer made of a function and its modules or parameters: ``compute(self, x, sample)``."""

    def __init__(self, compute: Callable[[Any, Tensor, Sample], Tensor], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, sample: Sample) -> Tensor:
        return self.compute(self, x, sample)


def simple(module: nn.Module) -> Odd:
    """One module that needs nothing but its input."""
    return Odd(lambda my, x, sample: my.inner(x), inner=module)


def along_time(module: nn.Module) -> Odd:
    """A module whose channels are dim 1."""
    return Odd(lambda my, x, sample: my.inner(x.transpose(1, 2)).transpose(1, 2), inner=module)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def _conv2d(width: int) -> Odd:
    return Odd(
        lambda my, x, sample: my.inner(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2),
        inner=nn.Conv2d(width, width, 3, padding=1),
    )


def _attention(width: int) -> Odd:
    return Odd(
        lambda my, x, sample: my.inner(x, x, x, need_weights=False)[0],
        inner=nn.MultiheadAttention(width, 2, batch_first=True),
    )


def _scalar(width: int) -> Odd:
    return Odd(lambda my, x, sample: x * my.gain + my.shift, gain=parameter(), shift=parameter(1))


def _empty(width: int) -> Odd:
    return Odd(
        lambda my, x, sample: x * my.gain + my.nothing.sum() + my.rows.sum(),
        gain=parameter(1),
        nothing=parameter(0),
        rows=parameter(0, 3),
    )


def _unused(width: int) -> Odd:
    return Odd(lambda my, x, sample: my.used(x), used=nn.Linear(width, width), spare=nn.Linear(width, 3))


def _buffer(width: int) -> Odd:
    made = Odd(lambda my, x, sample: my.inner(x) * my.kept + my.fleeting, inner=nn.Linear(width, width))
    made.register_buffer("kept", torch.linspace(0.5, 1.5, width))
    made.register_buffer("fleeting", torch.ones(1), persistent=False)
    return made


def _counter(width: int) -> Odd:
    def compute(my: Any, x: Tensor, sample: Sample) -> Tensor:
        my.calls += 1
        return my.inner(x) + my.calls

    made = Odd(compute, inner=nn.Linear(width, width))
    made.register_buffer("calls", torch.zeros(()))
    return made


def _unkeyed(number: Callable[[Any], float]) -> Callable[[int], Odd]:
    """A layer whose output is scaled by a random number that torch's default generator does not make."""

    def make(width: int) -> Odd:
        made = Odd(lambda my, x, sample: my.inner(x) * number(my), inner=nn.Linear(width, width))
        made.generator = torch.Generator().manual_seed(1)
        return made

    return make


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x**3 * gain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, gain = ctx.saved_tensors
        return 3 * x**2 * gain * gradient, (x**3 * gradient).sum((0, 1))


def _parameter_list(width: int) -> Odd:
    def compute(my: Any, x: Tensor, sample: Sample) -> Tensor:
        for weight in my.weights:
            x = torch.tanh(x @ weight) + my.more["bias"]
        return x

    weights = nn.ParameterList(parameter(width, width) for _ in range(2))
    return Odd(compute, weights=weights, more=nn.ParameterDict({"bias": parameter(width)}))


def _in_place(width: int) -> Odd:
    return Odd(lambda my, x, sample: F.relu(my.inner(x).mul_(2), inplace=True), inner=nn.Linear(width, width))


def _no_grad(width: int) -> Odd:
    def compute(my: Any, x: Tensor, sample: Sample) -> Tensor:
        with torch.no_grad():
            scale = my.inner(x).abs().mean()
        return my.inner(x) / (scale + 1)

    return Odd(compute, inner=nn.Linear(width, width))


def _complex(width: int) -> Odd:
    gain = parameter(width, dtype=torch.complex64)
    return Odd(lambda my, x, sample: (torch.complex(x.float(), x.float()) * my.gain).abs(), gain=gain)


def _experts(width: int) -> Odd:
    """The data say which of three experts works: some have no gradient in some micro-batches."""
    experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
    return Odd(lambda my, x, sample: my.experts[int(sample.tokens.sum()) % 3](x), experts=experts)


LAYERS: Mapping[str, Callable[[int], Odd]] = {
    "linear": lambda width: simple(nn.Linear(width, width)),
    "no_bias": lambda width: simple(nn.Linear(width, width, bias=False)),
    "conv1d": lambda width: along_time(nn.Conv1d(width, width, 3, padding=1)),
    "conv2d": _conv2d,
    "embedding": lambda width: Odd(
        lambda my, x, sample: my.inner(sample.tokens), inner=nn.Embedding(VOCABULARY, width)
    ),
    "layernorm": lambda width: simple(nn.LayerNorm(width)),
    "rmsnorm": lambda width: simple(nn.RMSNorm(width)),
    "groupnorm": lambda width: along_time(nn.GroupNorm(2, width)),
    "batchnorm": lambda width: along_time(nn.BatchNorm1d(width)),
    "batchnorm_untracked": lambda width: along_time(nn.BatchNorm1d(width, track_running_stats=False)),
    "gru": lambda width: Odd(
        lambda my, x, sample: my.inner(x)[0], inner=nn.GRU(width, width, batch_first=True)
    ),
    "lstm": lambda width: Odd(
        lambda my, x, sample: my.inner(x)[0], inner=nn.LSTM(width, width, num_layers=2, batch_first=True)
    ),
    "attention": _attention,
    "encoder": lambda width: simple(
        nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
    ),
    "bilinear": lambda width: Odd(
        lambda my, x, sample: my.inner(x, x), inner=nn.Bilinear(width, width, width)
    ),
    "prelu": lambda width: simple(nn.PReLU()),
    "scalar": _scalar,
    "empty": _empty,
    "tied": lambda width: simple(nn.Linear(width, width)),  # ``Model`` ties them
    "functional": lambda width: Odd(
        lambda my, x, sample: F.linear(x, my.inner.weight, my.inner.bias), inner=nn.Linear(width, width)
    ),
    "borrowed": lambda width: simple(nn.Linear(width, width)),  # ``Model`` computes with it
    "unused": _unused,
    "buffer": _buffer,
    "counter": _counter,
    "dropout": lambda width: simple(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3))),
    "dropout_function": lambda width: Odd(
        lambda my, x, sample: F.dropout(my.inner(x), 0.5), inner=nn.Linear(width, width)
    ),
    "python_random": _unkeyed(lambda my: random.random()),
    "numpy_random": _unkeyed(lambda my: float(numpy.random.rand())),
    "own_generator": _unkeyed(lambda my: torch.rand((), generator=my.generator).item()),
    "weight_norm": lambda width: simple(weight_norm(nn.Linear(width, width))),
    "parameter_list": _parameter_list,
    "custom_function": lambda width: Odd(lambda my, x, sample: Cube.apply(x, my.gain), gain=parameter(width)),
    "in_place": _in_place,
    "no_grad": _no_grad,
    "complex": _complex,
    "moe": _experts,
}


class Block(nn.Module):
    """A layer with its dtype and what is wrapped around it."""

    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__()
        self.wrap = layer.wrap
        inner: nn.Module = LAYERS[layer.kind](width)
        if layer.kind != "complex":
            inner = inner.to(getattr(torch, layer.dtype))
        self.inner = nn.ModuleList([inner]) if layer.wrap == "nested" else inner
        self.dtype = torch.float32 if layer.kind == "complex" else getattr(torch, layer.dtype)
        rearrange(inner, layer.memory)
        if layer.wrap == "eval":
            inner.eval()
        for number, weight in enumerate(inner.parameters()):
            if layer.wrap == "frozen" or (layer.wrap == "half_frozen" and number % 2):
                weight.requires_grad_(False)
            if layer.wrap == "hook":
                weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x: Tensor, sample: Sample) -> Tensor:
        if self.wrap == "sometimes" and sample.index % 2:
            return torch.zeros_like(x)
        cast = torch.autocast("cpu", torch.bfloat16) if self.wrap == "autocast" else nullcontext()
        with cast:
            return self._compute(x.to(self.dtype), sample).to(x.dtype)

    def _compute(self, x: Tensor, sample: Sample) -> Tensor:
        inner: Any = self.inner[0] if isinstance(self.inner, nn.ModuleList) else self.inner
        if self.wrap in ("checkpoint", "reentrant"):
            if not x.requires_grad:  # reentrant checkpointing needs an input that does
                x = x.detach().requires_grad_()
            return checkpoint(inner, x, sample, use_reentrant=self.wrap == "reentrant")  # type: ignore[no-any-return]
        if self.wrap == "twice":
            return inner(inner(x, sample), sample)  # type: ignore[no-any-return]
        return inner(x, sample)  # type: ignore[no-any-return]


def rearrange(module: nn.Module, memory: str) -> None:
    """Give the matrices of ``module`` memory that is not in logical order, has gaps, or begins anywhere."""
    for owner in module.modules():
        for name, weight in list(owner.named_parameters(recurse=False)):
            moved = _in_memory(weight.detach(), memory)
            if moved is not None:
                setattr(owner, name, nn.Parameter(moved))


def _in_memory(x: Tensor, memory: str) -> Tensor | None:
    if memory == "transposed" and x.ndim == 2:
        return x.t().contiguous().t()
    if memory == "channels_last" and x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if memory == "gap" and x.ndim >= 1:
        return torch.stack([x, x], dim=-1)[..., 0]
    if memory == "odd_offset" and x.ndim >= 1:
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return None


class Model(nn.Module):
    """A program's model."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.outputs = program.outputs
        self.kinds = [layer.kind for layer in program.layers]
        self.blocks = nn.ModuleList(Block(layer, program.width) for layer in program.layers)
        self.out = nn.Linear(program.width, 3)
        self._tie([block for block, kind in zip(self.blocks, self.kinds, strict=True) if kind == "tied"])

    def _tie(self, blocks: list[Any]) -> None:
        """Those of one dtype have one weight, as long as nothing froze or moved it."""
        first: dict[torch.dtype, nn.Parameter] = {}
        for block in blocks:
            linear = next(module for module in block.modules() if isinstance(module, nn.Linear))
            linear.weight = first.setdefault(linear.weight.dtype, linear.weight)

    def forward(self, x: Any, tokens: Tensor | None = None, index: int = 0) -> Any:
        if isinstance(x, dict):
            x, tokens, index = x["x"], x["tokens"], x["index"]
        values: Any = (x, tokens, index)
        for _, call in self.pipeline_layers():
            values = call(*values)
        return values

    def pipeline_layers(self) -> list[tuple[str, Callable[..., Any]]]:
        """What forward calls; each gives (x, tokens, index) to the next one."""
        blocks = [(f"blocks.{place}", partial(self._add, place)) for place in range(len(self.blocks))]
        return [*blocks, ("out", self._end)]

    def _add(self, place: int, x: Tensor, tokens: Tensor, index: int | Tensor) -> tuple[Any, ...]:
        block = self.blocks[place]
        if self.kinds[place] == "borrowed":
            change = self._borrow(block, x)
        else:
            change = block(x, Sample(tokens, int(index)))
        return x + STEP * torch.tanh(change), tokens, index

    def _end(self, x: Tensor, *_: Any) -> Any:
        y = self.out(x)
        return {
            "tensor": lambda: y,
            "tuple": lambda: (y, x.mean(), 3),
            "dict": lambda: {"y": y, "mean": x.mean(-1), "unused": x.sum()},
            "nested": lambda: {"a": [y, (x.mean(),)], "b": None},
        }[self.outputs]()

    def _borrow(self, block: Any, x: Tensor) -> Tensor:
        """With the weights of ``block``, but outside of its forward."""
        linear = next(module for module in block.modules() if isinstance(module, nn.Linear))
        return F.linear(x.to(linear.weight.dtype), linear.weight, linear.bias).to(x.dtype)


def build(program: Program) -> Model:
    """The model with values that depend on the names of its parameters alone."""
    model = Model(program)
    filled(model)
    return model


def inputs(program: Program, step: int, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords of the forward of micro-batch ``index`` in step ``step``."""
    shape = program.sizes[index], program.length
    x = numbers(*shape, program.width, key=f"x {step} {index}")
    tokens = (numbers(*shape, key=f"tokens {step} {index}").abs() * 1000).long() % VOCABULARY
    if program.inputs == "dict":
        return ({"x": x, "tokens": tokens, "index": index},), {}
    if program.inputs == "keyword":
        return (), {"x": x, "tokens": tokens, "index": index}
    return (x, tokens, index), {}


def first_inputs(program: Program, step: int, index: int) -> tuple[Tensor, ...]:
    """The same for the first layer of a pipeline."""
    (x, tokens, _), _ = inputs(replace(program, inputs="positional"), step, index)
    return x, tokens, torch.tensor(index)


def leaves(value: Any) -> list[Tensor]:
    """The tensors of an output that a loss is made of."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [x for name, part in value.items() if name != "unused" for x in leaves(part)]
    return [x for part in value for x in leaves(part)] if isinstance(value, list | tuple) else []
