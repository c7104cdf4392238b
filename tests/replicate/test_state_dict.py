"""State dicts have the module's own names, and any wrapper's are read."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense, Tied
from tests.replicate.replicas import assert_mean_gradients, equal_everywhere, square
from tests.world import world


def wrapped(module: nn.Module) -> DataParallel:
    return DataParallel(module, process_group=world_of_one())


def zeroed(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    return module


def same(module: nn.Module, other: nn.Module) -> bool:
    pairs = zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def with_prefix(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: x for name, x in module.state_dict().items()}


class Nested(nn.Module):
    """A bigger module with a wrapper somewhere inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"dp": inner})
        self.head = nn.Linear(3, 1)


class Confusing(nn.Module):
    """Has a part called ``module``, with names that it also has itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.module = nn.Linear(2, 2)


def test_parts_are_found_by_their_own_names_and_by_those_of_other_wrappers() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = wrapped(module)
    for prefix in ("", "module."):
        assert model.get_submodule(prefix + "1") is module[1]
        assert model.get_parameter(prefix + "0.weight") is module[0].weight
        assert model.get_buffer(prefix + "1.running_mean") is module[1].running_mean
    assert model.get_submodule("module") is module
    assert model.get_submodule("") is model
    with pytest.raises(AttributeError, match="no attribute `2`"):
        model.get_parameter("2.weight")
    confusing = Confusing()
    assert wrapped(confusing).get_parameter("module.weight") is confusing.module.weight
    assert wrapped(confusing).get_parameter("weight") is confusing.weight


def test_names_are_the_module_s_own() -> None:
    module = Tied()
    model = wrapped(module)
    assert list(model.state_dict()) == list(module.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert list(dict(wrapped(nn.BatchNorm1d(2)).named_buffers())) == list(
        dict(nn.BatchNorm1d(2).named_buffers())
    )


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("kind", [Dense, Tied, Confusing])
def test_plain_and_prefixed_state_dicts_load(kind: type[nn.Module], prefix: str) -> None:
    source, target = filled(kind()), zeroed(kind())
    result = wrapped(target).load_state_dict(with_prefix(source, prefix))
    assert not result.missing_keys and not result.unexpected_keys
    assert same(target, source)


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("kind", [Dense, Confusing])
def test_they_load_where_the_wrapper_is_a_part_of_something(kind: type[nn.Module], prefix: str) -> None:
    source, target = filled(Nested(kind())), zeroed(Nested(wrapped(kind())))
    state = source.head.state_dict(prefix="head.") | with_prefix(source.body["dp"], f"body.dp.{prefix}")
    target.load_state_dict(state)
    assert same(target.body["dp"].module, source.body["dp"])
    assert list(target.state_dict()) == list(source.state_dict())


def test_a_missing_name_and_a_surplus_one_are_reported() -> None:
    state = with_prefix(filled(Dense()), "")
    state["surplus"] = state.pop("layers.0.weight")
    with pytest.raises(RuntimeError, match=r"Missing key.*layers.0.weight(.|\n)*Unexpected key.*surplus"):
        wrapped(Dense()).load_state_dict(state)
    result = wrapped(Dense()).load_state_dict(state, strict=False)
    assert len(result.missing_keys) == len(result.unexpected_keys) == 1


@world(2, by="process")
def test_what_ddp_has_saved_loads(mesh: Mesh) -> None:
    source = DistributedDataParallel(filled(Dense()))
    model = DataParallel(zeroed(Dense()))
    model.load_state_dict(source.state_dict())
    assert same(model.module, source.module)
    source.module.load_state_dict(model.state_dict())
    model.close()


@world(2)
def test_a_model_trains_on_after_loading(mesh: Mesh) -> None:
    model = DataParallel(zeroed(Dense()), process_group=mesh)
    model.load_state_dict(filled(Dense()).state_dict())
    square(model, mesh.rank).backward()
    assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2)
def test_a_copy_of_the_inner_module_is_a_plain_module(mesh: Mesh) -> None:
    """An average of the weights, for instance. It can be pickled too."""
    model = DataParallel(filled(Dense()), process_group=mesh)
    square(model, mesh.rank).backward()
    twin = copy.deepcopy(model.module)
    twin.zero_grad()
    if mesh.rank == 0:  # alone, or it would wait for the others
        square(twin, 0).backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert pickle.dumps(model.module)
    assert_mean_gradients(mesh, model.module, square)
    model.close()


@world(2, by="process")
def test_a_copy_of_the_wrapper_is_a_wrapper_of_a_copy(mesh: Mesh) -> None:
    model = DataParallel(filled(Dense()))
    twin = copy.deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    square(twin, mesh.rank).backward()
    assert_mean_gradients(mesh, twin.module, square)
    assert all(p.grad is None for p in model.parameters())
    average.update_parameters(model)
    assert equal_everywhere(mesh, average.parameters())
    for wrapper in (model, twin, average.module):
        wrapper.close()
