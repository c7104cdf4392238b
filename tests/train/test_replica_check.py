"""Silent corruption is found and the odd rank named; healthy ranks never raise an alarm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from instep.checkpoint.state import TrainingState
from instep.elastic.faults import flip_bit
from instep.errors import ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.ordered.hash import state_entries, state_sha256
from instep.ordered.replicas import Odd, compare_replicas, listed, odd_one_out, ranks_listed
from instep.replicate.server import ParameterServer
from instep.step.micro_batches import MicroBatch
from instep.train.recompute import compare_leaves
from tests.parity import world_of_one
from tests.replicate.nets import fused, gpt, text
from tests.train.tiny import Tiny
from tests.world import world

DOWN = "blocks.0.feed_forward.down.weight"


def compare(tiny: Tiny) -> str:
    shards = TrainingState(tiny.model, tiny.optimizer).hashed()
    return compare_replicas(shards, tiny.done, tiny.group)


def computing(tiny: Tiny) -> None:
    compare_leaves(tiny.group, tiny.compute, tiny.plan, tiny.done)


@pytest.mark.parametrize("num_leaves", [2, 4])  # one rank of three has none of two
@world(3)
def test_healthy_ranks_never_alarm(mesh: Mesh, num_leaves: int) -> None:
    tiny = Tiny(mesh, num_leaves=num_leaves)
    for _ in range(3):
        assert compare(tiny) == tiny.state_sha256()
        computing(tiny)
        tiny.step()


def test_one_rank_has_nobody_to_compare_with():
    tiny = Tiny(world_of_one())
    computing(tiny)
    assert compare(tiny) == tiny.state_sha256()


@pytest.mark.parametrize("odd", [0, 1, 2])
@world(3)
def test_a_bit_that_flips_in_a_parameter_is_named_with_its_rank(mesh: Mesh, odd: int) -> None:
    tiny = Tiny(mesh)
    tiny.step()
    if mesh.rank == odd:
        flip_bit(tiny.module.get_parameter(DOWN), index=77, bit=0)
    with pytest.raises(ReplicasDiffer) as caught:
        compare(tiny)
    assert str(caught.value) == (
        f"after step 1 rank {odd} holds other values than the other ranks in '{DOWN}': a bit has flipped in "
        f"memory, or an update was computed otherwise. Leave out the host of rank {odd} and resume from a "
        "checkpoint of before"
    )
    assert (caught.value.ranks, caught.value.parameters) == ((odd,), (DOWN,))
    assert getattr(caught.value, "told", False) is (mesh.rank != 0)


@world(3)
def test_a_bit_that_flips_in_a_moment_is_named_and_so_is_what_it_spoils(mesh: Mesh) -> None:
    tiny = Tiny(mesh)
    tiny.step()
    if mesh.rank == 1:
        flip_bit(tiny.optimizer.state[tiny.module.get_parameter(DOWN)]["exp_avg"], index=3, bit=22)
    with pytest.raises(ReplicasDiffer) as caught:
        compare(tiny)
    assert (caught.value.ranks, caught.value.parameters) == ((1,), (f"exp_avg/{DOWN}",))
    tiny.step()
    tiny.step()
    with pytest.raises(ReplicasDiffer, match=r"after step 3 rank 1 holds other values") as caught:
        compare(tiny)
    assert caught.value.parameters == (DOWN, f"exp_avg/{DOWN}")


@world(2)
def test_of_two_ranks_one_is_wrong_and_nobody_can_tell_which(mesh: Mesh) -> None:
    tiny = Tiny(mesh)
    if mesh.rank == 1:
        flip_bit(tiny.module.get_parameter(DOWN))
    with pytest.raises(ReplicasDiffer, match=r"One of ranks 0 and 1 is wrong and there is no maj") as caught:
        compare(tiny)
    assert (caught.value.ranks, caught.value.parameters) == ((0, 1), (DOWN,))


@world(2)
def test_ranks_that_are_not_at_the_same_step_differ_in_that(mesh: Mesh) -> None:
    tiny = Tiny(mesh)
    tiny.done = mesh.rank
    with pytest.raises(ReplicasDiffer) as caught:
        compare(tiny)
    assert caught.value.parameters == ("the step",)


@world(2)
def test_the_weights_of_a_server_s_workers_are_compared_without_its_moments(mesh: Mesh) -> None:
    module = gpt()
    server = ParameterServer(module, fused(module.parameters()), mesh)
    for leaf in server.micro_batches(4):
        text(module, leaf, 0)
    server.step()
    held = TrainingState(server, server.optimizer).hashed()
    assert compare_replicas(held, 1, mesh.world.group) == state_sha256(state_entries(module), 1)
    if mesh.rank == 1:
        flip_bit(module.get_parameter(DOWN))
    with pytest.raises(ReplicasDiffer):
        compare_replicas(held, 1, mesh.world.group)
    server.close()


class Wrong:
    """A loss that is a little more on some ranks, whoever's micro-batch it is."""

    def __init__(self, mesh: Mesh, ranks: set[int]) -> None:
        self.here = mesh.rank in ranks

    def __call__(self, tiny: Tiny, model: nn.Module, leaf: MicroBatch, loss: Tensor) -> Tensor:
        return loss * (1.0 + 2**-20) if self.here else loss


@pytest.mark.parametrize("odd", [0, 1, 2])
@world(3)
def test_a_rank_that_computes_otherwise_is_named_by_a_third(mesh: Mesh, odd: int) -> None:
    tiny = Tiny(mesh, fault=Wrong(mesh, {odd}))
    assert tiny.step() is None
    assert compare(tiny) == tiny.state_sha256()  # as wrong as it is, all have the same
    with pytest.raises(ReplicasDiffer) as caught:
        computing(tiny)
    first, *lines, last = str(caught.value).splitlines()
    assert first == "in step 1 ranks computed different gradients of one micro-batch:"
    doubted = {tiny.plan[odd][0], tiny.plan[(odd + 1) % 3][0]}
    starts = {f"  micro-batch {leaf}, by ranks 0, 1 and 2: rank {odd} computed otherwise" for leaf in doubted}
    assert {line.rpartition(": ")[0] for line in lines} == starts
    assert last == f"Leave out the host of rank {odd} and resume from a checkpoint of before"
    assert caught.value.ranks == (odd,)
    assert caught.value.parameters[0] == "embedding.tokens.weight"


@world(2)
def test_two_ranks_that_compute_differently_are_both_named(mesh: Mesh) -> None:
    tiny = Tiny(mesh, fault=Wrong(mesh, {1}))
    with pytest.raises(ReplicasDiffer, match=r"by ranks 0 and 1, all that were asked: 'embedding") as caught:
        computing(tiny)
    assert caught.value.ranks == (0, 1)


@world(3)
def test_computing_shows_other_weights_too(mesh: Mesh) -> None:
    tiny = Tiny(mesh)
    if mesh.rank == 2:
        flip_bit(tiny.module.get_parameter(DOWN), bit=22)
    with pytest.raises(ReplicasDiffer) as caught:
        computing(tiny)
    assert caught.value.ranks == (2,)


@world(2)
def test_the_run_goes_on_unchanged_after_a_comparison(mesh: Mesh) -> None:
    compared, quiet = Tiny(mesh), Tiny(mesh)
    for _ in range(3):
        computing(compared)
        compare(compared)
        compared.step()
        quiet.step()
    assert compared.state_sha256() == quiet.state_sha256()
    assert torch.equal(*(next(t.module.parameters()) for t in (compared, quiet)))


def said(*values: str) -> dict[str, str]:
    """What a rank says of a, b, c ..."""
    return dict(zip("abcd", values, strict=False))


@pytest.mark.parametrize("num_ranks", [0, 1, 2, 5])
def test_ranks_that_agree_have_no_odd_one(num_ranks):
    assert odd_one_out({rank: said("x", "y") for rank in range(num_ranks)}) is None


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ({4: said("x", "y"), 5: said("x", "z"), 6: said("x", "y")}, Odd(("b",), (5,), True)),
        ({0: said("x", "y"), 1: said("x", "z")}, Odd(("b",), (0, 1), False)),
        ({0: said("x"), 1: said("y"), 2: said("z")}, Odd(("a",), (0, 1, 2), False)),
        ({0: said("x"), 1: said("x"), 2: said("y"), 3: said("y")}, Odd(("a",), (0, 1, 2, 3), False)),
        ({0: said("x"), 1: said("y"), 2: said("z"), 3: said("x"), 4: said("x")}, Odd(("a",), (1, 2), True)),
        ({0: said("p", "q"), 1: said("x", "y"), 2: said("x", "y")}, Odd(("a", "b"), (0,), True)),
    ],
    ids=["one of three", "one of two", "all of three", "half of four", "two of five", "the first"],
)
def test_the_odd_ranks_are_those_outside_of_the_majority(votes, expected):
    assert odd_one_out(votes) == expected


def test_two_ranks_that_are_wrong_about_different_names_are_both_found():
    votes = {0: said("x", "y"), 1: said("-", "y"), 2: said("x", "-")}
    assert odd_one_out(votes) == Odd(("a", "b"), (1, 2), True)


def test_to_have_nothing_is_to_differ():
    assert odd_one_out({0: said("x", "y"), 1: said("x"), 2: said("x", "y")}) == Odd(("b",), (1,), True)
    assert odd_one_out({0: said("x"), 1: said("x", "y"), 2: said("x")}) == Odd(("b",), (1,), True)


def test_names_and_ranks_are_listed_as_one_would_say_them():
    assert ranks_listed((1,)) == "rank 1"
    assert ranks_listed((1, 2)) == "ranks 1 and 2"
    assert ranks_listed((0, 1, 2)) == "ranks 0, 1 and 2"
    assert listed(("a",)) == "'a'"
    assert listed(("a", "b", "c", "d", "e")) == "'a', 'b', 'c' and 2 more"
