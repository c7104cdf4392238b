"""What cannot be cut, or not together with something else: one sentence each, on every rank."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep import expert, tensor
from instep.mesh.mesh import Mesh
from tests.parity import filled, numbers
from tests.world import world


class Net(nn.Module):
    """A layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.padded = nn.Embedding(64, 32, padding_idx=0)
        self.idle = nn.Identity()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.narrow = nn.Linear(32, 40)
        self.tied = nn.Linear(32, 64)
        self.tied.weight = self.tokens.weight
        self.conv = nn.Conv1d(32, 32, 1)
        self.hooked = nn.Linear(32, 64)
        self.hooked.register_forward_hook(lambda *_: None)
        self.hooked_norm = nn.LayerNorm(32)
        self.hooked_norm.register_forward_pre_hook(lambda *_: None)
        self.statistics = nn.BatchNorm1d(32)
        self.norms = nn.Sequential(nn.LayerNorm(32))


COLUMN, ROW = tensor.Column(), tensor.Row()
PLANS: dict[str, tuple[Any, Any, str]] = {
    "heads": ({"up": tensor.Column(heads=3)}, 4, "'up.weight' has 3 heads, which tp(2) ranks cannot share"),
    "chunks that are no power of two": ({"up": COLUMN}, 6, "chunks=6 for tp(2): expected a power of two"),
    "fewer chunks than ranks": ({"up": COLUMN}, 1, "chunks=1 for tp(2): expected a power of two that tp"),
    "too many chunks": ({"up": COLUMN}, 512, "chunks=512 for tp(2)"),
    "a narrow layer": ({"narrow": COLUMN}, 2, "narrow: 40 in 2 chunks of 20: expected a multiple of 16"),
    "a name": ({"ups": COLUMN}, 2, "plan['ups'] matches no module"),
    "a style": ({"up": "columns"}, 2, "plan['up']: expected Column, Row, Vocabulary"),
    "another layer": ({"conv": COLUMN}, 2, "conv: expected nn.Linear for Column(), got Conv1d"),
    "an embedding in columns": ({"tokens": ROW}, 2, "tokens: expected nn.Linear for Row(), got Embedding"),
    "hooks": ({"hooked": COLUMN}, 2, "hooked has hooks, which the layer in its place would not call"),
    "tied, cut in two ways": (
        {"tokens": tensor.Vocabulary(), "tied": ROW},
        2,
        "parameter 'tokens.weight' is tied, and the plan cuts it as",
    ),
    "tied, cut in one layer": ({"tokens": tensor.Vocabulary()}, 2, "but as a whole in 'tied.weight'"),
    "tied, whole in the first layer": (
        {"tied": COLUMN},
        2,
        "heads=0), but as a whole in 'tokens.weight'",
    ),
    "the module itself": ({"": COLUMN}, 2, "plan[''] matches no module"),
    "padding": ({"padded": tensor.Vocabulary()}, 2, "padded: an embedding with padding_idx cannot be cut"),
    "hooks of a norm": ({"hooked_norm": tensor.Sequence()}, 2, "hooked_norm has hooks, which the layer in"),
    "a norm with statistics": ({"statistics": tensor.Sequence()}, 2, "statistics: expected a norm or nn.D"),
    "a module of norms": ({"norms": tensor.Sequence()}, 2, "norms: expected a norm or nn.Dropout for Sequ"),
    "no norm": ({"idle": tensor.Sequence()}, 2, "idle: expected a norm or nn.Dropout for Sequence()"),
}


@world(2, tp=2)
@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_does_not_fit_is_refused(mesh: Mesh, case: str) -> None:
    plan, chunks, said = PLANS[case]
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        tensor.shard(Net(), mesh, plan, chunks)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Linear(32, 64), nn.Linear(64, 32), nn.Identity())


SLICED = {"0": tensor.scatter, "1": COLUMN, "2": ROW, "3": tensor.gather}


def cut(mesh: Mesh, **options: Any) -> nn.Sequential:
    net = filled(mlp())
    tensor.shard(net, mesh, SLICED, 2, **options)
    return net


def lopsided(mesh: Mesh) -> None:
    tensor.shard(mlp(), mesh, {"1": COLUMN}, chunks=2 + 2 * mesh.rank)


def on_meta(mesh: Mesh) -> None:
    with torch.device("meta"):
        net = mlp()
    tensor.shard(net, mesh, {"1": COLUMN}, 2)


def cut_after_wrapping(mesh: Mesh) -> None:
    net = mlp()
    model = instep.DataParallel(net, mesh)
    try:
        tensor.shard(net, mesh, {"1": COLUMN}, 2)
    finally:
        model.close()


def norm_after_slices(mesh: Mesh) -> None:
    net = filled(nn.Sequential(*mlp(), nn.LayerNorm(32)))
    tensor.shard(net, mesh, {**SLICED, "4": tensor.Sequence()}, 2, sequence=True)
    net(numbers(2, 4, 32, key="x"))


def batches_after_evaluation(mesh: Mesh) -> None:
    net = cut(mesh)
    with torch.no_grad():
        net(numbers(4, 32, key="x"))
    net(numbers(4, 32, key=f"x of rank {mesh.rank}"))


def cross_entropy(mesh: Mesh, **changes: Any) -> None:
    net = cut(mesh)
    layer: Any = net[1]
    options = {"logits": numbers(4, 32, key="x"), "targets": torch.arange(4), "layer": layer} | changes
    tensor.cross_entropy(**options)


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dim() == 2]


def stepped_by_muon(mesh: Mesh) -> None:
    model = instep.DataParallel(cut(mesh), mesh)
    model(numbers(4, 32, key="x")).sum().backward()
    torch.optim.Muon(matrices(model)).step()


def sharded_muon(mesh: Mesh) -> None:
    model = cut(mesh)
    instep.ShardedOptimizer(matrices(model), torch.optim.Muon, mesh)


USES: dict[str, tuple[Callable[[Mesh], object], str]] = {
    "ranks with other chunks": (lopsided, "the ranks differ in options: chunks=2 on rank 0, but chunks=4"),
    "the meta device": (on_meta, "parameter '1.weight' is on the meta device: give the module values first"),
    "slices without an edge": (
        lambda mesh: tensor.shard(mlp(), mesh, {"1": COLUMN, "2": ROW}, 2, sequence=True),
        "sequence=True with a plan without scatter and gather",
    ),
    "a sequence that is no multiple": (
        lambda mesh: cut(mesh, sequence=True)(numbers(2, 5, 32, key="x")),
        "expected (B, T, D) with T a multiple of chunks(2), got (2, 5, 32)",
    ),
    "rows for slices": (
        lambda mesh: cut(mesh, sequence=True)(numbers(4, 32, key="x")),
        "expected (B, T, D) with T a multiple of chunks(2), got (4, 32)",
    ),
    "a norm after the slices": (norm_after_slices, "expected a slice of 2 tokens, got 4: the plan has"),
    "a row of whole features": (
        lambda mesh: tensor.shard(mlp(), mesh, {"2": ROW}, 2)(numbers(4, 32, key="x")),
        "expected 32 of 64 features for Row(), got 64: the plan has to cut",
    ),
    "fused layers that are gathered": (
        lambda mesh: tensor.Column(parts=3, gathers_output=True),
        "parts=3 of fused layers with gathers_output or is_vocabulary: expected parts=1",
    ),
    "ranks with other batches after the same evaluation": (
        batches_after_evaluation,
        "rank 1 computes another batch than rank 0, and they share layers (tp)",
    ),
    "ranks with other batches": (
        lambda mesh: cut(mesh)(numbers(4, 32, key=f"x of rank {mesh.rank}")),
        "rank 1 computes another batch than rank 0, and they share layers (tp)",
    ),
    "logits of another width": (
        lambda mesh: cross_entropy(mesh, logits=numbers(4, 64, key="x")),
        "expected the 32 logits of this rank, got 64",
    ),
    "a layer that is whole": (
        lambda mesh: cross_entropy(mesh, layer=nn.Linear(1, 1)),
        "cut by instep.tensor.Column(), got a Linear",
    ),
    "another reduction": (
        lambda mesh: cross_entropy(mesh, reduction="max"),
        "reduction='max': expected 'mean'",
    ),
    "a target outside": (
        lambda mesh: cross_entropy(mesh, targets=torch.tensor([1, 2, 3, 64])),
        "expected tokens from 0 to 63, the vocabulary's",
    ),
    "a token outside": (
        lambda mesh: tensor.shard(nn.Sequential(nn.Embedding(40, 8)), mesh, {"0": tensor.Vocabulary()}, 2)(
            torch.tensor([39, 40])
        ),
        "expected tokens from 0 to 39, the vocabulary's",
    ),
    "fully_shard": (
        lambda mesh: instep.fully_shard(cut(mesh), mesh["tp"]),
        "parameter '1.weight' is of a layer cut along tp or ep already, and fully_shard would divide it",
    ),
    "blocks of int8": (
        lambda mesh: instep.DataParallel(cut(mesh), mesh, nodes="int8"),
        "nodes=int8, nearest with layers that are cut over ranks",
    ),
    "stochastic rounding": (
        lambda mesh: instep.DataParallel(cut(mesh), mesh, nodes="bfloat16", rounding="stochastic"),
        "nodes=bfloat16, stochastic with layers that are cut over ranks",
    ),
    "an optimizer of matrices": (stepped_by_muon, "is cut over ranks, and Muon may look at whole parameters"),
    "an optimizer of whole matrices": (
        sharded_muon,
        "the optimizer looks at whole parameters, and those of layers cut along tp or ep are parts",
    ),
    "a wrapper before the cut": (cut_after_wrapping, "belongs to a DataParallel already"),
    "a copy": (lambda mesh: copy.deepcopy(cut(mesh)), "cannot be copied or pickled: copy it before shard"),
    "experts that are cut twice": (
        lambda mesh: expert.shard(expert.shard(expert.MoE(32, 32, 4), mesh), mesh),
        "parameter 'up' is cut already: shard a module once",
    ),
    "a state dict": (lambda mesh: cut(mesh).state_dict(), "full_state_dict"),
}


@world(2, tp=2)
@pytest.mark.parametrize("case", USES)
def test_a_use_that_would_be_wrong_is_refused(mesh: Mesh, case: str) -> None:
    use, said = USES[case]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=re.escape(said)):
        use(mesh)
