"""Parameters in boxes: the state is that of whole parameters, whatever the axes."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import instep
from instep.checkpoint.registered import Registered
from instep.mesh.mesh import Mesh
from instep.state.boxes import Cut, divide
from instep.state.hash import ROUND_BYTES, SharedHash
from instep.state.homes import home
from instep.state.shards import grid
from tests.parity import filled
from tests.world import world

FEATURES, HIDDEN = 24, 48
CUTS = {
    "qkv.weight": Cut("tp", dim=0, unit=4, parts=3),
    "qkv.bias": Cut("tp", dim=0, unit=4, parts=3),
    "down.weight": Cut("tp", dim=1, unit=4),
    "experts": Cut("ep", dim=0, unit=1),
    "tokens.weight": Cut("tp", dim=0, unit=7),  # 25 rows: the last unit is shorter
}


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN // 3, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        self.experts = nn.Parameter(torch.zeros(4, 5, 3))
        self.tokens = nn.Embedding(25, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def digest(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """The hash of the state, over all ranks that have some of it."""
    objects = {"model": module} | ({} if optimizer is None else {"optimizer": optimizer})
    state = Registered(objects).state()
    return SharedHash(state.group).digests(state.owned(), 0)[0]


def step(module: nn.Module, optimizer: torch.optim.Optimizer, whole: dict[str, torch.Tensor]) -> None:
    """One step with gradients that follow from the ``whole`` parameters; each rank takes its boxes."""
    for name, p in module.named_parameters():
        gradient, there = whole[name].sin(), home(p)
        if there is not None and (box := there.box_of(p)) is not None:
            gradient = gradient.view(grid(tuple(gradient.shape), box))
            for dim, (start, stop) in enumerate(box):
                gradient = gradient.narrow(dim, start, stop - start)
        p.grad = gradient.reshape(p.shape).clone()
    optimizer.step()


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"ep": 2}, {"tp": 2, "ep": 2}, {"dp": 2, "tp": 2}])
def test_boxes_have_the_hash_of_whole_parameters_and_are_saved_and_loaded(
    axes: dict[str, int], tmp_path: Path
) -> None:
    module = filled(Parts())
    whole = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer, before = adam(module), digest(module)
    step(module, optimizer, whole)
    after = digest(module, optimizer)
    instep.save(tmp_path / "whole", step=0, model=module, optimizer=optimizer)
    world(math.prod(axes.values()), **axes)(divided)(
        whole=whole, expected=(before, after), directory=tmp_path
    )
    again = Parts()
    moments = adam(again)
    instep.load(tmp_path / "boxes", model=again, optimizer=moments)
    assert digest(again, moments) == after


def divided(mesh: Mesh, whole: dict[str, torch.Tensor], expected: tuple[str, str], directory: Path) -> None:
    module = filled(Parts())
    boxes = divide(module, mesh, CUTS)
    optimizer = adam(module)
    assert digest(module) == expected[0]
    assert sum(p.numel() for p in module.parameters()) < sum(x.numel() for x in whole.values())
    step(module, optimizer, whole)
    assert digest(module, optimizer) == expected[1]
    found = {name: p if (x := boxes.fetch(p)) is None else x for name, p in module.named_parameters()}
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in whole.items()}
    instep.save(directory / "boxes", step=0, model=module, optimizer=optimizer)
    again = Parts()
    divide(again, mesh, CUTS)
    moments = adam(again)
    instep.load(directory / "whole", model=again, optimizer=moments)
    assert digest(again, moments) == expected[1]


def norm_of(mesh: Mesh, whole: dict[str, torch.Tensor], found: dict[int, float]) -> None:
    module = filled(Parts())
    divide(module, mesh, CUTS)
    step(module, adam(module), whole)
    found[mesh.rank] = float(instep.clip_grad_norm_(module.parameters(), 1e9))
    with pytest.raises(RuntimeError, match="norm of a gradient shard"):
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def test_the_norm_has_the_same_bits_for_any_boxes() -> None:
    whole = {name: p.detach().clone() for name, p in filled(Parts()).named_parameters()}
    expected = sum(x.sin().double().square().sum() for x in whole.values()) ** 0.5
    norms: set[float] = set()
    for axes in ({"tp": 1}, {"tp": 2}, {"ep": 2}, {"tp": 2, "ep": 2}):
        found: dict[int, float] = {}
        world(math.prod(axes.values()), **axes)(norm_of)(whole=whole, found=found)
        norms |= set(found.values())
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(float(expected), rel=1e-6)


def test_a_second_division_adds_cuts_and_another_kind_is_refused() -> None:
    world(2, tp=2)(divided_twice)()


def divided_twice(mesh: Mesh) -> None:
    module = filled(Parts())
    first = divide(module, mesh, {"down.weight": CUTS["down.weight"]})
    assert divide(module, mesh, {"qkv.bias": CUTS["qkv.bias"]}) is first
    assert (module.down.weight.shape, module.qkv.bias.shape) == ((FEATURES, HIDDEN // 6), (HIDDEN // 2,))
    sharded = filled(Parts())
    instep.fully_shard(sharded, mesh["tp"])
    with pytest.raises(ValueError, match="divided among ranks already"):
        divide(sharded, mesh, CUTS)
    with torch.device("meta"), pytest.raises(ValueError, match="'experts' is on the meta device"):
        divide(Parts(), mesh, CUTS)


class PeakBytes(TorchDispatchMode):
    """The most bytes that the tensors created inside take at one moment."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and not x.is_meta and x.untyped_storage()._cdata not in inside:
                nbytes = x.untyped_storage().nbytes()
                weakref.finalize(x.untyped_storage(), self.add, -nbytes)
                self.add(nbytes)
        return made

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)


@world(2, tp=2)
def test_the_hash_of_a_large_cut_tensor_takes_the_memory_of_one_round(mesh: Mesh) -> None:
    """An exchange of the whole state took three times the memory of the state, and training with tp=2 more
    than without."""
    module = nn.Linear(4096, 4096)
    cut = Cut("tp", dim=1, unit=4)
    divide(module, mesh, {"weight": cut})
    state = Registered({"model": module}).state()
    with PeakBytes() as peak:
        SharedHash(state.group).digests(state.owned(), 0)
    assert 0 < peak.most < 5 * ROUND_BYTES < module.weight.nbytes
