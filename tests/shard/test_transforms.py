"""Transforms of torch.func around modules with weights in slices: right, or an error that says what to do.

In processes: threads share the levels of forward mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

from instep.mesh.mesh import Mesh
from instep.shard.fully import fully_shard
from tests.parity import bits
from tests.shard.gathered import assert_same_gradients, built, gathered_units, in_slices, inputs, loss_of
from tests.world import world


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
    for name, differentiate in DIFFERENTIATE.items():
        if name != "grad by weights":
            assert torch.equal(bits(differentiate(model, inputs())), bits(differentiate(plain, inputs())))
    with pytest.raises(ValueError, match=r"'into\.weight' was not there.*functional_call.*submodules"):
        with_own_weights(model, inputs())
    model.close()
