"""Modules from the meta device get the values that they would have had, one unit at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.rng.keys import initialize
from tests.parity import numbers
from tests.shard.gathered import Layer, Stack, gathered_units, in_slices, inputs, loss_of
from tests.world import world

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
    with in_slices(mesh, module) as stage3:
        assert not any(p.is_meta for p in module.parameters())
        assert all(p is before for p, before in zip(module.parameters(), parameters, strict=True))
        stage3.materialise(seed=7)
        assert gathered_units(stage3) == []
        for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(stage3.whole(p), q), name
        tokens = torch.arange(16).view(2, 8)
        assert torch.equal(module(tokens), plain(tokens))
        module(tokens).square().mean().backward()
        plain(tokens).square().mean().backward()
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


@world(3)
def test_a_function_of_the_user_fills_one_whole_parameter_at_a_time(mesh: Mesh) -> None:
    module, plain = on_meta(Stack), Stack()
    with torch.no_grad():
        for name, p in plain.named_parameters():
            fill(name, p)
    with in_slices(mesh, module) as stage3:
        stage3.materialise(fill)
        assert torch.equal(module(inputs()), plain(inputs()))


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
    with in_slices(mesh, module) as stage3:
        stage3.materialise(seed=3)
        assert torch.equal(torch.get_rng_state(), before)
        values = {name: stage3.whole(p) for name, p in module.named_parameters()}
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
    with in_slices(mesh, module), pytest.raises(ValueError, match=message):
        module(inputs())


@world(1)
def test_a_submodule_that_cannot_fill_itself_is_named(mesh: Mesh) -> None:
    module = on_meta(Stack)
    message = r"'layers\.0', a Layer, has parameters on the meta device"
    with in_slices(mesh, module) as stage3, pytest.raises(ValueError, match=message):
        stage3.materialise()


@world(1)
def test_a_buffer_that_nothing_fills_is_named(mesh: Mesh) -> None:
    module = on_meta(Stack)
    module.register_buffer("table", torch.empty(3, device="meta"))
    message = "buffer 'table' is on the meta device"
    with in_slices(mesh, module) as stage3, pytest.raises(ValueError, match=message):
        stage3.materialise(fill)


@world(2)
def test_a_module_of_which_a_part_is_on_the_meta_device_keeps_the_other_part(mesh: Mesh) -> None:
    module, plain = Stack(2), Stack(2)
    with torch.no_grad():
        for name, p in [*module.named_parameters(), *plain.named_parameters()]:
            fill(name, p)
    module.layers[1] = on_meta(Layer)
    with in_slices(mesh, module) as stage3:
        stage3.materialise(fill)
        assert torch.equal(module(inputs()), plain(inputs()))
