"""Sharded optimizers: of which classes, over which ranks, and what a program may do around one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adafactor,
    Adam,
    AdamW,
    Muon,
    Optimizer,
    RMSprop,
    SparseAdam,
)

import instep
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import filled, momentum, numbers, world_of_one
from tests.replicate.replicas import equal_everywhere
from tests.shard.given import SHAPES, parameters, set_gradients, steps
from tests.shard.trained import WIDTH, Wide, assert_same
from tests.world import world

LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}  # as tests.parity.momentum


def undeclared(mesh: Mesh, model: DataParallel, optimizer: torch.optim.Optimizer, num_steps: int = 2) -> None:
    for step in range(num_steps):
        optimizer.zero_grad()
        model(numbers(4, WIDTH, key=f"{step} on rank {mesh.rank}")).square().mean().backward()
        optimizer.step()


def expected(mesh: Mesh) -> dict[str, Any]:
    """The weights after ``undeclared`` with the plain optimizer."""
    module = filled(Wide())
    model = DataParallel(module, process_group=mesh)
    undeclared(mesh, model, momentum(module.parameters()))
    model.close()
    return module.state_dict()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_wrapping_with_data_parallel_before_or_after_is_the_same(backend: str) -> None:
    @world(2, backend=backend)
    def body(mesh: Mesh) -> None:
        wanted = expected(mesh)
        for wrapped_first in (True, False):
            module = filled(Wide())
            if wrapped_first:
                model = DataParallel(module, process_group=mesh)
            optimizer = ShardedOptimizer(module.parameters(), SGD, mesh, **LOOP)
            if not wrapped_first:
                model = DataParallel(module, process_group=mesh)
            undeclared(mesh, model, optimizer)
            assert_same({**module.state_dict()}, {**wanted}, "weights")
            optimizer.close()
            model.close()

    body()


@world(2)
def test_all_ranks_begin_with_the_values_of_the_first(mesh: Mesh) -> None:
    module = filled(Wide())
    with torch.no_grad():
        module.layers[0].weight.add_(mesh.rank)
    optimizer = ShardedOptimizer(module.parameters(), SGD, mesh, **LOOP)
    assert_same({**module.state_dict()}, {**filled(Wide()).state_dict()}, "weights")
    optimizer.close()


@world(2)
def test_parameters_stay_the_same_objects_and_are_aligned(mesh: Mesh) -> None:
    module = Wide()
    before = [*module.parameters()]
    optimizer = ShardedOptimizer(before, SGD, mesh, **LOOP)
    assert all(x is y for x, y in zip(module.parameters(), before, strict=True))
    assert all(p.data_ptr() % 64 == 0 and p.is_leaf and p.requires_grad for p in before)
    assert optimizer.param_groups[0]["params"] == before
    optimizer.close()


CHANGES: dict[str, Callable[[list[nn.Parameter]], None]] = {
    "data": lambda given: setattr(given[1], "data", given[1].data.clone()),
    "another shape": lambda given: setattr(given[3], "data", given[3].data.t()),
    "another dtype": lambda given: setattr(given[1], "data", given[1].data.double()),
}


@pytest.mark.parametrize("change", CHANGES)
@world(2)
def test_memory_that_was_replaced_is_an_error_and_nothing_is_changed(mesh: Mesh, change: str) -> None:
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    set_gradients(ours, 0)
    before = ours[0].detach().clone()
    kept = [p.data for p in ours]
    CHANGES[change](ours)
    with pytest.raises(ValueError, match=r"parameter \d of group 0, shape .* has other memory"):
        optimizer.step()
    for p, data in zip(ours, kept, strict=True):
        p.data = data
    assert_same(ours[0].detach(), before, "weights")
    optimizer.step()  # it can go on
    assert not torch.equal(ours[0], before)
    optimizer.close()


@world(2)
def test_an_error_on_one_rank_alone_is_raised_on_both(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    set_gradients(ours, 0)
    if mesh.rank == 1:
        ours[1].data = ours[1].data.clone()
    kind, message = (
        (RuntimeError, "rank 1 raised, .* weights and moments are not of the same step any more"),
        (ValueError, "parameter 1 of group 0, shape .* has other memory"),
    )[mesh.rank]
    with pytest.raises(kind, match=message):
        optimizer.step()
    with pytest.raises(RuntimeError, match="cannot go on, because in step 0 rank 1 raised"):
        optimizer.step()
    optimizer.close()


@world(2)
def test_unfreezing_later_is_an_error_and_freezing_is_not(mesh: Mesh) -> None:
    ours = parameters()
    ours[3].requires_grad_(False)
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    place, values = ours[3].data_ptr(), ours[3].detach().clone()
    ours[0].requires_grad_(False)
    set_gradients(ours, 0)
    ours[0].grad = ours[3].grad = None
    first = ours[0].detach().clone()
    optimizer.step()
    assert ours[3].data_ptr() == place
    assert_same([ours[3].detach(), ours[0].detach()], [values, first], "frozen")
    ours[3].requires_grad_(True)
    with pytest.raises(ValueError, match=r"parameter 3 of group 0, .* was frozen .* add_param_group\(\)"):
        optimizer.step()
    optimizer.close()


@world(2)
def test_two_sharded_optimizers_of_one_parameter_are_refused(mesh: Mesh) -> None:
    ours = parameters()
    first = ShardedOptimizer(ours[:4], AdamW, mesh)
    with pytest.raises(ValueError, match=r"parameter 1, shape \(131, 77\), belongs to another ShardedOpt"):
        ShardedOptimizer([ours[6], ours[3]], AdamW, mesh)
    second = ShardedOptimizer(ours[4:], SGD, mesh, lr=0.1)  # others are fine, and it can go on
    for optimizer, given in ((first, ours[:4]), (second, ours[4:])):
        set_gradients(given, 0)
        optimizer.step()
    first.close()
    third = ShardedOptimizer(ours[:4], AdamW, mesh)
    third.close()
    second.close()


@world(2)
def test_an_optimizer_that_nobody_has_any_more_has_no_parameters(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    optimizer.register_step_pre_hook(optimizer.zero_grad)  # a cycle, which is found by and by
    del optimizer
    again = ShardedOptimizer(ours, AdamW, mesh)
    steps(again, ours, 1)
    again.close()


@world(2)
def test_a_closed_one_says_so_and_its_parameters_go_on(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    optimizer.close()
    for call in (optimizer.step, optimizer.state_dict, optimizer.sharded_state_dict):
        with pytest.raises(RuntimeError, match="is closed: make another one"):
            call()
    plain = AdamW(ours)
    steps(plain, ours, 1)


@world(2)
def test_parameters_that_are_given_twice_are_refused(mesh: Mesh) -> None:
    ours = parameters()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, and would step it twice
        with pytest.raises(ValueError, match="given twice: pass tied parameters once"):
            ShardedOptimizer([*ours, ours[0]], AdamW, mesh)
    with pytest.raises(ValueError, match="more than one parameter group"):
        ShardedOptimizer([{"params": ours}, {"params": [ours[0]]}], AdamW, mesh)


@world(2)
def test_parameters_that_share_memory_are_refused(mesh: Mesh) -> None:
    memory = torch.zeros(10, 10)
    with pytest.raises(ValueError, match="two parameters share memory"):
        ShardedOptimizer([nn.Parameter(memory[:6]), nn.Parameter(memory[5:])], AdamW, mesh)
    apart = ShardedOptimizer([nn.Parameter(memory[:5]), nn.Parameter(memory[5:])], AdamW, mesh)
    apart.close()
    columns = ShardedOptimizer([nn.Parameter(memory[:, :4]), nn.Parameter(memory[:, 4:])], AdamW, mesh)
    columns.close()
    with pytest.raises(ValueError, match="materialise the module first"):
        ShardedOptimizer(nn.Linear(2, 2, device="meta").parameters(), AdamW, mesh)


@world(2)
def test_gradients_in_another_layout_are_used_rightly(mesh: Mesh) -> None:
    ours, plain = (nn.Parameter(numbers(90, 100, key="value")) for _ in range(2))
    optimizer, other = ShardedOptimizer([ours], SGD, mesh, lr=0.1), SGD([plain], lr=0.1)
    for p, stepping in ((ours, optimizer), (plain, other)):
        p.grad = numbers(100, 90, key="gradient").t()
        stepping.step()
    assert torch.equal(ours, plain)
    optimizer.close()


@world(2)
def test_sparse_gradients_are_an_error_with_a_way_out(mesh: Mesh) -> None:
    embedding = nn.Embedding(100, 50, sparse=True)
    optimizer = ShardedOptimizer(embedding.parameters(), AdamW, mesh)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"parameter 0 of group 0, .* sparse gradient: .* sparse=False"):
        optimizer.step()
    optimizer.close()


@world(3)
def test_groups_added_later_are_trained_too(mesh: Mesh) -> None:
    ours, plain = parameters(), parameters()
    sharded, other = ShardedOptimizer(ours[:3], AdamW, mesh, lr=0.1), AdamW(plain[:3], lr=0.1)
    steps(sharded, ours, 1)
    steps(other, plain, 1)
    sharded.add_param_group({"params": ours[3:], "lr": 0.3})
    other.add_param_group({"params": plain[3:], "lr": 0.3})
    steps(sharded, ours, 2, first=1)
    steps(other, plain, 2, first=1)
    assert_same([p.detach() for p in ours], [p.detach() for p in plain], "weights")
    saved = copy.deepcopy(sharded.state_dict())
    assert_same(saved, other.state_dict(), "state")
    sharded.load_state_dict(saved)
    steps(sharded, ours, 1, first=3)
    steps(other, plain, 1, first=3)
    assert_same([p.detach() for p in ours], [p.detach() for p in plain], "weights")
    sharded.close()


@world(2)
def test_groups_that_cannot_be_added_change_nothing(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = ShardedOptimizer(ours[:3], AdamW, mesh)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": ours[2:]})
    with pytest.raises(ValueError, match=r"parameter group 1: .*lr=0\..* on rank 0, but"):
        optimizer.add_param_group({"params": ours[3:], "lr": 0.5 + mesh.rank})
    assert len(optimizer.param_groups) == 1
    steps(optimizer, ours[:3], 1)
    optimizer.close()


@world(2)
def test_a_graph_from_before_the_step_is_not_used_after_it(mesh: Mesh) -> None:
    """New values come from another rank without torch knowing."""
    ours = parameters(((5, 4096), (3, 4096)))
    optimizer = ShardedOptimizer(ours, SGD, mesh, lr=0.1)
    loss = (ours[0][0] * ours[0][0]).sum() + (ours[1] * ours[1]).sum()
    set_gradients(ours, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.close()


def test_one_rank_raises_as_the_plain_optimizer_and_goes_on() -> None:
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, world_of_one())
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    steps(optimizer, ours, 1)
    optimizer.close()


NOT_EMPTY = tuple(shape for shape in SHAPES if 0 not in shape)
MATRICES = ((131, 77), (5, 4096), (3, 2), (64, 64), (12, 800))


def assert_as_plain(
    mesh: Mesh,
    kind: type[Optimizer],
    options: dict[str, Any],
    shapes: Any = SHAPES,
    dtype: Any = torch.float32,
) -> None:
    """After four steps everything is as the plain optimizer leaves it."""
    ours, expected = parameters(shapes, dtype), parameters(shapes, dtype)
    sharded, plain = ShardedOptimizer(ours, kind, mesh, **options), kind(expected, **options)
    steps(sharded, ours, 4)
    steps(plain, expected, 4)
    for x, y in zip(ours, expected, strict=True):
        assert_same(x.detach(), y.detach(), kind.__name__)
    assert_same(sharded.state_dict(), plain.state_dict(), kind.__name__)
    assert sharded.defaults == plain.defaults
    sharded.close()


HALF: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (SGD, {"lr": 0.1, "foreach": True}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (ASGD, {}),
    (Adam, {"weight_decay": 0.01}),
    (AdamW, {"fused": True}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@world(2)
def test_in_half_precision_threads_do_not_cut_where_ranks_do(mesh: Mesh, dtype: torch.dtype) -> None:
    """Two threads cut tensors of more than 32768 elements, whole ones in other places than slices of them."""
    before = torch.get_num_threads()
    try:
        for kind, options in HALF:
            after = []
            for ranks, threads in ((mesh, 2), (world_of_one(), 2), (None, 1)):
                torch.set_num_threads(threads)
                given = parameters(((102437,), (37, 4099)), dtype)
                optimizer = kind(given, **options)
                if ranks is not None:
                    optimizer = ShardedOptimizer(given, kind, ranks, **options)
                steps(optimizer, given, 3)
                assert torch.get_num_threads() == threads
                after.append([p.detach() for p in given])
            for other in after[1:]:
                assert_same(after[0], other, kind.__name__)
    finally:
        torch.set_num_threads(before)


@world(3)
def test_optimizers_of_whole_matrices_get_them(mesh: Mesh) -> None:
    assert_as_plain(mesh, Adafactor, {"lr": 0.01}, NOT_EMPTY)
    assert_as_plain(mesh, Muon, {"lr": 0.01}, MATRICES)


class SignOfTheMean(Optimizer):
    """A user's optimizer, which looks at a whole parameter and counts in its group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["mean"] = p.grad.mean()
                    self.state[p]["name"] = "a word"
                    p.add_(self.state[p]["mean"].sign(), alpha=-group["lr"] / group["count"])


class OwnAdamW(AdamW):
    """A subclass may do anything, so it is not cut."""


@world(3)
def test_optimizers_that_are_not_known_get_whole_parameters(mesh: Mesh) -> None:
    assert_as_plain(mesh, SignOfTheMean, {"lr": 0.5}, NOT_EMPTY)
    assert_as_plain(mesh, OwnAdamW, {"lr": 0.5})
    ours = parameters()
    optimizer = ShardedOptimizer(ours, OwnAdamW, mesh)
    pieces = optimizer.sharded_state_dict()["pieces"]
    assert all((x["first"], x["last"]) == (0, ours[x["parameter"]].numel()) for x in pieces)
    optimizer.close()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(LBFGS, r"LBFGS cannot be sharded: .* on every rank"), (SparseAdam, "SparseAdam .* sparse=False")],
)
@world(2)
def test_optimizers_that_cannot_be_sharded_are_refused_with_a_way_out(
    mesh: Mesh, kind: type[Optimizer], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        ShardedOptimizer(parameters(), kind, mesh)


@world(2)
def test_what_is_no_class_of_optimizers_is_refused(mesh: Mesh) -> None:
    for wrong in (torch.nn.Linear, AdamW(parameters()), [AdamW], "adamw"):
        with pytest.raises(
            TypeError, match=r"optimizer_cls: expected a class such as torch.optim.AdamW, got"
        ):
            ShardedOptimizer(parameters(), wrong, mesh)
    with pytest.raises(ValueError, match="differentiable=True cannot be sharded"):
        ShardedOptimizer(parameters(), AdamW, mesh, differentiable=True)
    two_dtypes = [*parameters([(72,)], torch.bfloat16), *parameters([(72, 72)])]
    with pytest.raises(
        ValueError, match=r"bfloat16 and torch.float32, and Adafactor .* group for each dtype"
    ):
        ShardedOptimizer(two_dtypes, Adafactor, mesh)
    ShardedOptimizer(two_dtypes, Adafactor, mesh, eps=(1e-7, 1e-3)).close()


@world(2)
def test_what_the_class_itself_refuses_is_refused_on_all_ranks(mesh: Mesh) -> None:
    """Muon takes matrices only, and the vector is the second rank's."""
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        ShardedOptimizer(parameters(((80, 80), (900,))), Muon, mesh)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ShardedOptimizer(parameters(), AdamW, mesh, lr=-1.0)


@world(2)
def test_a_closure_gives_the_loss_and_the_gradients(mesh: Mesh) -> None:
    ours, expected = parameters(), parameters()
    sharded, plain = ShardedOptimizer(ours, AdamW, mesh), AdamW(expected)

    def closure(optimizer: Optimizer, given: list[torch.nn.Parameter]) -> Tensor:
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in given)
        loss.backward()
        return loss

    for _ in range(2):
        loss = sharded.step(lambda: closure(sharded, ours))
        assert torch.equal(loss, plain.step(lambda: closure(plain, expected)))
    for x, y in zip(ours, expected, strict=True):
        assert_same(x.detach(), y.detach(), "closure")
    sharded.close()


def assert_steps(optimizer: instep.ShardedOptimizer, given: list[torch.nn.Parameter], size: int) -> None:
    assert optimizer.group.size == size
    steps(optimizer, given, 2)
    expected = parameters()
    steps(AdamW(expected, lr=0.1), expected, 2)
    assert_same([p.detach() for p in given], [p.detach() for p in expected], "weights")
    optimizer.close()


def test_without_any_group_it_is_the_plain_optimizer() -> None:
    given = parameters()
    assert_steps(instep.ShardedOptimizer(given, AdamW, lr=0.1), given, 1)


@world(3, by="process")
def test_torch_groups_and_the_default_group(mesh: Mesh) -> None:
    for group in (None, dist.group.WORLD):
        given = parameters()
        assert_steps(instep.ShardedOptimizer(given, AdamW, group, lr=0.1), given, 3)
    pair = dist.new_group([0, 2])
    if mesh.rank != 1:
        given = parameters()
        assert_steps(instep.ShardedOptimizer(given, AdamW, pair, lr=0.1), given, 2)


@world(4, dp=2, tp=2)
def test_an_axis_of_a_mesh(mesh: Mesh) -> None:
    for process_group in (mesh, mesh["dp"], mesh["tp"]):
        given = parameters()
        assert_steps(instep.ShardedOptimizer(given, AdamW, process_group, lr=0.1), given, 2)


@world(2, by="process", backend="shm")
def test_a_gradient_scaler_a_scheduler_and_torch_s_clipping_work_as_ever(mesh: Mesh) -> None:
    results = []
    for sharded in (True, False):
        torch.manual_seed(0)
        module = Wide()
        optimizer = (
            instep.ShardedOptimizer(module.parameters(), SGD, mesh, lr=0.1, momentum=0.9)
            if sharded
            else SGD(module.parameters(), lr=0.1, momentum=0.9)
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=5)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            loss = module(numbers(4, WIDTH, key=f"{step}")).square().mean()
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        results.append(({**module.state_dict()}, optimizer.state_dict(), scaler.get_scale()))
    assert_same(results[0][0], results[1][0], "weights")
    assert_same(results[0][1], results[1][1], "state")
    assert results[0][2] == results[1][2] == 256.0
    assert equal_everywhere(mesh, module.parameters())


@world(2)
@pytest.mark.parametrize("added", [(3,), (1, 3), (0,), (1, 2)], ids=str)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_group_added_later_may_have_a_part_of_a_unit(
    mesh: Mesh, stage: int, added: tuple[int, ...]
) -> None:
    """The parameters of the unit that an earlier group has were never stepped again."""

    def trained(is_sharded: bool) -> dict[str, torch.Tensor]:
        module = filled(torch.nn.Sequential(torch.nn.Linear(70, 70), torch.nn.Linear(70, 70)))
        model = instep.fully_shard(module, mesh, stage=stage)
        given = list(model.parameters())
        first = [p for i, p in enumerate(given) if i not in added]
        optimizer = instep.ShardedOptimizer(first, SGD, mesh, lr=0.1) if is_sharded else SGD(first, lr=0.1)
        optimizer.add_param_group({"params": [given[i] for i in added], "lr": 0.001})
        for micro_batch in model.micro_batches(2):
            model(numbers(3, 70, key=str(micro_batch.index))).square().sum().backward()
        optimizer.step()
        return {name: x.clone() for name, x in instep.full_state_dict(model).items()}

    assert_same(trained(True), trained(False), "weights")
