"""A small module with every oddity of a state dict, and optimizers of every kind of state."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, NAdam, Optimizer, RMSprop

from tests.state_oracle import state_entries, state_sha256

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.01, betas=(0.8, 0.99)),
    "adam, amsgrad, tensor lr": lambda p: Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    "adamw, fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: SGD(p, lr=0.01),
    "sgd, momentum": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, centered=True),
    "adafactor": lambda p: Adafactor(p, lr=0.01),
}


class Net(nn.Module):
    """Tied weights, a buffer, an integer buffer, and a frozen parameter that has no optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x))) * self.frozen.sum()


def named(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, object]:
    """As ``instep.save`` and ``load`` take them."""
    return {"model": model, "optimizer": optimizer}


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(6, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def made(
    seed: int, make: Callable[[Iterable[Tensor]], Optimizer] = OPTIMIZERS["adamw"]
) -> tuple[Net, Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, make(model.parameters())


def whole_hash(model: nn.Module, optimizer: Optimizer) -> str:
    return state_sha256(state_entries(model, optimizer), 0)
