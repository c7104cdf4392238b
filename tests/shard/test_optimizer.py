"""Sharded optimizers: the bits of the plain one, what may be done around one, ranks that differ or fail."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import ASGD, LBFGS, SGD, Adafactor, Adam, AdamW, Muon, Optimizer, RMSprop, SparseAdam

import instep
from instep.errors import Desync, PeerLost
from instep.launch.launch import RankFailed, launch
from instep.mesh.join import init
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import filled, momentum, numbers, world_of_one
from tests.replicate.replicas import equal_everywhere
from tests.shard.given import SHAPES, parameters, set_gradients, steps
from tests.shard.trained import WIDTH, Wide, assert_same, copied
from tests.world import world

LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}  # as tests.parity.momentum
OPTIONS: dict[str, Any] = {"lr": 0.1, "fused": True, "amsgrad": True}
NOT_EMPTY = tuple(shape for shape in SHAPES if 0 not in shape)


def values(given: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in given]


def plainly(num_steps: int, **options: Any) -> tuple[list[nn.Parameter], AdamW]:
    """Parameters after so many steps of the plain optimizer, and that."""
    given = parameters()
    optimizer = AdamW(given, **options)
    steps(optimizer, given, num_steps)
    return given, optimizer


# Which classes are cut, and which get whole parameters.


def assert_as_plain(
    ranks: Any, kind: type[Optimizer], options: dict[str, Any], shapes: Any = SHAPES, **made: Any
) -> ShardedOptimizer:
    """After four steps everything is as the plain optimizer leaves it."""
    ours, expected = parameters(shapes, **made), parameters(shapes, **made)
    sharded, plain = ShardedOptimizer(ours, kind, ranks, **options), kind(expected, **options)
    steps(sharded, ours, 4)
    steps(plain, expected, 4)
    assert_same(values(ours), values(expected), kind.__name__)
    assert_same(sharded.state_dict(), plain.state_dict(), kind.__name__)
    assert sharded.defaults == plain.defaults
    return sharded


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
                after.append(values(given))
            assert_same(after[1:], after[:1] * 2, kind.__name__)
    finally:
        torch.set_num_threads(before)


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
def test_optimizers_that_are_not_known_or_look_at_matrices_get_whole_parameters(mesh: Mesh) -> None:
    assert_as_plain(mesh, Adafactor, {"lr": 0.01}, NOT_EMPTY)
    assert_as_plain(mesh, Muon, {"lr": 0.01}, ((131, 77), (5, 4096), (3, 2), (64, 64), (12, 800)))
    assert_as_plain(mesh, SignOfTheMean, {"lr": 0.5}, NOT_EMPTY)
    optimizer = assert_as_plain(mesh, OwnAdamW, {"lr": 0.5})
    given = optimizer.param_groups[0]["params"]
    pieces = optimizer.sharded_state_dict()["pieces"]
    assert all((x["first"], x["last"]) == (0, given[x["parameter"]].numel()) for x in pieces)


# Which ranks are meant.


def test_without_any_group_it_is_the_plain_optimizer() -> None:
    assert assert_as_plain(None, AdamW, {}).group.size == 1


@world(3, by="process")
def test_torch_groups_and_the_default_group(mesh: Mesh) -> None:
    for group in (None, dist.group.WORLD):
        sharded = assert_as_plain(group, AdamW, {})
        assert sharded.group.size == 3
        sharded.close()
    pair = dist.new_group([0, 2])
    if mesh.rank != 1:
        assert_as_plain(pair, AdamW, {}).close()


@world(4, dp=2, tp=2)
def test_an_axis_of_a_mesh(mesh: Mesh) -> None:
    for process_group in (mesh, mesh["dp"], mesh["tp"]):
        assert assert_as_plain(process_group, AdamW, {}).group.size == 2


# What is refused when it is made, on all ranks.


def of_rank_one(mesh: Mesh, name: str) -> None:
    """On rank 1 one thing is different."""
    given, kind, options = parameters(), AdamW, {"lr": 0.1}
    if mesh.rank == 1:
        match name:
            case "order":
                given[0], given[1] = given[1], given[0]
            case "dtype":
                given[2] = nn.Parameter(given[2].double())
            case "frozen":
                given[3].requires_grad_(False)
            case "number":
                given.pop()
            case "class":
                kind = Adam
            case "option":
                options = {"lr": 0.2}
            case "groups":
                given = [{"params": given[:3]}, {"params": given[3:]}]
            case "names":
                given = [(str(i), p) for i, p in enumerate(given)]
            case "nothing at all":
                given = []
    ShardedOptimizer(given, kind, mesh, **options)


DIFFERENCES = {
    "order": r"parameter 0 of group 0: shape \(5, 4096\), .* rank 0, but .* shape \(4099,\)",
    "dtype": r"parameter 2 of group 0: .* float32, .* on rank 0, but .* float64, .* on rank 1",
    "frozen": r"parameter 3 of group 0: .* trainable on rank 0, but .* frozen on rank 1",
    "number": r"parameter 7 of group 0: .* on rank 0, but nothing on rank 1",
    "class": r"class torch.optim.adamw.AdamW on rank 0, but class torch.optim.adam.Adam on rank 1",
    "option": r"options lr=0.1 on rank 0, but options lr=0.2 on rank 1",
    "groups": r"parameter 3 of group 0: .* on rank 0, but parameter group 1: lr=0.1 on rank 1",
    "names": r"parameter 0 of group 0: .* on rank 0, but parameter 0 of group 0 '0'",
    "nothing at all": r"optimizer got an empty parameter list",
}
NO_CLASS = r"optimizer_cls: expected a class such as torch.optim.AdamW, got"
MEMORY = torch.zeros(10, 10)
OVERLAPPING = [nn.Parameter(MEMORY[:6]), nn.Parameter(MEMORY[5:])]
TWO_DTYPES = [*parameters([(72,)], torch.bfloat16), *parameters([(72, 72)])]
# Parameters, class and options, on all ranks, and what the error says.
REFUSED: list[tuple[Callable[[], Any], Any, dict[str, Any], str]] = [
    (parameters, LBFGS, {}, r"LBFGS cannot be sharded: .* on every rank"),
    (parameters, SparseAdam, {}, "SparseAdam .* sparse=False"),
    *[(parameters, wrong, {}, NO_CLASS) for wrong in (nn.Linear, AdamW(parameters()), [AdamW], "adamw")],
    (parameters, AdamW, {"differentiable": True}, "differentiable=True cannot be sharded"),
    (lambda: TWO_DTYPES, Adafactor, {}, r"bfloat16 and torch.float32, and Adafactor .* group for each dtype"),
    (lambda: parameters(((80, 80), (900,))), Muon, {}, "Muon only supports 2D"),  # the vector is rank 1's
    (parameters, AdamW, {"lr": -1.0}, "Invalid learning rate"),
    (lambda: [*(ours := parameters()), ours[0]], AdamW, {}, "given twice: pass tied parameters once"),
    (
        lambda: [{"params": (ours := parameters())}, {"params": ours[:1]}],
        AdamW,
        {},
        "more than one parameter",
    ),
    (lambda: OVERLAPPING, AdamW, {}, "two parameters share memory"),
    (lambda: nn.Linear(2, 2, device="meta").parameters(), AdamW, {}, "materialise the module first"),
]


def assert_steps(mesh: Mesh, given: Any = None) -> None:
    good = parameters() if given is None else given
    optimizer = ShardedOptimizer(good, SGD, mesh, lr=0.1)
    steps(optimizer, good, 1)
    optimizer.close()


@pytest.mark.parametrize("name", DIFFERENCES)
@world(2)
def test_ranks_that_differ_at_construction_are_told_where(mesh: Mesh, name: str) -> None:
    with pytest.raises(ValueError, match=DIFFERENCES[name]):
        of_rank_one(mesh, name)
    assert_steps(mesh)


@world(2)
def test_what_cannot_be_sharded_is_refused_with_a_way_out(mesh: Mesh) -> None:
    for make, kind, options, message in REFUSED:
        # torch warns of a parameter that is given twice, and would step it twice.
        with warnings.catch_warnings(), pytest.raises((ValueError, TypeError), match=message):  # noqa: PT012
            warnings.simplefilter("ignore")
            ShardedOptimizer(make(), kind, mesh, **options)
    for apart in (dim for dim in ((MEMORY[:5], MEMORY[5:]), (MEMORY[:, :4], MEMORY[:, 4:]))):
        assert_steps(mesh, [nn.Parameter(x) for x in apart])
    ShardedOptimizer(TWO_DTYPES, Adafactor, mesh, eps=(1e-7, 1e-3)).close()


@world(2)
def test_two_sharded_optimizers_of_one_parameter_are_refused(mesh: Mesh) -> None:
    ours = parameters()
    first = ShardedOptimizer(ours[:4], AdamW, mesh)
    with pytest.raises(ValueError, match=r"parameter 1, shape \(131, 77\), belongs to another ShardedOpt"):
        ShardedOptimizer([ours[6], ours[3]], AdamW, mesh)
    assert_steps(mesh, ours[4:])  # others are fine, and it can go on
    steps(first, ours[:4], 1)
    first.close()
    assert_steps(mesh, ours[:4])


@world(2)
def test_an_optimizer_that_nobody_has_any_more_has_no_parameters(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    optimizer.register_step_pre_hook(optimizer.zero_grad)  # a cycle, which is found by and by
    del optimizer
    assert_steps(mesh, ours)


@world(2)
def test_a_closed_one_says_so_and_its_parameters_go_on(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    optimizer.close()
    for call in (optimizer.step, optimizer.state_dict, optimizer.sharded_state_dict, optimizer.pieces):
        with pytest.raises(RuntimeError, match="is closed: make another one"):
            list(call() or ())
    steps(AdamW(ours), ours, 1)


# What a program does around one.


def undeclared(mesh: Mesh, model: DataParallel, optimizer: Optimizer) -> None:
    for step in range(2):
        optimizer.zero_grad()
        model(numbers(4, WIDTH, key=f"{step} on rank {mesh.rank}")).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("wrapped_first", [True, False])
@world(2, backend="shm")
def test_wrapping_with_data_parallel_before_or_after_is_the_same(mesh: Mesh, wrapped_first: bool) -> None:
    found = []
    for is_sharded in (True, False):
        module = filled(Wide())
        with torch.no_grad():
            module.layers[0].weight.add_(mesh.rank)  # all begin with the values of the first rank
        model = DataParallel(module, process_group=mesh) if wrapped_first or not is_sharded else None
        optimizer = (
            ShardedOptimizer(module.parameters(), SGD, mesh, **LOOP)
            if is_sharded
            else momentum(module.parameters())
        )
        undeclared(mesh, model or DataParallel(module, process_group=mesh), optimizer)
        found.append({**module.state_dict()})
    assert_same(*found, "weights")


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
    before, kept = ours[0].detach().clone(), [p.data for p in ours]
    CHANGES[change](ours)
    with pytest.raises(ValueError, match=r"parameter \d of group 0, shape .* has other memory"):
        optimizer.step()
    for p, data in zip(ours, kept, strict=True):
        p.data = data
    assert_same(ours[0].detach(), before, "weights")
    optimizer.step()  # it can go on
    assert not torch.equal(ours[0], before)


@world(2)
def test_unfreezing_later_is_an_error_and_freezing_is_not(mesh: Mesh) -> None:
    ours = parameters()
    ours[3].requires_grad_(False)
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    before, place = values(ours), ours[3].data_ptr()
    ours[0].requires_grad_(False)
    set_gradients(ours, 0)
    ours[0].grad = ours[3].grad = None
    optimizer.step()
    assert ours[3].data_ptr() == place
    assert_same([ours[3].detach(), ours[0].detach()], [before[3], before[0]], "frozen")
    ours[3].requires_grad_(True)
    with pytest.raises(ValueError, match=r"parameter 3 of group 0, .* was frozen .* add_param_group\(\)"):
        optimizer.step()


@world(2)
def test_gradients_in_another_layout_are_used_rightly(mesh: Mesh) -> None:
    ours, plain = (nn.Parameter(numbers(90, 100, key="value")) for _ in range(2))
    optimizer, other = ShardedOptimizer([ours], SGD, mesh, lr=0.1), SGD([plain], lr=0.1)
    for p, stepping in ((ours, optimizer), (plain, other)):
        p.grad = numbers(100, 90, key="gradient").t()
        stepping.step()
    assert torch.equal(ours, plain)


@world(3)
def test_groups_added_later_are_trained_too_and_those_that_cannot_be_change_nothing(mesh: Mesh) -> None:
    ours, plain = parameters(), parameters()
    sharded, other = ShardedOptimizer(ours[:3], AdamW, mesh, lr=0.1), AdamW(plain[:3], lr=0.1)
    for wrong, message in (
        ({"params": ours[2:]}, "more than one parameter group"),
        ({"params": ours[3:], "lr": 0.5 + mesh.rank}, r"parameter group 1: .*lr=0\..* on rank 0, but"),
    ):
        with pytest.raises(ValueError, match=message):
            sharded.add_param_group(wrong)
    assert len(sharded.param_groups) == 1
    for optimizer, given in ((sharded, ours), (other, plain)):
        steps(optimizer, given, 1)
        optimizer.add_param_group({"params": given[3:], "lr": 0.3})
        steps(optimizer, given, 2, first=1)
    saved = copy.deepcopy(sharded.state_dict())
    assert_same(saved, other.state_dict(), "state")
    sharded.load_state_dict(saved)
    steps(sharded, ours, 1, first=3)
    steps(other, plain, 1, first=3)
    assert_same(values(ours), values(plain), "weights")


@world(2)
@pytest.mark.parametrize("added", [(3,), (1, 3), (0,), (1, 2)], ids=str)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_group_added_later_may_have_a_part_of_a_unit(
    mesh: Mesh, stage: int, added: tuple[int, ...]
) -> None:
    """The parameters of the unit that an earlier group has were never stepped again."""
    found = []
    for is_sharded in (True, False):
        module = filled(nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 70)))
        model = instep.fully_shard(module, mesh, stage=stage)
        given = list(model.parameters())
        first = [p for i, p in enumerate(given) if i not in added]
        optimizer = ShardedOptimizer(first, SGD, mesh, lr=0.1) if is_sharded else SGD(first, lr=0.1)
        optimizer.add_param_group({"params": [given[i] for i in added], "lr": 0.001})
        for micro_batch in model.micro_batches(2):
            model(numbers(3, 70, key=str(micro_batch.index))).square().sum().backward()
        optimizer.step()
        found.append({name: x.clone() for name, x in instep.full_state_dict(model).items()})
    assert_same(*found, "weights")


@world(2)
def test_a_graph_from_before_the_step_is_not_used_after_it(mesh: Mesh) -> None:
    """New values come from another rank without torch knowing."""
    ours = parameters(((5, 4096), (3, 4096)))
    optimizer = ShardedOptimizer(ours, SGD, mesh, lr=0.1)
    loss = (ours[0][0] * ours[0][0]).sum() + (ours[1] * ours[1]).sum()
    steps(optimizer, ours, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@world(2, by="process", backend="shm")
def test_a_gradient_scaler_a_scheduler_and_torch_s_clipping_work_as_ever(mesh: Mesh) -> None:
    results = []
    for is_sharded in (True, False):
        module = filled(Wide())
        made: Any = (
            ShardedOptimizer if is_sharded else lambda params, kind, mesh, **options: kind(params, **options)
        )
        optimizer = made(module.parameters(), SGD, mesh, lr=0.1, momentum=0.9)
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
        results.append({"w": {**module.state_dict()}, "o": optimizer.state_dict(), "s": scaler.get_scale()})
    assert_same(*results, "state")
    assert results[0]["s"] == 256.0 and equal_everywhere(mesh, module.parameters())


# State dicts: whole, as the plain optimizer's, for any number of ranks; and sharded, for the same.

WHOLE, SHARDED, PLAIN = "whole", "sharded", "plain"


@pytest.mark.parametrize("route", [(WHOLE, PLAIN), (PLAIN, SHARDED), (SHARDED, SHARDED)], ids=str)
@world(3)
def test_a_state_goes_on_where_it_is_loaded(mesh: Mesh, route: tuple[str, str]) -> None:
    """From the sharded optimizer to the plain one, the other way, and as it was."""
    ours, (expected, plain) = parameters(), plainly(5, **OPTIONS)
    saves, loads = route
    first: Any = AdamW(ours, **OPTIONS) if saves == PLAIN else ShardedOptimizer(ours, AdamW, mesh, **OPTIONS)
    steps(first, ours, 3)
    saved = copied(first.sharded_state_dict()) if saves == SHARDED else first.state_dict()
    kept = copied(saved)
    with suppress(AttributeError):
        first.close()
    again: Any = AdamW(ours, lr=7.0) if loads == PLAIN else ShardedOptimizer(ours, AdamW, mesh, lr=7.0)
    again.load_state_dict(saved)
    steps(again, ours, 2, first=3)
    assert_same(values(ours), values(expected), "weights")
    assert_same(again.state_dict(), plain.state_dict(), "state")
    if loads == SHARDED:
        assert_same(saved, kept, "what was loaded is not written to")


@world(2)
def test_the_pieces_of_all_ranks_are_the_whole_state_which_no_rank_shows(mesh: Mesh) -> None:
    ours = parameters()
    sharded = ShardedOptimizer(ours, AdamW, mesh, **OPTIONS)
    steps(sharded, ours, 2)
    whole, mine = sharded.state_dict(), sharded.sharded_state_dict()
    assert mine["sharded"] == {"rank": mesh.rank, "world_size": 2}
    assert mine["param_groups"] == whole["param_groups"] and mine["pieces"]
    for piece in mine["pieces"]:
        full = whole["state"][piece["parameter"]]["exp_avg"].flatten()[piece["first"] : piece["last"]]
        assert_same(piece["state"]["exp_avg"].flatten(), full, "exp_avg")
    with pytest.raises(RuntimeError, match=r"spread over 2 ranks: call state_dict\(\)"):
        _ = sharded.state
    with pytest.raises(RuntimeError, match="cannot be replaced"):
        sharded.state = {}


Saved = dict[str, Any]


def with_short_moment(saved: Saved) -> Saved:
    saved["state"][0]["exp_avg"] = torch.zeros(7)
    return saved


def with_rate(saved: Saved, lr: float) -> Saved:
    saved["param_groups"][0]["lr"] = lr
    return saved


# A state as it was saved, and the same in shards: what is loaded on a rank instead, and what the error says.
MISFITS: list[tuple[Callable[[Saved, Saved, int], Saved], str]] = [
    (
        lambda whole, _, rank: with_short_moment(whole),
        r"exp_avg of parameter 0: expected the shape \(5, 4096\) .* \(7,\)",
    ),
    (lambda *_: {"state": {}, "param_groups": []}, r"expected groups of \[8\] parameters, got \[\]"),
    (lambda whole, _, rank: {**whole, "state": {99: {}}}, "got some of 99"),
    (lambda *_: {}, "expected state and param_groups"),
    (
        lambda whole, _, rank: with_short_moment(whole) if rank else whole,
        r"\(5, 4096\) on rank 0, but exp_avg of parameter 0: \(7,\) on rank 1",
    ),
    (
        lambda whole, _, rank: with_rate(whole, 0.1 * (1 + rank)),
        r"lr=0.1, .* on rank 0, but .*lr=0.2, .* on rank 1",
    ),
    (
        lambda _, mine, rank: {**mine, "sharded": {"rank": 0, "world_size": 3}} if rank else mine,
        r"rank 1 of 2, got those of rank 0 of 3.* with state_dict\(\)",
    ),
    (
        lambda whole, mine, rank: whole if rank else mine,
        r"sharded state on rank 0, but whole state on rank 1",
    ),
]


@world(2)
def test_states_that_do_not_fit_are_refused_on_all_ranks_and_change_nothing(mesh: Mesh) -> None:
    ours = parameters()
    sharded = ShardedOptimizer(ours, AdamW, mesh, **OPTIONS)
    steps(sharded, ours, 1)
    whole, mine = copied(sharded.state_dict()), copied(sharded.sharded_state_dict())
    for wrong, message in MISFITS:
        with pytest.raises(ValueError, match=message):
            sharded.load_state_dict(wrong(copied(whole), copied(mine), mesh.rank))
    assert_same(sharded.state_dict(), whole, "nothing was changed")


@world(2)
def test_a_state_in_float64_of_bfloat16_parameters_is_loaded_as_torch_does(mesh: Mesh) -> None:
    ours, expected = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    sharded, plain = ShardedOptimizer(ours, Adam, mesh), Adam(expected)
    steps(plain, expected, 1)
    saved = copied(plain.state_dict())
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].double()
    plain.load_state_dict(copied(saved))
    sharded.load_state_dict(saved)
    assert_same(sharded.state_dict(), plain.state_dict(), "state")


def test_one_rank_shows_its_state_and_calls_hooks_as_the_plain_optimizer_does() -> None:
    ours, (expected, plain) = parameters(), plainly(2, **OPTIONS)
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    sharded = ShardedOptimizer([*ours, frozen], AdamW, world_of_one(), **OPTIONS)
    assert not sharded.state
    with pytest.raises(ZeroDivisionError):
        sharded.step(lambda: 1 / 0)
    steps(sharded, ours, 2)
    assert len(sharded.state) == len(plain.state) and sharded.state.get(frozen, {}) == {}
    for x, y in zip(ours, expected, strict=True):
        assert_same(dict(sharded.state[x]), dict(plain.state[y]), "state")
    called: list[str] = []
    sharded.register_state_dict_pre_hook(lambda _: called.append("before saving"))
    sharded.register_state_dict_post_hook(lambda _, saved: {**saved, "more": 1})
    sharded.register_load_state_dict_pre_hook(
        lambda _, saved: {k: x for k, x in saved.items() if k != "more"}
    )
    sharded.register_load_state_dict_post_hook(lambda _: called.append("after loading"))
    saved = sharded.state_dict()
    assert saved["more"] == 1
    sharded.load_state_dict(saved)
    assert called == ["before saving", "after loading"]
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"keep its state_dict\(\)"):
            attempt(sharded)


@world(4)
def test_every_rank_keeps_its_part_of_the_moments_and_no_more(mesh: Mesh) -> None:
    given = parameters(((64, 4096), (4096, 16), (4096,), (16,), (8, 4096)))
    total = sum(p.numel() for p in given)
    optimizer = ShardedOptimizer(given, AdamW, mesh, fused=True)
    steps(optimizer, given, 2)
    states = [*optimizer._inner.state.values()]
    held = sum(x.untyped_storage().nbytes() for state in states for key, x in state.items() if key != "step")
    assert held <= 8 * (total / 4 + 4096)
    sums = mesh.world.group.all_gather_bytes(str(held).encode(), "the sum of a test")
    assert sum(map(int, sums)) == 8 * total


# Ranks that differ, fail or stay away in a step.


@pytest.fixture
def noticed() -> threading.Event:
    return threading.Event()


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


@world(3)
def test_an_update_that_raises_on_one_rank_raises_on_all_until_a_state_is_loaded(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    steps(optimizer, ours, 1)
    saved, weights = copied(optimizer.state_dict()), values(ours)
    handle = optimizer._inner.register_step_pre_hook(lambda *_: 1 / 0) if mesh.rank == 1 else None
    told = "step 1 of the sharded optimizer: rank 1 raised, its own traceback has the cause; the ra"
    with pytest.raises(Desync if handle is None else ZeroDivisionError, match=f"division by zero|{told}"):
        steps(optimizer, ours, 1, first=1)
    for call in (optimizer.step, optimizer.state_dict, optimizer.sharded_state_dict, optimizer.pieces):
        with pytest.raises(RuntimeError, match="cannot go on, because in step 1 rank 1 raised"):
            list(call() or ())
    if handle is not None:
        handle.remove()
    with torch.no_grad():
        for p, x in zip(ours, weights, strict=True):
            p.copy_(x)
    optimizer.load_state_dict(saved)
    steps(optimizer, ours, 1, first=1)
    assert_same(values(ours), values(plainly(2)[0]), "weights")


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_other_learning_rates_and_other_gradients_are_an_error(backend: str) -> None:
    @world(2, backend=backend)
    def body(mesh: Mesh) -> None:
        ours = parameters()
        optimizer = ShardedOptimizer(ours, AdamW, mesh, lr=0.1)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + mesh.rank)
        with pytest.raises(Desync, match="rank 1 has other options in its parameter groups"):
            steps(optimizer, ours, 1)
        optimizer.close()
        optimizer = ShardedOptimizer(ours, AdamW, mesh, lr=0.1)
        set_gradients(ours, 0)
        if mesh.rank == 1:
            ours[1].grad = None
        with pytest.raises(Desync, match="rank 1 has gradients for other parameters than rank 0"):
            optimizer.step()
        optimizer.close()

    body()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_that_does_not_step_is_found_by_the_deadline(backend: str, noticed: threading.Event) -> None:
    @world(2, backend=backend, timeout_s=2)
    def body(mesh: Mesh) -> None:
        ours = parameters()
        optimizer = ShardedOptimizer(ours, AdamW, mesh)
        steps(optimizer, ours, 1)
        if mesh.rank == 0:
            with pytest.raises(PeerLost, match=r"the vote on step 1, and never came: rank 1") as failure:
                steps(optimizer, ours, 1, first=1)
            assert failure.value.ranks == (1,)
            with pytest.raises(RuntimeError, match=r"is closed, because rank 0 waited .* make another one"):
                optimizer.step()
            noticed.set()
        assert noticed.wait(30)
        optimizer.close()

    body()


@world(2, backend="shm")
def test_nobody_s_memory_is_written_before_all_have_come_or_after_any_has_gone(
    mesh: Mesh, noticed: threading.Event
) -> None:
    """Rank 1 comes late, then writes late: rank 0 waits, and rank 1 keeps its weights until it comes."""
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    before = values(ours)
    set_gradients(ours, 0)
    if mesh.rank == 1:
        assert not noticed.wait(0.3)  # rank 0 is in step()
        assert_same(values(ours), before, "weights")
        share = optimizer.shards.spaces[0].share

        def write_late(operation: str) -> bool:
            assert not noticed.wait(0.3)
            return share(operation)

        optimizer.shards.spaces[0].share = write_late
    optimizer.step()
    if mesh.rank == 0:
        noticed.set()
    assert equal_everywhere(mesh, ours)
    optimizer.close()


def lose_rank_one_in_its_update(path: str, backend: str) -> None:
    mesh = init(timeout_s=30)
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, dist.new_group(backend=backend))
    steps(optimizer, ours, 1)
    if mesh.rank == 1:
        optimizer._inner.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        steps(optimizer, ours, 1, first=1)
    except PeerLost as error:
        (Path(path) / "report").write_text(json.dumps([error.ranks, error.operation]))
    alone = ShardedOptimizer(ours, AdamW, world_of_one())  # the parameters can go on
    steps(alone, ours, 1)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_that_dies_in_its_update_is_named(tmp_path: Path, backend: str) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        launch(lose_rank_one_in_its_update, (str(tmp_path), backend), ranks=2)
    assert json.loads((tmp_path / "report").read_text()) == [[1], "the vote on step 1"]
