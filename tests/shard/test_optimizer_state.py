"""State dicts: whole, as the plain optimizer's, for any number of ranks; and sharded, for the same."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.optim import Adafactor, Adam, AdamW

from instep.mesh.mesh import Mesh
from instep.shard.optimizer import ShardedOptimizer
from tests.shard.given import parameters, steps
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


@world(2)
def test_what_was_saved_can_be_written_to_a_file(mesh: Mesh) -> None:
    """A tensor of a state dict has no more behind it than it shows."""
    ours = parameters()
    sharded = ShardedOptimizer(ours, AdamW, mesh, **OPTIONS)
    steps(sharded, ours, 1)
    whole = sharded.state_dict()
    file = io.BytesIO()
    torch.save(whole, file)
    moments = sum(x.nbytes for state in whole["state"].values() for x in state.values())
    assert file.tell() < 1.05 * moments + 20_000
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
