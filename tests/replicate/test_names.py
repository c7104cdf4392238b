"""Names of a wrapped model: all that takes one knows what the wrapper gives, and what torch's would.

``functional_call`` sets attributes that it does not find. A weight of the wrapped module itself was one: the
call went through with the old weights, and a program of meta-learning trained another thing than it said.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense, Tied
from tests.replicate.replicas import equal_everywhere, gradients, samples
from tests.world import world


def wrapped(module: nn.Module) -> DataParallel:
    return DataParallel(module, process_group=world_of_one())


class Inner(nn.Module):
    """With a weight of its own, and a buffer; a part may be called as the wrapper calls its module."""

    def __init__(self, name: str = "module") -> None:
        super().__init__()
        self.name = name
        self.register_module(name, nn.Linear(6, 6))
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.name)(x) * self.scale + self.shift


@pytest.mark.parametrize("make", [Dense, Tied, Inner, lambda: nn.Linear(6, 3)])
def test_what_a_wrapper_names_it_finds(make) -> None:
    model = wrapped(make())
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is model.get_parameter(f"module.{name}") is parameter
    for name, buffer in model.named_buffers():
        assert model.get_buffer(name) is buffer
    for name, part in model.named_modules():
        assert model.get_submodule(name) is (part if name else model)
    assert list(model.modules()) == [model, *model.module.modules()]
    with pytest.raises(AttributeError, match="nowhere"):
        model.get_parameter("nowhere.weight")


@pytest.mark.parametrize("make", [Dense, lambda: nn.Linear(6, 3)])
def test_parameters_are_sorted_by_the_module_that_has_them(make) -> None:
    """As minGPT does, which joins the names of modules and of their parameters."""
    model = wrapped(make())
    decay, rest = set(), set()
    for module_name, part in model.named_modules():
        for name, _ in part.named_parameters():
            full = f"{module_name}.{name}" if module_name else name
            if name.endswith("bias"):
                rest.add(full)
            elif isinstance(part, nn.Linear):
                decay.add(full)
    assert not decay & rest
    assert decay | rest == dict(model.named_parameters()).keys()


def test_a_wrapper_within_a_module_has_no_name_of_its_own() -> None:
    outer = nn.ModuleDict({"part": wrapped(filled(Dense()))})
    assert [name for name, _ in outer.named_parameters()] == list(outer.state_dict())


def adapted(model: nn.Module, x: Tensor, prefix: str) -> Tensor:
    """The loss after one step of gradient descent on ``x``, differentiable: model-agnostic meta-learning."""
    weights = {prefix + name: p for name, p in model.named_parameters()}
    loss = functional_call(model, weights, (x,)).square().mean()
    parts = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    fast = {name: p - 0.5 * g for (name, p), g in zip(weights.items(), parts, strict=True)}
    return functional_call(model, fast, (x + 1,)).square().mean()


@pytest.mark.parametrize("prefix", ["", "module."])
@world(2)
def test_meta_learning_through_functional_call(mesh: Mesh, prefix: str) -> None:
    for make in (Dense, lambda: Inner("part"), lambda: nn.Linear(6, 3)):
        module = filled(make())
        alone = copy.deepcopy(module)
        model = DataParallel(module, process_group=mesh)
        adapted(model, samples(mesh.rank), prefix).backward()
        sum(adapted(alone, samples(rank), "") / 2 for rank in range(2)).backward()
        for ours, theirs in zip(gradients(module), gradients(alone), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert equal_everywhere(mesh, gradients(module))
        assert vars(model).keys().isdisjoint(dict(module.named_parameters()))
        model.close()


def both(name: str) -> nn.Module:
    """Has a part called ``module``, and a weight of its own called as one of that part's."""
    module = Inner("module")
    module.register_parameter(name, nn.Parameter(torch.ones(6)))
    return module


@pytest.mark.parametrize("make", [Inner, lambda: both("weight"), lambda: both("bias")])
@pytest.mark.parametrize("only", ["", "module."])
def test_a_name_with_two_meanings_is_refused_and_not_guessed(make, only: str) -> None:
    """Own names led to another tensor, or to none: the call went through with the old weights."""

    def zeros(module: nn.Module) -> dict[str, Tensor]:
        return {n: torch.zeros_like(p) for n, p in module.named_parameters() if n.startswith(only)}

    model, x = wrapped(filled(make())), samples(0)
    with pytest.raises(ValueError, match=r"'module\.(weight|bias)' is a tensor of this .*on model.module"):
        functional_call(model, zeros(model), (x,))
    assert not {"weight", "bias"} & vars(model.module).keys()
    model = wrapped(filled(make()))
    expected = functional_call(filled(make()), zeros(model), (x,))
    assert torch.equal(functional_call(model.module, zeros(model), (x,)), expected)
    every = {f"module.{name}": torch.zeros_like(p) for name, p in model.named_parameters()}
    assert not functional_call(model, every, (x,)).any()  # with the prefix, all of them are meant
    assert model(x).any()


class Pretrained(nn.Linear):
    """With what a library's models have beside parameters."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.config = {"width": 2}
        self._private = 1

    def save_pretrained(self, directory: list[nn.Module]) -> None:
        directory.append(self)

    def close(self) -> None:
        raise AssertionError("the wrapper has one of its own")


def test_what_a_module_has_for_others_is_reached_through_its_wrapper() -> None:
    """accelerate's ``unwrap_model`` does not know the wrapper; ``save_pretrained`` follows all the same."""
    module = Pretrained()
    model = wrapped(module)
    saved: list[nn.Module] = []
    model.save_pretrained(saved)
    assert saved == [module]
    assert model.config is module.config
    assert not hasattr(model, "_private")
    with pytest.raises(AttributeError, match="'Pretrained' object has no attribute 'nowhere'"):
        model.nowhere  # noqa: B018
    model.close()


@world(2)
def test_weights_of_the_call_alone_are_the_rank_s_own(mesh: Mesh) -> None:
    """A rank adapts a copy of the weights to its own task, with an optimizer of its own, as under DDP."""
    module = filled(Dense())
    model = DataParallel(module, process_group=mesh)
    fast = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    functional_call(model, fast, (samples(mesh.rank),)).square().mean().backward()
    torch.optim.SGD(fast.values(), lr=0.1).step()
    assert gradients(module) == [None] * 6
    assert not equal_everywhere(mesh, fast.values())
    model.close()
