"""What goes wrong around a sharded module is an error on every rank, by name, with the way out."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import FullySharded, full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import filled, numbers, world_of_one
from tests.replicate.nets import Tied
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
def test_a_rank_whose_units_are_wrong_makes_all_raise(mesh: Mesh, stage: int) -> None:
    model = filled(Wide())
    with pytest.raises(ValueError, match=r"unit"):
        fully_shard(model, mesh, stage, units=[nn.Linear(3, 3)] if mesh.rank else None)


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
    def double(model: nn.Module) -> None:
        model.double()

    def replace(model: nn.Module) -> None:
        p = next(model.parameters())
        p.data = torch.zeros(p.shape, dtype=torch.float64)

    for change in (double, replace):
        model = fully_shard(filled(Wide()), mesh, stage)
        wrong = r"'layers\.0\.weight' (has|would have) other memory than when it was sharded"
        with pytest.raises(ValueError, match=wrong):  # noqa: PT012
            change(model)
            backwards(model, 2)
        model.close()


@world(2)
@STAGES
def test_a_module_is_sharded_or_wrapped_once(mesh: Mesh, stage: int) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Wide()
            self.outer = nn.Linear(2, 2)

    module = filled(Two())
    inner = fully_shard(module.inner, mesh, stage)
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard(inner, mesh, stage)
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' is sharded by fully_shard already"):
        fully_shard(module, mesh, stage)
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' is sharded by fully_shard"):
        DataParallel(module, process_group=mesh)
    inner.close()
    module = filled(Wide())
    wrapped = DataParallel(module, process_group=mesh)
    with pytest.raises(ValueError, match="belongs to a DataParallel"):
        fully_shard(module, mesh, stage)
    wrapped.close()
    fully_shard(module, mesh, stage).close()


@world(2)
def test_arguments_that_cannot_be_meant(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="stage=1: expected 2"):
        fully_shard(Wide(), mesh, 1)
    with pytest.raises(ValueError, match=r"expected one of floating point, got torch\.int8"):
        fully_shard(Wide(), mesh, 2, compute_dtype=torch.int8)
    with pytest.raises(ValueError, match="one_copy=True is for stage 2"):
        fully_shard(Wide(), mesh, 3, one_copy=True)
    with pytest.raises(ValueError, match="attribute 'group' of its own"):
        fully_shard(Named(), mesh)
    with pytest.raises(ValueError, match="'' has sparse gradients"):
        fully_shard(nn.Embedding(4, 2, sparse=True), mesh)
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' is on the meta device"):
        fully_shard(Wide().to("meta"), mesh, 2)


@world(2)
@STAGES
def test_ranks_with_different_modules_or_options_all_raise(mesh: Mesh, stage: int) -> None:
    with pytest.raises(ValueError, match="the ranks differ in models: parameter 'weight', shape"):
        fully_shard(nn.Linear(2, 2 + mesh.rank), mesh, stage)
    with pytest.raises(
        ValueError, match="the ranks differ in options: seed=0 on rank 0, but seed=1 on rank 1"
    ):
        fully_shard(nn.Linear(2, 2), mesh, stage, seed=mesh.rank)
    module = filled(nn.Linear(2, 2))
    with torch.no_grad():
        module.bias.add_(mesh.rank)
    with pytest.raises(ValueError, match="has other values on rank 1 than on 0"):
        fully_shard(module, mesh, stage, init_sync="verify")
    one = nn.Embedding(4, 2, sparse=mesh.rank == 1)
    with pytest.raises(ValueError, match="sparse=False"):
        fully_shard(one, mesh, stage)


class Named(nn.Module):
    """Has a name of its own that a sharded module needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.group = "mine"


# What rank 1 alone shards, how, and what it says of it.
REFUSALS: dict[str, tuple[Callable[[], nn.Module], dict[str, int], str]] = {
    "writes to a weight": (lambda: nn.Embedding(4, 2, max_norm=1.0), {}, r"'' has max_norm=1\.0"),
    "a name": (Named, {}, "the module has an attribute 'group' of its own"),
    "stage": (Wide, {"stage": 1}, "stage=1: expected 2"),
    "values": (Wide, {"init_sync": 0}, "init_sync=0: expected True or 'verify'"),
}


@pytest.mark.parametrize("kind", REFUSALS)
@world(3)
def test_what_one_rank_refuses_all_raise_and_name_it(mesh: Mesh, kind: str) -> None:
    make, options, message = REFUSALS[kind]
    module = make() if mesh.rank == 1 else Wide()
    with pytest.raises(ValueError, match=f"^{message}" if mesh.rank == 1 else f"^rank 1: {message}"):
        fully_shard(module, mesh, **(options if mesh.rank == 1 else {}))
    model = fully_shard(filled(Wide()), mesh)  # all can go on
    backwards(model)
    model.close()


@world(2)
@STAGES
def test_rank_0s_values_are_everybodys_buffers_and_frozen_parameters_too(mesh: Mesh, stage: int) -> None:
    module = filled(Tied())
    module.register_buffer("counts", torch.arange(3.0))
    expected = {name: x.clone() for name, x in module.state_dict().items()}
    with torch.no_grad():
        for x in [*module.parameters(), module.counts]:
            x.add_(mesh.rank)
    model = fully_shard(module, mesh, stage)
    assert_same(full_state_dict(model), expected, "state")
    model.close()


def leave_at(mesh: Mesh, model: nn.Module, when: Callable[[int, bool], bool]) -> None:
    """Rank 1 leaves the loop in its micro-batch where ``when(count, after backward)`` says so."""
    for count, micro_batch in enumerate(model.micro_batches(7)):  # type: ignore[operator]
        if mesh.rank == 1 and when(count, False):
            return
        wide_step(model, micro_batch, 0)
        if mesh.rank == 1 and when(count, True):
            return


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@STAGES
def test_leaving_the_loop_makes_the_others_raise_and_all_can_go_on(backend: str, stage: int) -> None:
    @world(3, backend=backend)
    def body(mesh: Mesh) -> None:
        reference = fully_shard(filled(Wide()), mesh, stage)
        optimizer = ShardedOptimizer(reference.parameters(), SGD, mesh, **LOOP)
        declared(reference, optimizer)
        expected = full_state_dict(reference)
        reference.close()
        model = fully_shard(filled(Wide()), mesh, stage)
        optimizer = ShardedOptimizer(model.parameters(), SGD, mesh, **LOOP)
        for count in (0, 1):
            for after in (False, True):
                if mesh.rank == 1:
                    leave_at(mesh, model, lambda c, a, want=(count, after): (c, a) == want)  # type: ignore[misc]
                else:
                    with pytest.raises(Desync, match="rank 1 left step 0 before its gradients were complete"):
                        leave_at(mesh, model, lambda c, a: False)
                assert all(p.grad is None for p in model.parameters())
                with pytest.raises(RuntimeError, match="after a step that was given up"):
                    optimizer.step()
        declared(model, optimizer)
        assert_same(full_state_dict(model), expected, "weights")
        model.close()

    body()


@world(2)
@STAGES
def test_ranks_that_are_out_of_step_all_raise(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(Wide()), mesh, stage)
    with pytest.raises(Desync, match=r"expects (2|3) micro-batches in the step"):
        backwards(model, 2 + mesh.rank)
    undeclared_on_one = functools.partial(plain, mesh) if mesh.rank == 0 else backwards
    with pytest.raises(Desync, match="is in a declared step"):
        undeclared_on_one(model)
    model.close()


@world(2)
@STAGES
def test_a_gradient_that_was_never_exchanged_is_not_stepped_with(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(Wide()), mesh, stage)
    optimizer = ShardedOptimizer(model.parameters(), SGD, mesh, **LOOP)
    with model.no_sync():
        plain(mesh, model)
    with pytest.raises(RuntimeError, match="never exchanged with the other ranks"):
        optimizer.step()
    optimizer.close()
    model.close()


@STAGES
def test_a_sharded_module_stays_an_instance_of_its_class_until_it_is_closed(stage: int) -> None:
    module = filled(Wide())
    parameters = dict(module.named_parameters())
    model = fully_shard(module, world_of_one(), stage)
    assert model is module and isinstance(model, Wide) and isinstance(model, FullySharded)
    assert type(model).__name__ == "FullyShardedWide"
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == list(parameters)
    assert model.step_mode is None and model.placement == {"strategy": "fully_shard", "stage": stage}
    for broken in (lambda: copy.deepcopy(model), lambda: pickle.dumps(model)):
        with pytest.raises(TypeError, match="full_state_dict"):
            broken()
    model(numbers(4, WIDTH, key="x")).sum().backward()
    assert model.step_mode == "undeclared"
    model.close()
    assert type(module) is Wide and not hasattr(module, "micro_batches")
    assert all(p.grad is None for p in module.parameters())


def test_a_module_that_stage_2_has_let_go_trains_on() -> None:
    model = fully_shard(filled(Wide()), world_of_one(), 2)
    model.close()
    optimizer = SGD(model.parameters(), lr=0.1)
    before = model.layers[0].weight.clone()
    model(numbers(4, WIDTH, key="x")).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, model.layers[0].weight)
    copy.deepcopy(model)


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


class OwnMethod(Wide):
    def verify(self, x: int) -> int:
        return x + 1


class OwnModule(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.verify = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.verify(super().forward(x))


@STAGES
def test_a_module_keeps_a_verify_of_its_own(stage: int) -> None:
    for kind in (OwnMethod, OwnModule):
        module = filled(kind())
        before = module.verify
        model = fully_shard(module, world_of_one(), stage)
        assert isinstance(model, FullySharded) and model.verify == before
        x = numbers(4, WIDTH, key="x")
        assert model.sharding.verify(x, lambda model, x: model(x).square().mean()).ok
        model.close()
        assert type(module) is kind
