"""Modules from the meta device get the values that they would have had, one unit at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.rng.keys import initialize
from instep.shard.fully import full_state_dict, fully_shard
from tests.parity import numbers
from tests.shard.test_whole_weights import Stack, gathered_units, loss_of
from tests.shard.trained import assert_same
from tests.world import world


@contextmanager
def sharded(mesh: Mesh, module: nn.Module) -> Iterator[Any]:
    model = fully_shard(module, mesh)
    yield model
    model.close()


CONFIG = GPTConfig(layers=3, width=48, heads=2, context=8, tied=True)


def on_meta(kind: type[nn.Module], *arguments: object) -> nn.Module:
    with torch.device("meta"):
        return kind(*arguments)


def fill(name: str, tensor: Tensor) -> None:
    tensor.copy_(0.3 * numbers(*tensor.shape, key=name))


@world(2)
def test_a_model_that_fills_its_parameters_by_name_gets_the_weights_of_one_process(mesh: Mesh) -> None:
    plain = GPT(CONFIG)
    initialize(plain, seed=7)
    module = on_meta(GPT, CONFIG)
    parameters = list(module.parameters())
    with sharded(mesh, module) as model:
        assert not any(p.is_meta for p in module.parameters())
        assert all(p is before for p, before in zip(module.parameters(), parameters, strict=True))
        model.materialise(seed=7)
        assert gathered_units(model) == []
        assert_same(full_state_dict(module), dict(plain.state_dict()), "values")
        tokens = torch.arange(16).view(2, 8)
        assert torch.equal(module(tokens), plain(tokens))


class Standard(nn.Module):
    """Submodules of torch, one of which sets what its children have set already; and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(12, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0) for _ in range(2))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@world(2, by="process")
def test_submodules_fill_themselves_alike_on_all_ranks_whatever_their_generators(mesh: Mesh) -> None:
    torch.manual_seed(mesh.rank)
    before = torch.get_rng_state()
    module = on_meta(Standard)
    with sharded(mesh, module) as model:
        model.materialise(seed=3)
        assert torch.equal(torch.get_rng_state(), before)
        values = full_state_dict(module)
        assert torch.equal(module.norm.running_var, torch.ones(16))
        loss_of(module).backward()
    group = mesh.whole.duplicate()
    for name, x in values.items():
        by_rank = group.all_gather_bytes(x.numpy().tobytes(), name)
        assert by_rank[0] == by_rank[1], name
    # The bounds of torch's own initialisation.
    assert 0.2 < values["into.weight"].abs().max() <= 12**-0.5
    assert 0.25 < values["layers.1.self_attn.in_proj_weight"].abs().max() <= (6 / (16 + 48)) ** 0.5
    assert not values["layers.0.self_attn.out_proj.bias"].any()
    assert not torch.equal(values["layers.0.linear1.weight"], values["layers.1.linear1.weight"])


@world(2)
def test_without_values_a_forward_says_what_to_call(mesh: Mesh) -> None:
    module = on_meta(Stack)
    message = r"'into\.weight' was on the meta device .* materialise\(\)"
    with sharded(mesh, module), pytest.raises(ValueError, match=message):
        loss_of(module)


class Unfillable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


@world(1)
def test_a_submodule_that_cannot_fill_itself_is_named(mesh: Mesh) -> None:
    module = on_meta(Stack)
    module.layers[0] = on_meta(Unfillable)
    message = r"'layers\.0', a Unfillable, has parameters on the meta device"
    with sharded(mesh, module) as model, pytest.raises(ValueError, match=message):
        model.materialise()


@world(1)
def test_a_buffer_that_nothing_fills_is_named(mesh: Mesh) -> None:
    module = on_meta(Stack)
    module.register_buffer("table", torch.empty(3, device="meta"))
    message = "buffer 'table' is on the meta device"
    with sharded(mesh, module) as model, pytest.raises(ValueError, match=message):
        model.materialise(fill)


@world(2)
def test_a_module_of_which_a_part_is_on_the_meta_device_keeps_the_other_part(mesh: Mesh) -> None:
    module, plain = Stack(), Stack()
    with torch.no_grad():
        for name, p in [*module.named_parameters(), *plain.named_parameters()]:
            fill(name, p)
    module.layers[1] = on_meta(nn.Linear, 72, 72)
    with sharded(mesh, module) as model:
        model.materialise(fill)
        assert torch.equal(loss_of(module), loss_of(plain))
