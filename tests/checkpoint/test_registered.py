"""Several models, optimizers and objects: one state, which any number of ranks saves, and any other loads."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LRScheduler

from instep.checkpoint import save as saving
from instep.checkpoint.convert import find, to_safetensors
from instep.checkpoint.load import newest, restore_found
from instep.checkpoint.registered import Registered
from instep.checkpoint.tensors import contents
from instep.errors import CheckpointRejected
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.checkpoint.elsewhere import Elsewhere
from tests.checkpoint.registry import KINDS, Average, Net, hash_of, train
from tests.checkpoint.states import all_bits
from tests.parity import numbers, world_of_one
from tests.training_state import training_state
from tests.world import world as make_world

world = partial(make_world, timeout_s=20.0)  # a disk takes its time


@cache
def expected(kind: str) -> tuple[str, str, str]:
    """Of one process: the hashes after two and four steps, and the digest of the objects at the end."""
    objects = KINDS[kind](world_of_one(), "a")
    train(objects, range(2))
    middle = hash_of(objects, 2)
    train(objects, range(2, 4))
    return middle, hash_of(objects, 4), Registered(objects).digest()


def train_and_save(mesh: Mesh, kind: str, directory: Path) -> None:
    objects = KINDS[kind](mesh, "a")
    train(objects, range(2))
    state = Registered(objects).state()
    draft = saving.draft(step=2, data_cursor=0, numerical={}, world_size=mesh.world.size)
    if state.is_divided or not mesh.rank:
        saving.save(directory, state, draft)
    mesh.world.group.barrier("the test")


def load_and_go_on(mesh: Mesh, kind: str, directory: Path) -> None:
    objects = KINDS[kind](mesh, "other")
    train(objects, range(1))
    state = Registered(objects).state()
    found = newest(directory)
    assert found is not None
    restore_found(found, state)
    middle, end, digest = expected(kind)
    assert hash_of(objects, 2) == middle == found.manifest.state_sha256
    train(objects, range(2, 4))
    assert hash_of(objects, 4) == end
    assert Registered(objects).digest() == digest


@pytest.mark.parametrize("kind", KINDS)
def test_what_some_ranks_have_saved_goes_on_on_others_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    expected(kind)
    world(2)(train_and_save)(kind=kind, directory=tmp_path)
    world(3)(load_and_go_on)(kind=kind, directory=tmp_path)


def test_one_model_and_one_optimizer_have_the_state_that_they_have_without_names() -> None:
    model = DataParallel(Net("a"), process_group=world_of_one())
    optimizer = AdamW(model.parameters())
    objects = {"model": model, "optimizer": optimizer}
    train(objects, range(1))
    plain, named = training_state(model, optimizer), Registered(objects).state()
    assert [x.layout for x in named.shards()] == [x.layout for x in plain.shards()]
    assert named.options() == {**plain.options(), "objects": {}, "declared_steps": {"model": 1}}
    named.resume_at(5, {"declared_steps": {}})
    assert model.next_step == 5
    named.resume_at(5, named.options() | {"declared_steps": {"other": 3}})
    assert model.next_step == 3
    Elsewhere.of(plain).restore(named)  # as a state that was saved by itself
    with torch.no_grad():
        next(model.parameters()).zero_()
    Elsewhere.of(named).restore(plain)


def test_names_of_several_begin_with_that_of_the_model() -> None:
    objects = KINDS["gan"](world_of_one(), "a")
    train(objects, range(1))
    state = Registered(objects).state()
    names = [x.name for x in state.shards()]
    assert names[0] == "model:generator.first.weight"
    assert names[5] == "model:critic.first.bias"
    assert "optimizer:exp_avg/generator.last.bias" in names
    assert "optimizer:momentum_buffer/critic.last.bias" in names
    assert state.options()["class"] == "AdamW, SGD"
    assert [group["parameters"][0] for group in state.options()["groups"]] == [
        "generator.first.weight",
        "critic.first.weight",
    ]
    assert state.options()["declared_steps"] == {"generator": 1, "critic": 1}
    assert "first.weight" in objects["generator"].module.state_dict()
    tied = Registered(KINDS["tied"](world_of_one(), "a")).state()
    assert tied.ties() == {"head.first.weight": "model.last.weight"}


def test_each_model_goes_on_counting_its_own_steps() -> None:
    objects = KINDS["gan"](world_of_one(), "a")
    train(objects, range(1))
    for micro_batch in objects["critic"].micro_batches(1):
        objects["critic"](numbers(2, 70, key=f"{micro_batch.index}")).sum().backward()
    objects["c"].step()
    other = KINDS["gan"](world_of_one(), "b")
    Elsewhere.of(Registered(objects).state()).restore(Registered(other).state())
    assert (other["generator"].next_step, other["critic"].next_step) == (1, 2)


def test_an_update_that_torch_does_not_count_as_a_write_leaves_a_mark() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    registered = Registered({"model": model, "optimizer": optimizer})
    registered.count_updates()
    before = registered.state().mark()
    model(torch.ones(1, 2)).sum().backward()
    assert registered.state().mark() == before
    optimizer.step()
    assert registered.state().mark() != before
    hooks = optimizer._optimizer_step_pre_hooks
    assert len(hooks) == 1
    del registered
    gc.collect()
    assert not hooks


@pytest.mark.parametrize("kind", ["gan", "averages", "sharded optimizers", "one model in slices"])
@world(2)
def test_a_mark_stays_until_something_is_written_to(mesh: Mesh, kind: str) -> None:
    objects = KINDS[kind](mesh, "a")
    train(objects, range(1))
    state = Registered(objects).state()
    before = state.mark()
    models = [model for model in objects.values() if hasattr(model, "micro_batches")]
    for model in models:
        model(numbers(2, 70, key="x")).sum().backward()
    assert state.mark() == before
    for x in objects.values():
        if isinstance(x, torch.optim.Optimizer | LRScheduler | Average):
            known = state.mark()
            x.update(models[-1]) if isinstance(x, Average) else x.step()
            assert state.mark() != known
            x.zero_grad() if isinstance(x, torch.optim.Optimizer) else None
    for model in models:
        model.close()


def test_a_compiled_wrapper_is_the_wrapper() -> None:
    wrapped = DataParallel(Net("a"), process_group=world_of_one())
    compiled = Registered({"model": torch.compile(wrapped, backend="eager")})
    plain = Registered({"model": wrapped})
    assert [x.name for x in compiled.state().shards()] == [x.name for x in plain.state().shards()]
    assert compiled.declared_steps() == plain.declared_steps() == {"model": 0}


def test_tensors_of_objects_have_a_file_of_their_own(tmp_path: Path) -> None:
    objects = KINDS["averages"](world_of_one(), "a")
    train(objects, range(1))
    draft = saving.draft(step=1, data_cursor=0, numerical={}, world_size=1)
    path = saving.save(tmp_path, Registered(objects).state(), draft)
    names = set(contents(path / "object.safetensors").layout)
    assert names == {f"average/values/{name}" for name, _ in objects["model"].module.named_parameters()}
    out = to_safetensors(find(path), tmp_path / "model.safetensors", optimizer=True)
    assert not names & set(contents(out).layout)


class Keeping(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def get_extra_state(self) -> Any:
        return copy.copy(self.kept)

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@pytest.mark.parametrize("kept", [torch.zeros(2), {"calls": 0}, None], ids=str)
def test_what_a_module_keeps_leaves_a_mark_when_its_value_changes(kept: Any) -> None:
    module = Keeping(kept)
    state = Registered({"model": module}).state()
    before = state.mark()
    assert state.mark() == before
    module.kept = {"calls": 1}
    assert state.mark() != before


def two(**more: Any) -> dict[str, Any]:
    a, b = nn.Linear(2, 2), nn.Linear(2, 3)
    return {"a": a, "b": b, **more}


def in_two_optimizers() -> dict[str, Any]:
    objects = two()
    both = [*objects["a"].parameters(), *objects["b"].parameters()]
    return {**objects, "x": AdamW(both), "y": SGD(objects["b"].parameters())}


def registered_twice() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"model": model, "again": model}


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        (
            in_two_optimizers,
            r"the parameter 'b\.weight' is in two optimizers, 'x' and 'y': leave it out of one",
        ),
        (
            lambda: two(opt=SGD(nn.Linear(7, 5).parameters())),
            r"the optimizer 'opt' has a parameter of shape \[5, 7\] that is in none of the registered models "
            r"\(a, b\): register its model too",
        ),
        (lambda: {"opt": SGD(nn.Linear(7, 5).parameters())}, r"\(there are none\)"),
        (registered_twice, "'model' and 'again' are one object"),
        (
            lambda: two(best=1.5),
            r"'best' is of class float, which has no state_dict\(\) and no load_state_dict",
        ),
        (
            lambda: two(g=torch.Generator()),
            r"'g' is of class Generator, .* or leave it out if it does not change",
        ),
        (lambda: {"model": Keeping(object())}, "_extra_state: expected data or a tensor in state_dict"),
        (lambda: {"my model": nn.Linear(1, 1)}, "expected a name like one of Python's, got 'my model'"),
    ],
)
def test_what_cannot_be_registered_is_refused_by_name(
    objects: Callable[[], dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Registered(objects())


def drop(objects: dict[str, Any], *names: str) -> None:
    for name in names:
        del objects[name]


def other_order(objects: dict[str, Any]) -> None:
    for name in ("g", "generator"):
        objects[name] = objects.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: drop(x, "g_plan"),
            "the saved state has different objects: it has 'g_plan', which is not given: pass",
        ),
        (lambda x: x.update(more=Average()), "different objects: 'more' is given, which it does not have"),
        (lambda x: drop(x, "g_plan", "c_plan"), "it has 'c_plan', 'g_plan', which"),
        (lambda x: drop(x, "g", "c"), r"has an optimizer \(AdamW, SGD\), and none is given"),
        (other_order, "expected the optimizer of the checkpoint, AdamW, SGD, got SGD, AdamW"),
    ],
)
def test_a_state_of_other_objects_is_rejected_and_nothing_changes(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    objects = KINDS["gan"](world_of_one(), "a")
    train(objects, range(1))
    there = Elsewhere.of(Registered(objects).state())
    other = KINDS["gan"](world_of_one(), "b")
    change(other)
    before = all_bits(other["generator"].state_dict())
    with pytest.raises(CheckpointRejected, match=message):
        there.restore(Registered(other).state())
    assert all_bits(other["generator"].state_dict()) == before


def nested(levels: int) -> list[Any]:
    return [nested(levels - 1)] if levels else []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.update(objects=[]), "expected class, groups, scalars"),
        (lambda x: x.update(objects={"average": {"$what": 1}}), "names, got other ones"),
        (lambda x: x.update(declared_steps={"model": -1}), "expected class, groups, scalars"),
        (lambda x: x["objects"]["average"].update(best=1), "the state of the object 'average'"),
        (lambda x: x["objects"]["average"].update(best=nested(40)), "at most 32 levels"),
    ],
)
def test_json_that_was_changed_is_rejected_before_anything_has_changed(
    change: Callable[[Any], object], message: str
) -> None:
    objects = KINDS["averages"](world_of_one(), "a")
    train(objects, range(1))
    there = Elsewhere.of(Registered(objects).state())
    change(there.options)
    other = KINDS["averages"](world_of_one(), "b")
    before = hash_of(other, 0)
    with pytest.raises(CheckpointRejected, match=message):
        there.restore(Registered(other).state())
    assert hash_of(other, 0) == before


@world(2)
def test_models_of_different_ranks_are_refused(mesh: Mesh) -> None:
    wide, narrow = (
        DataParallel(Net(key), process_group=of) for key, of in (("a", mesh), ("b", world_of_one()))
    )
    with pytest.raises(ValueError, match=r"'wide' is trained by ranks \[0, 1\], and 'narrow' is trained by"):
        Registered({"wide": wide, "narrow": narrow}).state()
    with pytest.raises(ValueError, match="the run is trained by ranks"):
        Registered({"narrow": narrow}).state(mesh.world.group)


@world(4, dp=2, shard=2)
def test_slices_of_different_groups_are_refused(mesh: Mesh) -> None:
    half, module = fully_shard(Net("a"), mesh, stage=3), Net("b")
    model = DataParallel(module, process_group=mesh)
    other = ShardedOptimizer(module.parameters(), SGD, mesh["dp"], lr=0.1)
    with pytest.raises(ValueError, match=r"'half' is divided among ranks .*shard all over the same ranks"):
        Registered({"half": half, "model": model, "other": other}).state()


def test_several_shard_groups_save_what_any_ranks_load(tmp_path: Path) -> None:
    kind = "one model in slices"
    expected(kind)
    world(4, dp=2, shard=2)(train_and_save)(kind=kind, directory=tmp_path)
    world(2)(load_and_go_on)(kind=kind, directory=tmp_path)
