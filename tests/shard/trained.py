"""Models of several blocks of 4096 elements, as sharding cuts them, and states compared bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.step.micro_batches import MicroBatch
from tests.parity import bits, numbers

FUSED = {"lr": 0.02, "fused": True}


def copied(value: Any) -> Any:
    """A state dict with tensors of its own."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(x) for key, x in value.items()}
    return [copied(x) for x in value] if isinstance(value, list) else value


def assert_same(ours: Any, expected: Any, where: str) -> None:
    """The same structure, and the same bits in every tensor."""
    assert type(ours) is type(expected), where
    if isinstance(ours, Tensor):
        same_form = (ours.dtype, ours.shape, ours.stride()) == (
            expected.dtype,
            expected.shape,
            expected.stride(),
        )
        assert same_form, f"{where}: {ours.dtype} {ours.shape} {ours.stride()}"
        differ = (bits(ours) != bits(expected)).sum().item()
        assert not differ, f"{where}: {differ} bytes of {ours.numel()} elements differ"
    elif isinstance(ours, dict):
        assert set(ours) == set(expected), where
        for key in ours:
            assert_same(ours[key], expected[key], f"{where}/{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(expected), where
        for i, (x, y) in enumerate(zip(ours, expected, strict=True)):
            assert_same(x, y, f"{where}/{i}")
    else:
        assert ours == expected, f"{where}: {ours} {expected}"


WIDTH = 72  # a matrix of WIDTH x 4 WIDTH has five blocks and a part of one


class Wide(nn.Module):
    """Parameters of several blocks: slices of two to four ranks begin in the middle of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def wide_step(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    model(numbers(4, WIDTH, key=f"step {step} leaf {micro_batch.index}")).square().mean().backward()


class TiedWide(nn.Module):
    """Embedding and output layer are one parameter of two blocks and a bit; the positions are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(130, WIDTH)
        self.positions = nn.Parameter(torch.zeros(6, WIDTH), requires_grad=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 130, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.tokens(tokens) + self.positions)))


def tokens_step(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    tokens = (numbers(6, key=f"tokens {step} {micro_batch.index}").abs() * 1000).long() % 130
    F.cross_entropy(model(tokens), tokens.flip(0)).backward()


class WideImages(nn.Module):
    """Convolutions in channels_last: in memory their weights are not in logical order."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Conv2d(40, 36, 3))
        self.out = nn.Linear(36, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.features(x.contiguous(memory_format=torch.channels_last)).mean((2, 3)))


def low(model: nn.Module, batch: Tensor) -> Tensor:
    """The loss of a model that computes in bfloat16."""
    return model(batch.bfloat16()).float().square().mean()


def images_step(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    model(numbers(2, 3, 7, 7, key=f"images {step} {micro_batch.index}")).square().mean().backward()
