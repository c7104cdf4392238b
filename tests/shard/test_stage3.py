"""Stage 3 computes what the plain module does, bit by bit, also under transforms of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from instep.mesh.mesh import Mesh
from instep.shard.fully import fully_shard
from tests.parity import bits, numbers
from tests.shard.gathered import (
    WIDTH,
    Stack,
    assert_same_gradients,
    built,
    gathered_units,
    in_slices,
    inputs,
    loss_of,
)
from tests.world import world


def compare(mesh: Mesh, kind: Callable[[], nn.Module] = Stack, **options: Any) -> None:
    """Three forwards and backwards, other inputs on every rank, against the plain module."""
    module, plain = built(kind)
    with in_slices(mesh, module, **options) as stage3:
        for step in range(3):
            loss, expected = loss_of(module, mesh.rank + step), loss_of(plain, mesh.rank + step)
            assert torch.equal(loss, expected)
            loss.backward()
            expected.backward()
        assert_same_gradients(module, plain)
        assert gathered_units(stage3) == []


@world(2)
def test_two_ranks_compute_the_bits_of_the_plain_module(mesh: Mesh) -> None:
    compare(mesh)


class CheckpointedPairs(Stack):
    """Two units in one checkpoint, and one that begins in the middle of a unit."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=False):
            x = checkpoint(lambda y, a=first, b=second: b(a(y)), x, use_reentrant=True)
        x = x + checkpoint(self.layers[-1].feed, x, use_reentrant=True)
        return self.out(x)


@world(2)
def test_reentrant_checkpointing_of_several_units_and_of_a_part_of_one_computes_the_same_bits(
    mesh: Mesh,
) -> None:
    compare(mesh, CheckpointedPairs)


class Frozen(Stack):
    """A frozen stack of layers with something small beside each that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad_(False)
        for layer in self.layers:
            layer.gain.requires_grad_(True)
            layer.prompt = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x) + layer.prompt
        return self.out(x)


@world(2)
def test_frozen_weights_are_in_slices_too_and_nothing_changes(mesh: Mesh) -> None:
    compare(mesh, Frozen)


class AuxiliaryLoss(Stack):
    """Every layer leaves a loss of its own behind, which no output leads to."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        losses = []
        for layer in self.layers:
            x = layer(x)
            losses.append(layer.feed[0](x).square().mean())
        return self.out(x) + torch.stack(losses).sum()


@world(2)
def test_layers_of_a_unit_that_are_called_by_themselves_find_their_weights(mesh: Mesh) -> None:
    compare(mesh, AuxiliaryLoss)


@world(2)
def test_submodules_can_be_called_directly(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module) as stage3:
        for m in (module, plain):
            m.layers[2](m.layers[1].feed(numbers(4, WIDTH, key="x"))).square().mean().backward()
        assert_same_gradients(module, plain)
        assert gathered_units(stage3) == []


@world(3)
def test_a_rank_may_compute_alone_run_other_units_or_nothing_at_all(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module):
        if mesh.rank == 0:
            for _ in range(3):
                assert torch.equal(module(inputs()), plain(inputs()))
        if mesh.rank == 1:
            x, y = numbers(4, WIDTH, key="x"), numbers(4, WIDTH, key="x")
            for i in (4, 0, 2, 0):
                x, y = module.layers[i](x), plain.layers[i](y)
            x.sum().backward()
            y.sum().backward()
            assert_same_gradients(module, plain)


@world(2)
def test_two_forwards_before_their_backwards_and_a_graph_that_is_used_twice(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module):
        for m in (module, plain):
            first, second = loss_of(m, 0), loss_of(m, 1)
            first.backward(retain_graph=True)
            second.backward()
            first.backward()
        assert_same_gradients(module, plain)


@world(2)
def test_gradients_of_gradients_find_their_weights(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module) as stage3:
        for m in (module, plain):
            x = inputs().requires_grad_()
            (slope,) = torch.autograd.grad(m(x).square().mean(), x, create_graph=True)
            slope.square().sum().backward()
        assert_same_gradients(module, plain)
        assert gathered_units(stage3) == []


# Transforms of torch.func around modules with weights in slices: right, or an error that says what to do.
# In processes: threads share the levels of forward mode.


def total(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x).square().sum()


def with_own_weights(module: nn.Module, x: Tensor) -> Any:
    own = dict(module.named_parameters())
    return grad(lambda given: functional_call(module, given, (x,)).square().sum())(own)["out.weight"]


def per_sample(module: nn.Module, x: Tensor) -> Tensor:
    return vmap(grad(total(module)))(x)


DIFFERENTIATE: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda module, x: grad(total(module))(x),
    "grad by weights": with_own_weights,
    "grad of samples": per_sample,
    "vjp": lambda module, x: vjp(module, x)[0],
    "jvp": lambda module, x: jvp(module, (x,), (x,))[1],
    "jacrev": lambda module, x: jacrev(module)(x),
    "jacfwd": lambda module, x: jacfwd(module)(x),
}
KEEP = pytest.mark.parametrize("keep", [False, True])


@KEEP
@pytest.mark.parametrize("transform", DIFFERENTIATE)
@world(2, by="process")
def test_weights_are_not_gathered_inside_of_a_transform_and_training_goes_on(
    mesh: Mesh, transform: str, keep: bool
) -> None:
    module, plain = built()
    with in_slices(mesh, module, reshard_after_forward=not keep) as stage3:
        for _ in range(2):
            with pytest.raises(
                RuntimeError,
                match=r"weights of unit '.*' \(.*out\.weight.*\) were needed inside of a transform of torch"
                r"\.func .* use stage=2 without compute_dtype",
            ):
                DIFFERENTIATE[transform](module, inputs())
            loss_of(module).backward()
            loss_of(plain).backward()
            assert_same_gradients(module, plain)
        assert gathered_units(stage3) == []


def feeding(layer: Any, transform: str) -> Callable[[Tensor], Tensor]:
    """A forward of ``layer`` that differentiates by its input, with all of its weights."""

    def inner(x: Tensor) -> Tensor:
        return layer.feed(layer.norm(x)) * layer.gain

    def forward(x: Tensor) -> Tensor:
        if transform == "grad":
            return x + grad(lambda y: inner(y).square().sum())(x)
        if transform == "vjp":
            value, back = vjp(inner, x)
            return x + back(value)[0]
        return x + jvp(inner, (x,), (x,))[1]

    return forward


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp"])
@world(2, by="process")
def test_a_unit_differentiates_itself_where_its_weights_stay(mesh: Mesh, transform: str) -> None:
    module, plain = built()
    for m in (module, plain):
        for layer in m.layers:
            layer.forward = feeding(layer, transform)
    with in_slices(mesh, module, reshard_after_forward=False) as stage3:
        for _ in range(2):
            loss_of(module).backward()
            loss_of(plain).backward()
            assert_same_gradients(module, plain)
        assert gathered_units(stage3) == []


@KEEP
@world(2, by="process")
def test_vmap_and_functional_calls_see_the_weights(mesh: Mesh, keep: bool) -> None:
    module, plain = built()
    with in_slices(mesh, module, reshard_after_forward=not keep) as stage3:
        for m in (module, plain):
            vmap(m)(inputs()).square().mean().backward()
            functional_call(m, dict(m.named_parameters()), (inputs(),)).square().mean().backward()
        assert_same_gradients(module, plain)
        assert gathered_units(stage3) == []


@world(2, by="process")
def test_stage_2_differentiates_as_it_is_told(mesh: Mesh) -> None:
    module, plain = built()
    model = fully_shard(module, mesh, 2)
    for differentiate in DIFFERENTIATE.values():
        assert torch.equal(bits(differentiate(model, inputs())), bits(differentiate(plain, inputs())))
    model.close()
