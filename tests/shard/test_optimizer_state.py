"""State dicts of sharded optimizers, whole and in shards; and ranks that differ, fail or stay away."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Adafactor, Adam, AdamW

from instep.errors import Desync, PeerLost
from instep.launch.launch import RankFailed, launch
from instep.mesh.join import init
from instep.mesh.mesh import Mesh
from instep.shard.optimizer import ShardedOptimizer
from tests.parity import world_of_one
from tests.replicate.replicas import equal_everywhere
from tests.shard.given import parameters, set_gradients, steps
from tests.shard.trained import assert_same, copied
from tests.world import world

OPTIONS: dict[str, Any] = {"lr": 0.1, "fused": True, "amsgrad": True}


def values(given: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [p.detach().clone() for p in given]


def reference(num_steps: int) -> tuple[list[torch.nn.Parameter], AdamW]:
    given = parameters()
    optimizer = AdamW(given, **OPTIONS)
    steps(optimizer, given, num_steps)
    return given, optimizer


@world(2)
def test_the_pieces_of_all_ranks_are_the_whole_state(mesh: Mesh) -> None:
    ours = parameters()
    sharded = ShardedOptimizer(ours, AdamW, mesh, **OPTIONS)
    steps(sharded, ours, 2)
    whole, mine = sharded.state_dict(), sharded.sharded_state_dict()
    assert mine["sharded"] == {"rank": mesh.rank, "world_size": 2}
    assert mine["param_groups"] == whole["param_groups"]
    assert mine["pieces"]
    for piece in mine["pieces"]:
        full = whole["state"][piece["parameter"]]["exp_avg"].flatten()[piece["first"] : piece["last"]]
        assert_same(piece["state"]["exp_avg"].flatten(), full, "exp_avg")
    sharded.close()


@world(2)
def test_a_sharded_state_of_another_rank_is_refused_on_all(mesh: Mesh) -> None:
    ours = parameters()
    sharded = ShardedOptimizer(ours, AdamW, mesh, **OPTIONS)
    steps(sharded, ours, 1)
    saved = sharded.sharded_state_dict()
    before = copied(saved)
    wrong = {**saved, "sharded": {"rank": 0, "world_size": 3}} if mesh.rank == 1 else saved
    with pytest.raises(ValueError, match=r"rank 1 of 2, got those of rank 0 of 3.* with state_dict\(\)"):
        sharded.load_state_dict(wrong)
    with pytest.raises(ValueError, match=r"sharded state on rank 0, but whole state on rank 1"):
        sharded.load_state_dict({"state": {}, "param_groups": saved["param_groups"]} if mesh.rank else saved)
    assert_same(sharded.sharded_state_dict(), before, "nothing was changed")
    steps(sharded, ours, 1)
    sharded.close()


def with_moment(saved: dict[str, Any], x: torch.Tensor) -> dict[str, Any]:
    saved = copied(saved)
    saved["state"][0]["exp_avg"] = x
    return saved


@world(2)
def test_states_that_do_not_fit_are_refused_on_all_ranks_and_change_nothing(mesh: Mesh) -> None:
    ours = parameters()
    sharded = ShardedOptimizer(ours, AdamW, mesh, **OPTIONS)
    steps(sharded, ours, 1)
    saved = copied(sharded.state_dict())
    short = with_moment(saved, torch.zeros(7))
    for wrong, message in (
        (short, r"exp_avg of parameter 0: expected the shape \(5, 4096\) .* got \(7,\)"),
        ({"state": {}, "param_groups": []}, r"expected groups of \[8\] parameters, got \[\]"),
        ({"state": {99: {}}, "param_groups": saved["param_groups"]}, "got some of 99"),
        ({}, "expected state and param_groups"),
    ):
        with pytest.raises(ValueError, match=message):
            sharded.load_state_dict(wrong)
    with pytest.raises(
        ValueError, match=r"\(5, 4096\) on rank 0, but exp_avg of parameter 0: \(7,\) on rank 1"
    ):
        sharded.load_state_dict(short if mesh.rank == 1 else saved)
    other = copied(saved)
    other["param_groups"][0]["lr"] = 0.1 * (1 + mesh.rank)
    with pytest.raises(ValueError, match=r"lr=0.1, .* on rank 0, but .*lr=0.2, .* on rank 1"):
        sharded.load_state_dict(other)
    assert_same(sharded.state_dict(), saved, "nothing was changed")
    sharded.close()


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
    sharded.close()


@world(2)
def test_whole_parameters_keep_states_of_any_shape(mesh: Mesh) -> None:
    shapes = ((131, 77), (4099,), (5, 4096))
    ours, expected = parameters(shapes), parameters(shapes)
    sharded, plain = ShardedOptimizer(ours, Adafactor, mesh), Adafactor(expected)
    steps(plain, expected, 2)
    steps(sharded, ours, 2)
    sharded.load_state_dict(copied(sharded.state_dict()))
    steps(plain, expected, 1, first=2)
    steps(sharded, ours, 1, first=2)
    assert_same(values(ours), values(expected), "weights")
    assert_same(sharded.state_dict(), plain.state_dict(), "state")
    sharded.close()


@world(2)
def test_the_state_of_a_parameter_is_not_shown_where_it_is_not_whole(mesh: Mesh) -> None:
    ours = parameters()
    sharded = ShardedOptimizer(ours, AdamW, mesh)
    steps(sharded, ours, 1)
    with pytest.raises(RuntimeError, match=r"spread over 2 ranks: call state_dict\(\)"):
        _ = sharded.state
    with pytest.raises(RuntimeError, match="cannot be replaced"):
        sharded.state = {}
    sharded.close()


WHOLE, SHARDED, PLAIN = "whole", "sharded", "plain"


@pytest.mark.parametrize("route", [(WHOLE, PLAIN), (PLAIN, SHARDED), (SHARDED, SHARDED)], ids=str)
@world(3)
def test_a_state_goes_on_where_it_is_loaded(mesh: Mesh, route: tuple[str, str]) -> None:
    """From the sharded optimizer to the plain one, the other way, and as it was."""
    ours, (expected, plain) = parameters(), reference(5)
    saves, loads = route
    first: Any = AdamW(ours, **OPTIONS) if saves == PLAIN else ShardedOptimizer(ours, AdamW, mesh, **OPTIONS)
    steps(first, ours, 3)
    saved = first.sharded_state_dict() if saves == SHARDED else first.state_dict()
    kept = copied(saved)
    if saves == SHARDED:
        first.close()
        saved = copied(saved)
    again: Any = AdamW(ours, lr=7.0) if loads == PLAIN else ShardedOptimizer(ours, AdamW, mesh, lr=7.0)
    again.load_state_dict(saved)
    steps(again, ours, 2, first=3)
    assert_same(values(ours), values(expected), "weights")
    assert_same(again.state_dict(), plain.state_dict(), "state")
    if loads == SHARDED:
        assert_same(saved, kept, "what was loaded is not written to")


@world(1)
def test_one_rank_shows_its_state_and_calls_hooks_as_the_plain_optimizer_does(mesh: Mesh) -> None:
    ours, (expected, plain) = parameters(), reference(2)
    frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    sharded = ShardedOptimizer([*ours, frozen], AdamW, mesh, **OPTIONS)
    assert not sharded.state
    steps(sharded, ours, 2)
    assert len(sharded.state) == len(plain.state)
    for x, y in zip(ours, expected, strict=True):
        assert_same(dict(sharded.state[x]), dict(plain.state[y]), "state")
    assert sharded.state.get(frozen, {}) == {}
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
    sharded.close()


@pytest.fixture
def noticed() -> threading.Event:
    return threading.Event()


def of_rank_one(mesh: Mesh, name: str) -> tuple[Any, type, dict[str, Any]]:
    """Parameters, class and options; on rank 1 one thing is different."""
    given, kind, options = parameters(), AdamW, {"lr": 0.1}
    if mesh.rank == 1:
        match name:
            case "order":
                given[0], given[1] = given[1], given[0]
            case "dtype":
                given[2] = torch.nn.Parameter(given[2].double())
            case "frozen":
                given[3].requires_grad_(False)
            case "number":
                given.pop()
            case "class":
                kind = Adam
            case "option":
                options = {"lr": 0.2}
            case "groups":
                return [{"params": given[:3]}, {"params": given[3:]}], kind, options
            case "names":
                return [(str(i), p) for i, p in enumerate(given)], kind, options
            case "nothing at all":
                return [], kind, options
    return given, kind, options


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("order", r"parameter 0 of group 0: shape \(5, 4096\), .* rank 0, but .* shape \(4099,\)"),
        ("dtype", r"parameter 2 of group 0: .* float32, .* on rank 0, but .* float64, .* on rank 1"),
        ("frozen", r"parameter 3 of group 0: .* trainable on rank 0, but .* frozen on rank 1"),
        ("number", r"parameter 7 of group 0: .* on rank 0, but nothing on rank 1"),
        ("class", r"class torch.optim.adamw.AdamW on rank 0, but class torch.optim.adam.Adam on rank 1"),
        ("option", r"options lr=0.1 on rank 0, but options lr=0.2 on rank 1"),
        ("groups", r"parameter 3 of group 0: .* on rank 0, but parameter group 1: lr=0.1 on rank 1"),
        ("names", r"parameter 0 of group 0: .* on rank 0, but parameter 0 of group 0 '0'"),
        ("nothing at all", r"optimizer got an empty parameter list"),
    ],
)
@world(2)
def test_ranks_that_differ_at_construction_are_told_where(mesh: Mesh, name: str, message: str) -> None:
    given, kind, options = of_rank_one(mesh, name)
    with pytest.raises(ValueError, match=message):
        ShardedOptimizer(given, kind, mesh, **options)
    good = parameters()
    optimizer = ShardedOptimizer(good, SGD, mesh, lr=0.1)  # and can go on
    steps(optimizer, good, 1)
    optimizer.close()


@world(3)
def test_an_update_that_raises_on_one_rank_raises_on_all(mesh: Mesh) -> None:
    ours = parameters()
    optimizer = ShardedOptimizer(ours, AdamW, mesh)
    steps(optimizer, ours, 1)
    saved, weights = copied(optimizer.state_dict()), [p.detach().clone() for p in ours]
    if mesh.rank == 1:
        handle = optimizer._inner.register_step_pre_hook(lambda *_: 1 / 0)
    kind, message = (
        (ZeroDivisionError, "division by zero")
        if mesh.rank == 1
        else (
            Desync,
            "step 1 of the sharded optimizer: rank 1 raised, its own traceback has the cause; the ra",
        )
    )
    with pytest.raises(kind, match=message):
        steps(optimizer, ours, 1, first=1)
    for call in (optimizer.step, optimizer.state_dict, optimizer.sharded_state_dict):
        with pytest.raises(RuntimeError, match="cannot go on, because in step 1 rank 1 raised"):
            call()
    if mesh.rank == 1:
        handle.remove()
    with torch.no_grad():
        for p, x in zip(ours, weights, strict=True):
            p.copy_(x)
    optimizer.load_state_dict(saved)
    steps(optimizer, ours, 1, first=1)
    expected = parameters()
    plain = AdamW(expected)
    steps(plain, expected, 2)
    assert_same([p.detach() for p in ours], [p.detach() for p in expected], "weights")
    optimizer.close()


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
    before = [p.detach().clone() for p in ours]
    set_gradients(ours, 0)
    if mesh.rank == 1:
        assert not noticed.wait(0.3)  # rank 0 is in step()
        assert_same([p.detach() for p in ours], before, "weights")
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
    report = json.loads((tmp_path / "report").read_text())
    assert report == [[1], "the vote on step 1"]


@world(4)
def test_every_rank_keeps_its_part_of_the_moments_and_no_more(mesh: Mesh) -> None:
    given = parameters(((64, 4096), (4096, 16), (4096,), (16,), (8, 4096)))
    total = sum(p.numel() for p in given)
    optimizer = ShardedOptimizer(given, AdamW, mesh, fused=True)
    steps(optimizer, given, 2)
    held = sum(
        x.untyped_storage().nbytes()
        for state in optimizer._inner.state.values()
        for key, x in state.items()
        if key != "step"
    )
    assert held <= 8 * (total / 4 + 4096)
    piece_bytes = sum(
        x.nbytes
        for piece in optimizer.sharded_state_dict()["pieces"]
        for key, x in piece["state"].items()
        if key != "step"
    )
    assert piece_bytes == held
    sums = mesh.world.group.all_gather_bytes(str(held).encode(), "the sum of a test")
    assert sum(map(int, sums)) == 8 * total
    optimizer.close()
