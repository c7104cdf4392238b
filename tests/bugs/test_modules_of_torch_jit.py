"""Modules that torch.jit has compiled keep parameters and buffers in C++, and some take no hooks.

``DataParallel`` and stage 2 raised torch's own words about either, in a step or while wrapping, for
models that torch's DDP trains. Where weights are in slices there is no way without hooks: that is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard

# Of another category in torch 2.15.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
X = torch.arange(16.0).reshape(4, 4).sin()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng_block = True
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.counts = True

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        return self.linear(x)


def made(compiled: str = "", *, whole: bool = False) -> nn.Sequential:
    """Two layers, of which the first or the ``whole`` is "scripted" or "traced"."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(torch.arange(p.numel()).view_as(p).add(i).cos())
    ways: dict[str, Callable[[Any], Any]] = {
        "": lambda m: m,
        "scripted": torch.jit.script,
        "traced": lambda m: torch.jit.trace(m, X),
    }
    if whole:
        return ways[compiled](net)
    net[0] = ways[compiled](net[0])
    return net


def trained(model: Any) -> list[float]:
    """The gradient of a declared step, then of a plain one."""
    found = []
    for declared in (True, False):
        for _ in model.micro_batches(2) if declared else range(1):
            model(X).square().mean().backward()
        for p in model.parameters():
            found += p.grad.flatten().tolist()
            p.grad = None
    return found


@pytest.mark.parametrize("compiled", ["scripted", "traced"])
@pytest.mark.parametrize("whole", [False, True])
def test_are_trained_as_others_are(compiled: str, whole: bool) -> None:
    assert trained(DataParallel(made(compiled, whole=whole))) == trained(DataParallel(made()))


def test_are_verified_and_their_buffers_come_back() -> None:
    model = DataParallel(nn.Sequential(torch.jit.script(Counting())))
    buffer = next(model.buffers())
    model.verify((X,), lambda m, batch: m(batch[0]).sum()).raise_for_error()
    assert next(model.buffers()) is buffer and buffer == 0


def test_a_buffer_that_one_counts_in_is_seen() -> None:
    model = DataParallel(nn.Sequential(torch.jit.script(Counting())))
    with pytest.raises(ValueError, match=r"forward changed buffer '0\.calls' in a declared step"):
        trained(model)


def test_one_that_is_whole_has_its_forward_watched() -> None:
    layer = nn.Linear(4, 1)
    layer.bias.requires_grad_(False)
    model = DataParallel(torch.jit.script(layer))
    model.module.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="'bias'"):
        model(X)


@pytest.mark.parametrize("compiled", ["scripted", "traced"])
def test_stage_2_takes_one_as_a_part(compiled: str) -> None:
    model = fully_shard(made(compiled), stage=2)
    for _ in model.micro_batches(2):
        model(X).square().mean().backward()
    model.close()
    with pytest.raises(ValueError, match="can become no other class: shard a module around it"):
        fully_shard(made(compiled, whole=True), stage=2)


@pytest.mark.parametrize("compiled", ["scripted", "traced"])
def test_weights_in_slices_cannot_be_in_one(compiled: str) -> None:
    with pytest.raises(ValueError, match=r"'0' is compiled by .*: use stage=2 without compute_dtype"):
        fully_shard(made(compiled), stage=3)
