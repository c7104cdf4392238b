"""A wrapper is its module, but for what the wrapper defines: names, attributes, state dicts, copies."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from tests.parity import filled, world_of_one
from tests.replicate.nets import WIDTH, Dense, Tied
from tests.replicate.replicas import samples, square
from tests.world import world


def wrapped(module: nn.Module) -> DataParallel:
    return DataParallel(module, process_group=world_of_one())


class Scaled(nn.Module):
    """Forward reads a number, a buffer, a submodule, a property and an attribute that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature, self._offset = nn.Linear(WIDTH, WIDTH), 1.0, 0.0
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH))

    @property
    def offset(self) -> float:
        return self._offset

    @offset.setter
    def offset(self, value: float) -> None:
        self._offset = 2 * value

    def close(self) -> None:
        raise AssertionError("the wrapper has one of its own")

    def cooled(self) -> nn.Module:
        self.temperature = 0.5
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale * self.temperature + self.shift + self.offset
        return x if getattr(self, "last", None) is None else self.last(x)


def edit(model: nn.Module) -> None:
    model.temperature = 3.0
    model.offset = 1.0
    model.shift = torch.ones(WIDTH)
    model.linear = filled(nn.Linear(WIDTH, WIDTH, bias=False))
    model.scale.data = torch.full((WIDTH,), 2.0)
    model.add_module("last", filled(nn.Linear(WIDTH, 2)))
    model.register_buffer("position", torch.zeros(1))
    model.register_parameter("extra", nn.Parameter(torch.zeros(1)))


def test_what_is_set_through_a_wrapper_reaches_the_module() -> None:
    """A read through the wrapper said that it was set, and forward computed without it."""
    model, plain = wrapped(filled(Scaled())), filled(Scaled())
    edit(model)
    edit(plain)
    assert torch.equal(model.module(samples(0)), plain(samples(0)))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert vars(model).keys().isdisjoint({*vars(plain), "last", "scale"})
    del model.last
    assert not hasattr(model.module, "last") and not hasattr(model, "nowhere")
    with pytest.raises(AttributeError, match="a wrapper keeps its module"):
        model.module = plain
    model.close()  # the wrapper's


@pytest.mark.parametrize("make", [Dense, Tied, Scaled, lambda: nn.Linear(6, 3), lambda: nn.BatchNorm1d(2)])
def test_names_are_the_modules_own(make) -> None:
    module = make()
    model = wrapped(module)
    for method in ("named_parameters", "named_buffers", "named_children"):
        assert [name for name, _ in getattr(model, method)()] == [n for n, _ in getattr(module, method)()]
    assert list(model.state_dict()) == list(module.state_dict())
    assert [*model.named_modules()] == [("", model), *module.named_modules()]
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is parameter
    outer = nn.ModuleDict({"part": model})
    assert list(outer.state_dict()) == [f"part.{name}" for name in module.state_dict()]
    assert [name for name, _ in outer.named_parameters()] == [
        f"part.{n}" for n, _ in module.named_parameters()
    ]
    outer.load_state_dict(outer.state_dict())


def test_a_method_that_returns_the_module_returns_the_wrapper() -> None:
    """``model = model.to(device)`` would else drop the wrapper, and with it the exchange of gradients."""
    model = wrapped(filled(Scaled()))
    for returned in (model.train(), model.eval(), model.to("cpu"), model.requires_grad_(), model.cooled()):
        assert returned is model
    assert not model.module.training and model.training is False and model.temperature == 0.5
    assert inspect.signature(model.forward) == inspect.signature(model.module.forward)
    seen: list[nn.Module] = []
    model.register_forward_hook(lambda module, args, output: seen.append(module))
    model(samples(0))
    assert seen == [model.module]


@pytest.mark.parametrize(
    "call", [copy.copy, copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel]
)
def test_copies_and_pickles_are_refused_without_waiting_for_a_rank(call) -> None:
    model = wrapped(filled(Dense()))
    with pytest.raises(TypeError, match=r"neither copied nor pickled: copy or pickle model\.module"):
        call(model)


@pytest.mark.parametrize("full", [False, True])
@world(2, by="process")
def test_state_dicts_of_torch_s_distributed_checkpoint_come_back(
    mesh: Mesh, tmp_path: Path, full: bool
) -> None:
    """They were saved with one name and looked for under another."""
    options = StateDictOptions(full_state_dict=full)

    def build() -> tuple[DataParallel, torch.optim.Optimizer]:
        model = DataParallel(filled(Dense()))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: DataParallel, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            square(model, mesh.rank).backward()
            optimizer.step()

    model, optimizer = build()
    train(model, optimizer)
    state = get_state_dict(model, optimizer, options=options)
    assert list(state[0]) == list(model.module.state_dict())
    dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=tmp_path)
    train(model, optimizer)
    again = build()
    state = get_state_dict(*again, options=options)
    dcp.load({"model": state[0], "optimizer": state[1]}, checkpoint_id=tmp_path)
    set_state_dict(*again, model_state_dict=state[0], optim_state_dict=state[1], options=options)
    train(*again)
    assert all(map(torch.equal, again[0].parameters(), model.parameters()))
    model.close()
    again[0].close()


@pytest.mark.parametrize("name", ["join", "_set_static_graph", "_get_ddp_logging_data"])
def test_methods_of_torch_s_wrapper_alone_say_what_to_do(name: str) -> None:
    model = DataParallel(nn.Linear(2, 2))
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=rf"has no {name}\(\), as torch's wrapper has: \w+"):
        getattr(model, name)
    model.close()
