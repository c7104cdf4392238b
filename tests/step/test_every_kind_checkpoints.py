"""What every kind saves and loads of modules that keep more than weights.

That each kind goes on from what another has saved, on other ranks: tests/test_placements.py.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.mesh.mesh import Mesh
from tests.checkpoint.states import all_bits
from tests.kinds import EVERY, WIDTH, Program, close, on_every_kind
from tests.parity import filled

STEPS = 2


class Scaled(nn.Linear):
    """With a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu() * self.scale


def tied(key: str = "a") -> nn.Sequential:
    """Layers of their own, the last with the first one's weight, a frozen parameter and buffers."""
    layers = nn.Sequential(*(Scaled() for _ in range(4)))
    filled(nn.ModuleDict({key: layers}))
    layers[3].weight = layers[0].weight
    layers[1].bias.requires_grad_(False)
    for each in layers:
        each.scale.fill_(len(key))
    return layers


PROGRAM = Program("replicated", tied, num_steps=STEPS)


def make(kind: str, mesh: Mesh, key: str) -> tuple[Any, torch.optim.Optimizer]:
    return replace(PROGRAM, kind=kind).make(tied(key), mesh)


@on_every_kind(2)
def test_weights_alone_are_saved_and_loaded_also_from_a_checkpoint_with_moments(
    mesh: Mesh, kind: str, tmp_path: Path
) -> None:
    model, optimizer = make(kind, mesh, "a")
    instep.save(tmp_path / "weights", step=5, model=model)
    instep.save(tmp_path / "all", step=6, model=model, optimizer=optimizer)
    close(optimizer, model)
    for name in ("weights", "all"):
        mesh.world.group.barrier("the test")
        plain = tied("other")
        instep.load(tmp_path / name, model=plain)
        assert all_bits(plain.state_dict()) == all_bits(tied("a").state_dict())
        other, _ = make(kind, mesh, "other")
        instep.load(tmp_path / name, model=other)
        assert all_bits(instep.full_state_dict(other)) == all_bits(plain.state_dict())
        close(other)


class Keeps(nn.Linear):
    """Nested below the layer that a pipeline cuts and a unit gathers."""

    kept: Any = None

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class ExtraState(Keeps):
    def get_extra_state(self) -> Any:
        return copy.deepcopy(self.kept)  # made anew, as most do

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Renames(Keeps):
    """With names of its own for a weight and a buffer, of which the second is stored in other units."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_pre_hook(_rename_back)


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[prefix + "kernel"] = state.pop(prefix + "weight")
    state[prefix + "tenths"] = state.pop(prefix + "scale") * 10


def _rename_back(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    state[prefix + "weight"] = state.pop(prefix + "kernel")
    state[prefix + "scale"] = state.pop(prefix + "tenths") / 10


class Derives(Keeps):
    """What it keeps is computed from a weight that was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_derive)


def _derive(module: nn.Module, keys: Any) -> None:
    module.kept = module.weight.sum().item() if module.weight.numel() else None


class Versioned(Keeps):
    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        self.kept = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *others)


VALUES = {
    "a tensor": torch.arange(3.0),
    "another shape": torch.arange(5.0),
    "data": {"amax": [torch.ones(2, dtype=torch.bfloat16)], "steps": 3, "best": (float("inf"), None), 1: "a"},
    "nothing": None,
}


def layers_that(keep: type[Keeps], value: Any = None) -> nn.Sequential:
    found = nn.Sequential(*(nn.Sequential(keep(), nn.Tanh()) for _ in range(2)))
    for layer in found:
        layer[0].kept = value
    return found


@on_every_kind(2, (*EVERY, "stage 3, sharded optimizer"))
@pytest.mark.parametrize(
    ("keep", "value"),
    [*((ExtraState, name) for name in VALUES), (Renames, None), (Derives, None), (Versioned, None)],
)
def test_modules_load_what_they_keep_themselves_as_torch_does(
    mesh: Mesh, kind: str, tmp_path: Path, keep: type[Keeps], value: str | None
) -> None:
    program = replace(PROGRAM, kind=kind)
    source = filled(layers_that(keep, VALUES.get(value)))
    for buffer in source.buffers():
        buffer.fill_(3.0)
    expected = layers_that(keep, VALUES["a tensor"])
    expected.load_state_dict(source.state_dict())
    model, optimizer = program.make(source, mesh)
    instep.save(tmp_path, step=1, model=model, optimizer=optimizer)
    close(optimizer, model)
    mesh.world.group.barrier("the test")
    other = layers_that(keep, VALUES["a tensor"])
    model, optimizer = program.make(other, mesh)
    assert instep.load(tmp_path, model=model, optimizer=optimizer).step == 1
    whole = instep.full_state_dict(model)
    plain = {
        name: x for name, x in expected.state_dict().items() if name in dict(expected.named_parameters())
    }
    assert all_bits({name: whole[name] for name in plain}) == all_bits(plain)
    assert [*whole] == [*expected.state_dict()]
    for number, (there, layer) in enumerate(zip(expected, other, strict=True)):
        if kind != "pipeline" or number == mesh.rank:  # which has the weights
            assert repr(layer[0].kept) == repr(there[0].kept)
    close(optimizer, model)


class Scales(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_scale)


def _scale(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[prefix + "tenths"] = state.pop(prefix + "weight") * 10


class Apart(nn.Sequential):
    """A layer without parameters, in a pipeline."""

    def __init__(self) -> None:
        observer = nn.Sequential()
        super().__init__(nn.Linear(WIDTH, WIDTH), observer, nn.Linear(WIDTH, WIDTH))
        observer.register_state_dict_post_hook(_count)


def _count(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[prefix + "calls"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("kind", "module", "words"),
    [
        ("stage 2", partial(layers_that, Scales), r"leaves out or changes '0\.0\.weight', of which"),
        ("stage 3", partial(layers_that, Scales), r"leaves out or changes '0\.0\.weight', of which"),
        ("pipeline", Apart, r"1\.calls: its module has no parameters"),
    ],
)
def test_what_no_rank_can_save_alone_is_refused(kind: str, module: Any, words: str, tmp_path: Path) -> None:
    @on_every_kind(2, [kind])
    def body(mesh: Mesh, kind: str) -> None:
        model, optimizer = replace(PROGRAM, kind=kind).make(filled(module()), mesh)
        with pytest.raises(ValueError, match=words):
            instep.save(tmp_path, step=1, model=model, optimizer=optimizer)
        close(optimizer, model)

    body(kind=kind)
