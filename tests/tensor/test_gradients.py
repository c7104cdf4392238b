"""Gradients of cut layers are those of the same model on one process, and those of torch's own styles."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from instep import tensor
from instep.mesh.mesh import Mesh
from instep.models.transformer import GPT
from tests.parity import filled, numbers
from tests.tensor.trained import GPT_CONFIG, Placed, cut_gpt, loss_of, tokens, whole_gradients
from tests.world import world

Builder = Callable[[], nn.Module]
EXACT, SINGLE, HALF = 1e-12, 2e-5, 5e-2  # in float64, float32, bfloat16: of the norm of a gradient


def expect_same(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        error, norm = (gradient.double() - expected[name].double()).norm(), expected[name].double().norm()
        assert error <= tolerance * norm, f"{name}: {error:.2e} of {norm:.2e}"


def gradients_of_one(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """In float64."""
    module = module.double()
    loss(module).backward()
    return whole_gradients(module)


# Layers by themselves, in float64.


def mlp(*, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(24, 64, bias=bias), nn.GELU(), nn.Linear(64, 24, bias=bias))


def shared() -> nn.Module:
    """Both pairs of layers are the same objects."""
    layers = [*mlp().children()]
    return nn.Sequential(*layers, nn.Sequential(*layers))


def token_table() -> nn.Module:
    return nn.Sequential(nn.Embedding(37, 24), nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))


def normed(*norms: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Identity(), *norms, nn.Dropout(0.0), *mlp(), nn.Identity())


MLP = {"0": tensor.Column(), "2": tensor.Row()}
SLICED = {
    "0": tensor.scatter,
    "[12]": tensor.Sequence(),
    "3": tensor.Column(),
    "5": tensor.Row(),
    "6": tensor.gather,
}
LAYERS: dict[str, tuple[Builder, Any, Tensor]] = {
    "a column and a row": (mlp, MLP, numbers(2, 8, 24, key="x")),
    "without a bias": (lambda: mlp(bias=False), MLP, numbers(2, 8, 24, key="x")),
    "rows without a sequence": (mlp, MLP, numbers(6, 24, key="x")),
    "a sequence of odd length": (mlp, MLP, numbers(2, 7, 24, key="x")),
    "one row": (mlp, MLP, numbers(24, key="x")),
    "no rows": (mlp, MLP, numbers(0, 8, 24, key="x")),
    "layers with two names": (
        shared,
        {**MLP, "3.0": tensor.Column(), "3.2": tensor.Row()},
        numbers(2, 8, 24, key="x"),
    ),
    "images of patches": (mlp, MLP, numbers(2, 8, 3, 24, key="x")),
    "a gathered column": (mlp, {"0": tensor.Column(gathers_output=True)}, numbers(2, 8, 24, key="x")),
    "a vocabulary of 37": (
        token_table,
        {"0": tensor.Vocabulary(), "1": tensor.Column(), "3": tensor.Row()},
        (numbers(2, 8, key="tokens").abs() * 20).long(),
    ),
    "layer norm and dropout": (
        lambda: normed(nn.LayerNorm(24)),
        SLICED,
        numbers(2, 8, 24, key="x"),
    ),
    "RMS norm": (lambda: normed(nn.RMSNorm(24)), SLICED, numbers(2, 8, 24, key="x")),
}


@world(2, tp=2)
@pytest.mark.parametrize("chunks", [2, None])
@pytest.mark.parametrize("layers", LAYERS)
def test_cut_layers_have_the_gradients_of_whole_ones(mesh: Mesh, layers: str, chunks: int | None) -> None:
    build, plan, x = LAYERS[layers]

    def loss(module: nn.Module) -> Tensor:
        inside = x.double() if x.is_floating_point() else x
        return module(inside).square().sum()

    expected = gradients_of_one(filled(build()), loss)
    module = filled(build()).double()
    tensor.shard(module, mesh, plan, chunks, sequence=tensor.scatter in plan.values())
    loss(module).backward()
    expect_same(whole_gradients(module), expected, EXACT)


@pytest.mark.parametrize("x", [numbers(6, 24, key="x"), numbers(2, 7, 24, key="x")], ids=["rows", "sequence"])
def test_one_rank_with_one_chunk_has_the_gradients_of_whole_layers(x: Tensor) -> None:
    """Rows without a sequence were taken for one of their features: the bias got one element."""
    world(1)(one_chunk)(x=x)


def one_chunk(mesh: Mesh, x: Tensor) -> None:
    module = tensor.shard(filled(mlp()), mesh, MLP, chunks=None)
    module(x).square().sum().backward()
    expected = gradients_of_one(filled(mlp()), lambda whole: whole(x.double()).square().sum())
    expect_same(whole_gradients(module), expected, SINGLE)


# A whole model.


GPTS = {
    "cut logits": Placed(),
    "gathered logits": Placed(gathers_logits=True),
    "sequence": Placed(sequence=True),
    "sequence, gathered logits": Placed(sequence=True, gathers_logits=True),
}


@world(2, tp=2)
@pytest.mark.parametrize("checkpoint", [False, True], ids=["activations kept", "activation checkpointing"])
@pytest.mark.parametrize("kind", GPTS)
def test_a_gpt_has_the_gradients_of_one_process(mesh: Mesh, kind: str, checkpoint: bool) -> None:
    x = tokens(0)
    whole = filled(GPT(GPT_CONFIG))
    expected = gradients_of_one(whole, lambda net: loss_of(whole, net(x[:, :-1]), x[:, 1:]))
    net = cut_gpt(mesh, GPTS[kind])
    net.config = replace(net.config, checkpoint=checkpoint)
    loss_of(net, net(x[:, :-1]), x[:, 1:]).backward()
    expect_same(whole_gradients(net), expected, SINGLE)


@world(2, tp=2)
@pytest.mark.parametrize("sequence", [False, True])
def test_autocast_computes_in_bfloat16(mesh: Mesh, sequence: bool) -> None:
    x = tokens(0)
    whole = filled(GPT(GPT_CONFIG))
    expected = gradients_of_one(whole, lambda net: loss_of(whole, net(x[:, :-1]), x[:, 1:]))
    net = cut_gpt(mesh, Placed(sequence=sequence))
    kinds: list[torch.dtype] = []
    net.blocks[0].feed_forward.up.register_forward_hook(lambda _, __, y: kinds.append(y.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(x[:, :-1])
    loss_of(net, logits, x[:, 1:]).backward()
    assert kinds == [torch.bfloat16]
    expect_same(whole_gradients(net), expected, HALF)


# The loss.


@world(2, tp=2)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [0, 5], ids=["all count", "some are ignored"])
def test_the_split_softmax_is_the_cross_entropy_of_torch(mesh: Mesh, reduction: str, ignored: int) -> None:
    x, targets = numbers(3, 4, 24, key="x"), (numbers(3, 4, key="targets").abs() * 15).long()
    targets.view(-1)[:ignored] = -1
    weight = numbers(3, 4, key="of each token") if reduction == "none" else torch.tensor(1.0)
    head = nn.Sequential(filled(nn.Linear(24, 37)))
    whole = deepcopy(head).double()
    logits = whole(x.double()).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), reduction=reduction, ignore_index=-1)
    if reduction == "none":
        expected = expected.view(3, 4)
    (expected * weight).sum().backward()
    tensor.shard(head, mesh, {"0": tensor.Column(is_vocabulary=True)}, chunks=2)
    cut: Any = head[0]
    loss = tensor.cross_entropy(head(x), targets, cut, reduction=reduction, ignore_index=-1)
    assert torch.allclose(loss.double(), expected, rtol=1e-5)
    (loss * weight).sum().backward()
    expect_same(whole_gradients(head), whole_gradients(whole), SINGLE)


def test_a_loss_of_large_logits_is_finite() -> None:
    world(2, tp=2)(large_logits)()


def large_logits(mesh: Mesh) -> None:
    head = nn.Sequential(filled(nn.Linear(24, 64)))
    tensor.shard(head, mesh, {"0": tensor.Column()}, chunks=2)
    cut: Any = head[0]
    loss = tensor.cross_entropy(head(1e4 * numbers(5, 24, key="x")), torch.arange(5), cut)
    loss.backward()
    assert loss.isfinite() and all(x.isfinite().all() for x in whole_gradients(head).values())


# Another implementation.


@world(2, by="process", tp=2)
def test_torchs_styles_have_the_same_gradients(mesh: Mesh) -> None:
    x = numbers(2, 8, 24, key="x")
    theirs = filled(mlp())
    parallelize_module(theirs, DeviceMesh("cpu", [0, 1]), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    y = theirs(x)
    y.square().sum().backward()
    ours = tensor.shard(filled(mlp()), mesh, MLP, chunks=2)
    assert torch.allclose(ours(x), y, rtol=1e-5, atol=1e-5)
    ours(x).square().sum().backward()
    expected = {}
    for name, p in theirs.named_parameters():
        assert isinstance(p.grad, DTensor)
        expected[name] = p.grad.full_tensor()
    expect_same(whole_gradients(ours), expected, SINGLE)
