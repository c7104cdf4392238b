"""Modules in slices without anything that reduces their gradients: what each rank computes is its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from instep.shard.stage3 import Stage3
from torch import Tensor, nn

from instep.mesh.join import find_ranks
from instep.mesh.mesh import Mesh
from tests.parity import filled, numbers

WIDTH = 72  # a matrix of WIDTH x 4 WIDTH has five blocks and a part of one
LAYERS = 5
Loss = Callable[[nn.Module], Tensor]


class Layer(nn.Module):
    """Something of everything: a module in a module, a parameter of its own, a branch around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.feed(self.norm(x))


class Stack(nn.Module):
    """A root with parameters before and after a list of layers."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.into = nn.Linear(12, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def inputs(rank: int = 0) -> Tensor:
    return numbers(4, 12, key=f"inputs of rank {rank}")


def loss_of(module: nn.Module, rank: int = 0) -> Tensor:
    loss: Tensor = module(inputs(rank)).square().mean()
    return loss


def built(kind: Callable[[], nn.Module] = Stack) -> tuple[nn.Module, nn.Module]:
    """A module, the same on every rank, and a copy of it that stays as it is."""
    module = filled(kind())
    return module, copy.deepcopy(module)


@contextmanager
def in_slices(mesh: Mesh, module: nn.Module, **options: Any) -> Iterator[Stage3]:
    """``module`` in stage 3 over the ranks of ``mesh``; all ranks close it together."""
    group, recorder = find_ranks(mesh)
    gather_group, _ = find_ranks(mesh)
    stage3 = Stage3(module, group, gather_group, recorder, **options)
    try:
        yield stage3
        group.barrier("the end of the test")
    finally:
        stage3.close()
        group.close()


def gathered_units(stage3: Stage3) -> list[str]:
    """Names of the units that have memory for all of their weights, or show that of all ranks."""
    return [unit.name for unit in stage3.units if not unit.is_free]


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def assert_same_gradients(module: nn.Module, plain: nn.Module) -> None:
    """The same bits in every ``.grad``."""
    for (name, mine), expected in zip(gradients(module).items(), gradients(plain).values(), strict=True):
        if expected is None:
            assert mine is None, name
        else:
            assert mine is not None and torch.equal(mine, expected), name
