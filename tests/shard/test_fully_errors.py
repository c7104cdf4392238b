"""What goes wrong around a sharded module is an error on every rank, by name, with the way out."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.shard.fully import FullySharded, full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.kinds import Program, assert_same_state, on_every_kind, replicated_alone
from tests.parity import filled, numbers, world_of_one
from tests.replicate.nets import Dense, Segments, requires_input, two_backwards
from tests.shard.trained import WIDTH, Wide, assert_same, wide_step
from tests.world import world

LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}
STAGES = pytest.mark.parametrize("stage", [2, 3])


def backwards(model: nn.Module, num_leaves: int = 5) -> None:
    for micro_batch in model.micro_batches(num_leaves, step=0):  # type: ignore[operator]
        wide_step(model, micro_batch, 0)


def declared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backwards(model)
    optimizer.step()
    optimizer.zero_grad()


def plain(mesh: Mesh, model: nn.Module) -> None:
    model(numbers(4, WIDTH, key=f"on rank {mesh.rank}")).square().mean().backward()


@world(2)
@STAGES
def test_ranks_with_other_units_raise_on_both(mesh: Mesh, stage: int) -> None:
    model = filled(Wide())
    with pytest.raises(ValueError, match=r"the ranks differ in units: unit .* on rank 0, but .* on rank 1"):
        fully_shard(model, mesh, stage, units=[model.layers[0]] if mesh.rank else None)


@world(2)
@STAGES
def test_a_sharded_optimizer_that_was_made_before_is_refused_by_name(mesh: Mesh, stage: int) -> None:
    module = filled(Wide())
    optimizer = ShardedOptimizer(module.parameters(), SGD, mesh, **LOOP)
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' has a ShardedOptimizer already.*first"):
        fully_shard(module, mesh, stage)
    assert type(module) is Wide
    optimizer.close()
    model = fully_shard(module, mesh, stage)
    model.close()


@world(2)
@STAGES
def test_what_moves_the_parameters_after_sharding_is_an_error(mesh: Mesh, stage: int) -> None:
    """With ``set_`` and ``vector_to_parameters`` training went on with the values from before."""

    def replace_one(model: nn.Module) -> None:
        p = next(model.parameters())
        p.data = torch.zeros(p.shape, dtype=torch.float64)

    def halve(model: nn.Module) -> None:
        vector_to_parameters(parameters_to_vector(model.parameters()).detach() / 2, model.parameters())

    def assign(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.set_(torch.full_like(p, 0.1))

    way_out = r"vector_to_parameters.*p\.copy_\(values\) under no_grad"
    for change in (nn.Module.double, replace_one, halve, assign):
        model = fully_shard(filled(Wide()), mesh, stage)
        wrong = rf"'layers\.0\.weight' (has|would have) other memory than when it was sharded|{way_out}"
        with pytest.raises(ValueError, match=wrong):  # noqa: PT012
            change(model)
            backwards(model, 2)
        model.close()


@world(2)
def test_arguments_that_cannot_be_meant(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="stage=1: expected 2"):
        fully_shard(Wide(), mesh, 1)
    with pytest.raises(ValueError, match=r"expected one of floating point, got torch\.int8"):
        fully_shard(Wide(), mesh, 2, compute_dtype=torch.int8)
    for order in (torch.channels_last, None):
        conv = nn.Conv2d(3, 4, 3).to(memory_format=order) if order else nn.Linear(3, 4)
        if order is None:
            conv.weight.data = conv.weight.data.t().contiguous().t()
        with pytest.raises(ValueError, match="'weight' cannot be sharded: it is not contiguous"):
            fully_shard(conv, mesh)
    hooked = nn.Linear(3, 4)
    hooked.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match="'weight' cannot be sharded: it has a hook"):
        fully_shard(hooked, mesh)
    for name in ("group", "verify"):
        with pytest.raises(ValueError, match=f"attribute '{name}' of its own"):
            fully_shard(Named(name), mesh)
    with pytest.raises(ValueError, match="'' has sparse gradients"):
        fully_shard(nn.Embedding(4, 2, sparse=True), mesh)
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' is on the meta device"):
        fully_shard(Wide().to("meta"), mesh, 2)


class Named(nn.Module):
    """Has a name of its own that a sharded module needs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        setattr(self, name, "mine")


@STAGES
def test_a_sharded_module_stays_an_instance_of_its_class_until_it_is_closed(stage: int) -> None:
    module = filled(Wide())
    parameters = dict(module.named_parameters())
    model = fully_shard(module, world_of_one(), stage)
    assert model is module and isinstance(model, Wide) and isinstance(model, FullySharded)
    assert type(model).__name__ == "FullyShardedWide"
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(full_state_dict(model)) == list(parameters)
    assert model.step_mode is None and model.placement == {"strategy": "fully_shard", "stage": stage}
    for broken in (lambda: copy.deepcopy(model), lambda: pickle.dumps(model)):
        with pytest.raises(TypeError, match="full_state_dict"):
            broken()
    model(numbers(4, WIDTH, key="x")).sum().backward()
    assert model.step_mode == "undeclared"
    model.close()
    assert type(module) is Wide and not hasattr(module, "micro_batches")
    assert all(p.grad is None for p in module.parameters())


@world(2, by="process")  # threads collect one at a time
@STAGES
def test_a_module_that_is_dropped_is_collected_with_all_that_kept_it_sharded(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(Wide()), mesh, stage)
    plain(mesh, model)
    kept = [weakref.ref(x) for x in (model, model.sharding, model.sharding.reducer)]
    del model
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


@world(2)
@STAGES
def test_a_state_dict_of_what_is_sharded_in_part_is_whole(mesh: Mesh, stage: int) -> None:
    module = nn.ModuleDict({"sharded": filled(Wide()), "plain": filled(nn.Linear(3, 2))})
    expected = {name: x.clone() for name, x in module.state_dict().items()}
    inner = fully_shard(module["sharded"], mesh, stage)
    ours = full_state_dict(module)
    assert_same(ours, expected, "state")
    with torch.no_grad():
        module["plain"].weight.zero_()
    assert_same(ours, expected, "memory of its own")
    inner.close()


class Borrows(nn.Module):
    """Its second part multiplies with the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) @ self.first.weight)


@pytest.mark.parametrize("stage", [2, 3])
@world(2)
def test_a_weight_in_the_forward_of_another_module_is_told_as_a_shard(mesh: Mesh, stage: int) -> None:
    model = Borrows()
    fully_shard(model, mesh, stage=stage, units=[model.first, model.second])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        model(torch.ones(3, 128))
    assert "it is this rank's shard, of another shape. Make both one unit" in raised.value.__notes__[0]
    model.close()


@world(2)
@STAGES
def test_gradients_in_slices_are_discarded_also_where_zeros_are_asked_for(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(Wide()), mesh, stage=stage)
    norms = []
    for _ in range(2):
        plain(mesh, model)
        norms.append(clip_grad_norm_(model.parameters(), float("inf")))
        model.zero_grad(set_to_none=False)
        assert clip_grad_norm_(model.parameters(), float("inf")) == 0
    assert norms[0] == norms[1]
    model.close()


def assert_bits(mesh: Mesh, kind: str, one: Program, **wrap: Any) -> None:
    assert_same_state(replace(one, kind=kind, wrap=wrap).trained(mesh), replicated_alone(one))


SEVERAL = Program("replicated", Dense, leaf_step=two_backwards, optimizer=SGD, options=LOOP)
AGAIN = Program("replicated", partial(Segments, True), leaf_step=requires_input, optimizer=SGD, options=LOOP)


@on_every_kind(2, ("stage 2", "stage 3"))
def test_gradients_in_several_parts_are_whole_when_they_are_sent_or_it_says_so(mesh: Mesh, kind: str) -> None:
    """Several backwards of a micro-batch, and a reentrant checkpoint that is used several times."""
    with pytest.raises(Desync, match=r"received gradient number 2 of this backward.*pass overlap=False"):
        replace(SEVERAL, kind=kind).trained(mesh)
    assert_bits(mesh, kind, SEVERAL, overlap=False)
    assert_bits(mesh, kind, AGAIN)
