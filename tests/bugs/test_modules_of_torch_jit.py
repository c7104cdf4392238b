"""Modules that torch.jit has compiled keep parameters and buffers in C++, and some take no hooks.

``DataParallel`` and ``fully_shard`` raised torch's own words about either, in a step or while wrapping, for
models that torch's DDP trains. Shards are gathered by hooks of the module that uses them: both refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


@pytest.mark.parametrize("wrap", [DataParallel, partial(fully_shard, stage=2), partial(fully_shard, stage=3)])
@pytest.mark.parametrize("compiled", ["scripted", "traced"])
@pytest.mark.parametrize("whole", [False, True])
def test_one_is_refused(wrap: Callable[[nn.Module], object], compiled: str, whole: bool) -> None:
    with pytest.raises(
        ValueError, match=r"is a TorchScript module, which takes no hooks: .* the Python module"
    ):
        wrap(made(compiled, whole=whole))
