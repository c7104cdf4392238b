"""The canary: the same hash at every time and on every rank, and nothing of the process notices."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from instep.checkpoint.canary import agree_on_canary, canary
from instep.errors import ContractBroken
from instep.mesh.mesh import Mesh
from tests.parity import world_of_one
from tests.world import world

CPU = torch.device("cpu")


def test_it_is_the_same_whatever_the_process_does_and_draws_no_random_number() -> None:
    torch.rand(3)
    state = torch.get_rng_state()
    expected = canary(CPU)
    with torch.no_grad():
        assert canary(CPU) == expected
    with torch.inference_mode():
        assert canary(CPU) == expected
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("function", ["gelu", "layer_norm", "scaled_dot_product_attention", "cross_entropy"])
def test_a_small_flaw_in_one_kernel_is_seen(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, right = canary(CPU), getattr(F, function)
    monkeypatch.setattr(F, function, lambda *args, **options: right(*args, **options) * (1 + 2**-20))
    assert canary(CPU) != expected


@world(3)
def test_the_rank_that_computed_otherwise_is_named_on_all(mesh: Mesh) -> None:
    with pytest.raises(
        ContractBroken, match=r"^rank 1 would compute other bits than the majority, whose can"
    ):
        agree_on_canary(mesh.world.group, "b" * 64 if mesh.rank == 1 else "a" * 64)


@world(2)
def test_of_two_ranks_both_are_named(mesh: Mesh) -> None:
    with pytest.raises(
        ContractBroken, match=r"^ranks 0, 1 compute other bits.*rank 0 0{16}, rank 1 1{16}\. "
    ):
        agree_on_canary(mesh.world.group, str(mesh.rank) * 64)


@world(3)
def test_what_the_run_has_recorded_outweighs_a_majority(mesh: Mesh) -> None:
    mine = "a" * 64 if mesh.rank == 0 else "b" * 64
    with pytest.raises(
        ContractBroken, match=r"^ranks 1, 2 would compute other bits than this run, whose canary"
    ):
        agree_on_canary(mesh.world.group, mine, recorded="a" * 64)


def test_a_run_of_one_rank_is_held_to_its_record() -> None:
    group = world_of_one().world.group
    agree_on_canary(group, "a" * 64)
    agree_on_canary(group, "a" * 64, recorded="a" * 64)
    with pytest.raises(ContractBroken, match=r"^rank 0 would compute other bits than this run"):
        agree_on_canary(group, "b" * 64, recorded="a" * 64)
