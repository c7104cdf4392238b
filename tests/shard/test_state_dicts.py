"""State dicts of a module in slices have its values, which one rank fetches; loading into it is an error."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from instep.mesh.mesh import Mesh
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import filled
from tests.shard.gathered import Stack, built, gathered_units, in_slices, inputs, loss_of
from tests.shard.trained import assert_same
from tests.world import world


def halved(module: nn.Module) -> OrderedDict[str, torch.Tensor]:
    return OrderedDict((name, x * 0.5) for name, x in module.state_dict().items())


@world(2)
def test_one_rank_alone_may_save_the_values(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module) as stage3:
        if mesh.rank == 1:
            state, file = module.state_dict(), io.BytesIO()
            assert_same(state, plain.state_dict(), "state")
            torch.save({"one": state["out.bias"]}, file)
            assert len(file.getvalue()) < 4096  # an entry brings no memory of others along
            assert gathered_units(stage3) == []


@world(3, backend="shm")
def test_submodules_and_modules_around_have_state_dicts_with_values(mesh: Mesh) -> None:
    module, plain = built()
    around = nn.ModuleDict({"sharded": module, "plain": filled(nn.Linear(3, 2))})
    with in_slices(mesh, module):
        for _ in range(2):
            assert_same(module.layers[1].state_dict(), plain.layers[1].state_dict(), "layer")
            assert_same(module.layers[1].norm.state_dict(), plain.layers[1].norm.state_dict(), "norm")
        state = around.state_dict()
        assert_same(
            {k: v for k, v in state.items() if k.startswith("sharded")},
            {f"sharded.{k}": v for k, v in plain.state_dict().items()},
            "around",
        )
        for first, second in pairwise(state.values()):
            assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


@world(2)
def test_values_are_those_of_the_masters_now_in_their_dtype(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module, compute_dtype=torch.bfloat16) as stage3:
        kept = module.state_dict()
        destination = type(kept)()
        module.layers[0].feed.state_dict(destination=destination, prefix="feed.")  # a part of what is fetched
        assert_same(kept, plain.state_dict(), "state")
        stage3.units[0].group.barrier("before the update")
        for unit in stage3.units:
            unit.slice.mul_(0.5)
            unit.group.barrier("after the update")
            unit.share("the update")
        module.layers[0].state_dict(destination=destination)
        assert_same(destination, halved(plain.layers[0]), "same dict")
        assert_same(module.state_dict(), halved(plain), "new")
        assert_same(kept, OrderedDict(plain.state_dict()), "memory of its own")


@world(1)
def test_a_unit_is_gathered_once_for_a_state_dict(mesh: Mesh) -> None:
    module, _ = built()
    with in_slices(mesh, module) as stage3:
        asked: list[str] = []
        masters = stage3._states._masters
        stage3._states._masters = lambda unit: (asked.append(unit.name), masters(unit))[1]
        module.state_dict()
        assert sorted(asked) == sorted(unit.name for unit in stage3.units)


@world(1)
def test_a_state_dict_hook_that_was_there_before_finds_values(mesh: Mesh) -> None:
    module, plain = built()
    seen: list[torch.Tensor] = []
    module.out.register_state_dict_post_hook(
        lambda m, state, prefix, metadata: seen.append(state[prefix + "weight"])
    )
    with in_slices(mesh, module):
        module.state_dict()
        assert torch.equal(seen[0], plain.out.weight)


@world(2)
def test_variables_are_asked_for_and_given_as_they_are(mesh: Mesh) -> None:
    module, _ = built()
    with in_slices(mesh, module):
        assert all(
            a is b
            for a, b in zip(module.state_dict(keep_vars=True).values(), module.parameters(), strict=True)
        )


@world(2)
def test_loading_into_slices_is_an_error_by_name_before_anything_is_written(mesh: Mesh) -> None:
    module, plain = built()
    module.register_buffer("count", torch.zeros(1))
    state = {**plain.state_dict(), "count": torch.ones(1)}
    with in_slices(mesh, module):
        with pytest.raises(RuntimeError, match=r"parameter 'into\.weight' has no memory.*before fully_shard"):
            module.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"instep\.load\(\)"):
            module.layers[2].load_state_dict(plain.layers[2].state_dict(), assign=True)
        assert module.count == 0
        module.load_state_dict({"count": torch.ones(1)}, strict=False)
        assert module.count == 1
    module.load_state_dict({"count": torch.ones(1)}, strict=False)


@world(2)
def test_a_submodule_is_copied_with_its_values(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module):
        twin = copy.deepcopy(module.layers[1])
        assert_same(twin.state_dict(), plain.layers[1].state_dict(), "copy")
        assert {type(p) for p in twin.parameters()} == {nn.Parameter}
        with torch.no_grad():
            twin.norm.weight.zero_()  # of its own
        assert b"Sliced" not in pickle.dumps(module.layers[1])
        assert_same(module.state_dict(), plain.state_dict(), "the original")
    with pytest.raises(
        RuntimeError, match=r"'layers\.1\..*' of a sharded module that was closed has no values"
    ):
        copy.deepcopy(module.layers[1])


@world(2)
@pytest.mark.parametrize("step", [0, 1])
def test_rank_0_saves_between_steps_while_the_other_trains_on(mesh: Mesh, step: int) -> None:
    def train(save: bool) -> list[dict[str, torch.Tensor]]:
        model = fully_shard(filled(Stack()), mesh)
        optimizer = ShardedOptimizer(model.parameters(), AdamW, mesh, lr=0.1)
        saved = []
        for _ in range(3):
            for micro_batch in model.micro_batches(4):
                loss_of(model, micro_batch.index).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not save or mesh.rank == step:
                saved.append(model.state_dict())
        optimizer.close()
        model.close()
        return saved

    together, alone = train(False), train(True)
    for x, y in zip(together, alone, strict=False):
        assert_same(y, x, "state")


@world(1)
def test_forward_after_a_state_dict_is_as_before(mesh: Mesh) -> None:
    module, plain = built()
    with in_slices(mesh, module):
        module.state_dict()
        assert torch.equal(module(inputs()), plain(inputs()))
