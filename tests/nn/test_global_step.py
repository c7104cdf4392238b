"""Steps over the global batch: the bits of any placement, and the numbers of the whole batch in one process."""

from __future__ import annotations

import copy
import threading
from functools import partial
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
        embed = partial(lambda step, m: model(*inputs(m.index, step)), step)
        found.append(global_step(model, embed, module.loss, G))
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


# Against one process with the whole batch.


def whole_batch(step: int = 0) -> tuple[Tensor, Tensor]:
    images, texts = zip(*(inputs(leaf, step) for leaf in range(G)), strict=True)
    return torch.cat(images).double(), torch.cat(texts).double()


def reference(module: nn.Module) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
    """The loss, gradients and buffers of plain torch on the whole batch."""
    alone = copy.deepcopy(module)
    value = alone.loss(*alone(*whole_batch()))
    value.backward()
    return value.detach(), [p.grad for p in alone.parameters()], list(alone.buffers())


def as_torch(module: nn.Module) -> nn.Module:
    """``module`` with torch's own batch norm."""
    found = copy.deepcopy(module)
    for name, m in list(found.named_modules()):
        if isinstance(m, BatchNorm):
            plain = nn.BatchNorm1d(m.num_features, dtype=torch.float64)
            plain.load_state_dict(m.state_dict())
            found.set_submodule(name, plain)
    return found


@world(3)
@NORMS
def test_the_step_is_that_of_one_process_with_the_whole_batch(mesh, norm):
    module = filled(Clip(norm=norm)).double()
    expected, gradients, buffers = reference(as_torch(module))
    model = DataParallel(module, mesh)
    value = global_step(model, lambda m: model(*(x.double() for x in inputs(m.index))), module.loss, G)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    for (name, p), gradient in zip(module.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    for x, y in zip(module.buffers(), buffers, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
    assert module.loss.logit_scale.grad.abs() > 1e-3
    model.close()
