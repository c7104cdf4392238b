"""When weights are in memory in stage 3, what parameters show, and what an exception leaves."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.mesh.mesh import Mesh
from tests.parity import numbers
from tests.shard.gathered import (
    LAYERS,
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

LAST = f"layers.{LAYERS - 1}"


@world(2, backend="shm")
def test_between_forward_and_backward_only_the_root_and_the_last_unit_are_whole(mesh: Mesh) -> None:
    module, _ = built()
    with in_slices(mesh, module) as stage3:
        for _ in range(2):
            loss = loss_of(module)
            assert gathered_units(stage3) == ["", LAST]
            loss.backward()
            assert gathered_units(stage3) == []


@world(2)
def test_never_are_more_than_the_root_and_two_units_whole_in_forward_and_three_in_backward(
    mesh: Mesh,
) -> None:
    module, _ = built()
    most = {"forward": 0, "backward": 0}
    with in_slices(mesh, module) as stage3:

        def look(when: str) -> None:
            most[when] = max(most[when], len(gathered_units(stage3)))

        for layer in module.layers:
            layer.feed[1].register_forward_hook(lambda *_: look("forward"))
            layer.feed[1].register_full_backward_hook(lambda *_: look("backward"))
        for _ in range(2):
            loss_of(module).backward()
    assert most["forward"] == 3
    assert 3 <= most["backward"] <= 4


@world(2)
def test_a_unit_whose_gradients_have_come_goes_when_backward_comes_to_another_one(mesh: Mesh) -> None:
    module, _ = built()
    with in_slices(mesh, module) as stage3:
        unit = next(unit for unit in stage3.units if unit.name == LAST)
        left = len(unit.parameters)
        seen: list[list[str]] = []

        def came(p: Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                stage3.closed(unit)
                seen.append(gathered_units(stage3))

        for p in unit.parameters:
            p.register_post_accumulate_grad_hook(came)
        another = module.layers[LAYERS - 2].feed[1]
        another.register_full_backward_hook(lambda *_: seen.append(gathered_units(stage3)))
        loss_of(module).backward()
        first, second = seen
        assert LAST in first and LAST not in second and "" in second


@world(2)
def test_nothing_is_kept_after_a_forward_without_gradients(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module) as stage3:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(module(inputs()), plain(inputs()))
                assert gathered_units(stage3) == []
        loss_of(module).backward()
        loss_of(plain).backward()
        assert_same_gradients(module, plain)


class Raises(Stack):
    where = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 2 and self.where == "forward":
                raise KeyError("in forward")
            if i == 2 and self.where == "backward":
                x.register_hook(self.fail)
        return self.out(x)

    def fail(self, gradient: Tensor) -> None:
        raise KeyError("in backward")


@world(2)
def test_after_an_exception_nothing_stays_and_training_goes_on(mesh: Mesh) -> None:
    module, plain = built(Raises)
    with in_slices(mesh, module) as stage3:
        module.where = "forward" if mesh.rank == 0 else ""
        if mesh.rank == 0:
            with pytest.raises(KeyError):
                module(inputs())
            assert gathered_units(stage3) == []
        module.where = "backward" if mesh.rank == 1 else ""
        if mesh.rank == 1:
            with pytest.raises(KeyError):
                loss_of(module).backward()
            stage3.ended()
            assert gathered_units(stage3) == []
        module.where = ""
        module.zero_grad()
        loss_of(module).backward()
        loss_of(plain).backward()
        assert_same_gradients(module, plain)


@world(2)
def test_a_backward_that_raised_is_forgotten_by_the_next_forward(mesh: Mesh) -> None:
    module, plain = built(Raises)
    with in_slices(mesh, module):
        module.where = "backward"
        with pytest.raises(KeyError):
            loss_of(module).backward()
        module.where = ""
        module.zero_grad()
        loss_of(module).backward()
        loss_of(plain).backward()
        assert_same_gradients(module, plain)


@world(2, backend="shm")
def test_masters_stay_in_float32_where_the_module_computes_in_bfloat16(mesh: Mesh) -> None:
    module, plain = built()
    masters = {name: p.detach().clone() for name, p in plain.named_parameters()}
    plain.to(torch.bfloat16)
    with in_slices(mesh, module, compute_dtype=torch.bfloat16) as stage3:
        loss = module(inputs().bfloat16()).square().mean()
        expected = plain(inputs().bfloat16()).square().mean()
        assert loss.dtype == torch.bfloat16 and torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        assert_same_gradients(module, plain)
        for name, p in module.named_parameters():
            assert torch.equal(stage3.whole(p), masters[name]), name
        assert {unit.slice.dtype for unit in stage3.units} == {torch.float32}


@world(2)
def test_a_new_slice_is_what_the_next_forward_computes_with(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module) as stage3:
        module(inputs())  # leaves the root and the last unit whole
        for unit in stage3.units:
            unit.group.barrier("before the update")
            unit.slice.mul_(0.5)
            unit.group.barrier("after the update")
            unit.share("the update")
        with torch.no_grad():
            for p in plain.parameters():
                p.mul_(0.5)
        assert torch.equal(module(inputs()), plain(inputs()))


@world(2)
def test_the_values_are_those_of_the_first_rank(mesh: Mesh) -> None:
    module, plain = built()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(mesh.rank)
    with in_slices(mesh, module):
        assert torch.equal(module(inputs()), plain(inputs()))


@world(2)
def test_parameters_are_the_same_objects_and_have_no_memory_until_they_are_gathered(mesh: Mesh) -> None:
    module, plain = built()
    before = dict(module.named_parameters())
    with in_slices(mesh, module) as stage3:
        after = dict(module.named_parameters())
        assert all(after[name] is p for name, p in before.items())
        for name, p in plain.named_parameters():
            assert after[name].shape == p.shape and after[name].dtype == p.dtype
            assert after[name].untyped_storage().nbytes() == 4
        with stage3.gathered():
            for name, p in plain.named_parameters():
                assert torch.equal(after[name], p) and after[name].stride() == p.stride()
        with stage3.gathered([after["into.bias"]]):
            assert gathered_units(stage3) == [""]
        assert gathered_units(stage3) == []


@world(2)
def test_a_parameter_that_is_used_without_its_module_is_named(mesh: Mesh) -> None:
    module, _ = built()
    with in_slices(mesh, module) as stage3:
        told: list[str | None] = []
        weight = module.layers[1].feed[0].weight
        weight.register_post_accumulate_grad_hook(lambda p: told.append(stage3.problem(p)))
        with torch._C.DisableTorchFunctionSubclass():  # as an extension in C++ takes it
            F.linear(numbers(2, WIDTH, key="x"), weight).sum().backward()
        loss_of(module).backward()
        assert len(told) == 2 and told[1] is None
        assert told[0] is not None and "'layers.1.feed.0.weight' was used outside" in told[0]


class Method(Stack):
    """Something that is not the forward uses a parameter of the root, beside modules of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(12))

    def encode(self, x: Tensor) -> Tensor:
        return self.out(self.layers[0](self.into(x + self.bias)))


@world(2)
def test_a_parameter_that_a_method_uses_while_its_unit_is_gathered_for_another_is_named(mesh: Mesh) -> None:
    module, _ = built(Method)
    with in_slices(mesh, module) as stage3:
        told: dict[str, str | None] = {}
        for name, p in module.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: told.__setitem__(name, stage3.problem(p))
            )
        with torch._C.DisableTorchFunctionSubclass():
            module.encode(inputs()).sum().backward()
        assert {name for name, problem in told.items() if problem is not None} == {"bias"}


@world(2)
def test_a_module_without_its_stage_is_collected(mesh: Mesh) -> None:
    module, _ = built()
    with in_slices(mesh, module) as stage3:
        loss_of(module).backward()
        gone = weakref.ref(stage3)
    del stage3, module
    gc.collect()
    assert gone() is None
