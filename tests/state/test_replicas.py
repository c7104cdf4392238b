"""What ranks hold alike is compared: the odd rank is named, and healthy ones never raise an alarm."""

from __future__ import annotations

import pytest

from instep.elastic.faults import flip_bit
from instep.errors import ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.wrapper import DataParallel
from instep.rng.keys import initialize
from instep.state.replicas import Odd, compare_replicas, listed, odd_one_out, ranks_listed
from tests.parity import world_of_one
from tests.replicate.nets import fused, gpt, text
from tests.state_oracle import state_entries, state_sha256
from tests.training_state import training_state
from tests.world import world

DOWN = "blocks.0.feed_forward.down.weight"


class Trained:
    """One rank's part in the training of a small GPT."""

    def __init__(self, mesh: Mesh) -> None:
        self.module, self.group, self.done = gpt(), mesh.world.group, 0
        initialize(self.module, 7)
        self.model = DataParallel(self.module, process_group=mesh)
        self.optimizer = fused(self.module.parameters())

    def step(self) -> None:
        for micro_batch in self.model.micro_batches(4):
            text(self.module, micro_batch, self.done)
        clip_grad_norm_(self.module.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1

    def state_sha256(self) -> str:
        return state_sha256(state_entries(self.module, self.optimizer), self.done)


def compare(trained: Trained) -> None:
    shards = training_state(trained.model, trained.optimizer).hashed()
    compare_replicas(shards, trained.done, trained.group)


@world(3)
def test_healthy_ranks_never_alarm_and_stay_as_they_are(mesh: Mesh) -> None:
    compared, quiet = Trained(mesh), Trained(mesh)
    for _ in range(3):
        compare(compared)
        assert compared.state_sha256() == quiet.state_sha256()
        compared.step()
        quiet.step()
    assert compared.state_sha256() == quiet.state_sha256()


def test_one_rank_has_nobody_to_compare_with():
    compare(Trained(world_of_one()))


@pytest.mark.parametrize("odd", [0, 2])
@world(3)
def test_a_bit_that_flips_in_a_parameter_is_named_with_its_rank(mesh: Mesh, odd: int) -> None:
    trained = Trained(mesh)
    trained.step()
    if mesh.rank == odd:
        flip_bit(trained.module.get_parameter(DOWN), index=77, bit=0)
    with pytest.raises(ReplicasDiffer) as caught:
        compare(trained)
    assert str(caught.value) == (
        f"after 1 steps rank {odd} holds other values than the other ranks in '{DOWN}': a bit has flipped in "
        f"memory, or an update was computed otherwise. Leave out the host of rank {odd} and resume from a "
        "checkpoint of before"
    )
    assert (caught.value.ranks, caught.value.parameters) == ((odd,), (DOWN,))
    assert getattr(caught.value, "told", False) is (mesh.rank != 0)


@world(3)
def test_a_bit_that_flips_in_a_moment_is_named_and_so_is_what_it_spoils(mesh: Mesh) -> None:
    trained = Trained(mesh)
    trained.step()
    if mesh.rank == 1:
        flip_bit(trained.optimizer.state[trained.module.get_parameter(DOWN)]["exp_avg"], index=3, bit=22)
    with pytest.raises(ReplicasDiffer) as caught:
        compare(trained)
    assert (caught.value.ranks, caught.value.parameters) == ((1,), (f"exp_avg/{DOWN}",))
    trained.step()
    trained.step()
    with pytest.raises(ReplicasDiffer, match=r"after 3 steps rank 1 holds other values") as caught:
        compare(trained)
    assert caught.value.parameters == (DOWN, f"exp_avg/{DOWN}")


@world(2)
def test_of_two_ranks_one_is_wrong_and_nobody_can_tell_which(mesh: Mesh) -> None:
    trained = Trained(mesh)
    if mesh.rank == 1:
        flip_bit(trained.module.get_parameter(DOWN))
    with pytest.raises(ReplicasDiffer, match=r"One of ranks 0 and 1 is wrong and there is no maj") as caught:
        compare(trained)
    assert (caught.value.ranks, caught.value.parameters) == ((0, 1), (DOWN,))


@world(2)
def test_ranks_that_are_not_at_the_same_step_differ_in_that(mesh: Mesh) -> None:
    trained = Trained(mesh)
    trained.done = mesh.rank
    with pytest.raises(ReplicasDiffer) as caught:
        compare(trained)
    assert caught.value.parameters == ("the step",)


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


def test_votes_on_several_shards_are_one_verdict():
    first, second = {0: said("x"), 1: said("x"), 2: said("y")}, {0: said("z"), 3: said("w")}
    assert odd_one_out(first, second) == Odd(("a",), (0, 2, 3), False)


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
