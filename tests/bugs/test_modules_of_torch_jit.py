"""Modules that torch.jit has compiled keep parameters and buffers in C++, and some take no hooks.

``DataParallel`` and ``fully_shard`` raised torch's own words about either, in a step or while wrapping, for
models that torch's DDP trains. Shards are gathered by hooks of the module that uses them: both refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard

# Of another category in torch 2.15.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
X = torch.arange(16.0).reshape(4, 4).sin()


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


@pytest.mark.parametrize("compiled", ["scripted", "traced"])
@pytest.mark.parametrize("whole", [False, True])
def test_replicas_of_one_are_refused(compiled: str, whole: bool) -> None:
    with pytest.raises(
        ValueError, match="is a TorchScript module, which takes no hooks: wrap the Python module"
    ):
        DataParallel(made(compiled, whole=whole))


@pytest.mark.parametrize("compiled", ["scripted", "traced"])
@pytest.mark.parametrize("stage", [2, 3])
def test_shards_cannot_be_in_one(compiled: str, stage: int) -> None:
    with pytest.raises(ValueError, match=r"'0' is compiled by torch\.jit.*leave it uncompiled"):
        fully_shard(made(compiled), stage=stage)
    with pytest.raises(ValueError, match="can become no other class: leave it uncompiled"):
        fully_shard(made(compiled, whole=True), stage=stage)


@pytest.mark.parametrize("compiled", ["scripted", "traced"])
def test_one_without_parameters_may_be_a_part(compiled: str) -> None:
    net = made()
    net.insert(
        1, {"scripted": torch.jit.script, "traced": lambda m: torch.jit.trace(m, X)}[compiled](nn.Tanh())
    )
    model = fully_shard(net)
    for _ in model.micro_batches(2):
        model(X).square().mean().backward()
    model.close()
