"""Steps over the global batch: the bits of any placement, and the numbers of one process with the whole batch."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.nn import BatchNorm, InfoNCE, global_step
from instep.replicate.wrapper import DataParallel
from tests.parity import bits, filled, numbers, world_of_one
from tests.world import world

G, ROWS, WIDTH = 8, 4, 6
_bits: dict[str, list[Tensor]] = {}
_lock = threading.Lock()


class Clip(nn.Module):
    """Two towers and a learned temperature."""

    def __init__(self, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.image = self.tower(norm, dropout)
        self.text = self.tower(norm, dropout)
        self.loss = InfoNCE(0.2, learnable=True, symmetric=True)

    def tower(self, norm: bool, dropout: float) -> nn.Module:
        between = [BatchNorm(9)] if norm else []
        after = [BatchNorm(5)] if norm else []
        return nn.Sequential(
            nn.Linear(WIDTH, 9), *between, nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 5), *after
        )

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(images), self.text(texts)


def inputs(leaf: int, step: int = 0) -> tuple[Tensor, Tensor]:
    return numbers(ROWS, WIDTH, key=f"images {step} {leaf}"), numbers(ROWS, WIDTH, key=f"texts {step} {leaf}")


def trained(mesh: Mesh, **options: Any) -> list[Tensor]:
    module = filled(Clip(**options))
    model = DataParallel(module, mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02, fused=False, foreach=False)
    found = []
    for step in range(2):
        found.append(global_step(model, lambda m: model(*inputs(m.index, step)), module.loss, G))
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    return [*found, *(x.detach().clone() for x in (*module.parameters(), *module.buffers()))]


def bits_of_one(**options: Any) -> list[Tensor]:
    key = str(options)
    with _lock:
        if key not in _bits:
            _bits[key] = trained(world_of_one(), **options)
        return _bits[key]


def assert_bits_of_one(mesh: Mesh, **options: Any) -> None:
    for x, y in zip(trained(mesh, **options), bits_of_one(**options), strict=True):
        assert torch.equal(bits(x), bits(y))


NORMS = pytest.mark.parametrize("norm", [False, True])


@world(2)
@NORMS
def test_two_ranks_have_the_bits_of_one(mesh, norm):
    assert_bits_of_one(mesh, norm=norm)


@world(3)
@NORMS
def test_three_ranks_have_the_bits_of_one(mesh, norm):
    assert_bits_of_one(mesh, norm=norm)


@world(4)
@NORMS
def test_four_ranks_have_the_bits_of_one(mesh, norm):
    assert_bits_of_one(mesh, norm=norm)


@world(7)
@NORMS
def test_ranks_of_one_and_of_two_micro_batches_have_the_bits_of_one(mesh, norm):
    assert_bits_of_one(mesh, norm=norm)


@world(9)
@NORMS
def test_a_rank_without_micro_batches_has_the_bits_of_one(mesh, norm):
    assert_bits_of_one(mesh, norm=norm)


@world(3, by="process")
@NORMS
def test_dropout_is_the_same_in_each_pass_and_on_any_number_of_ranks(mesh, norm):
    assert_bits_of_one(mesh, norm=norm, dropout=0.4)
