"""What ranks hold alike is compared: the odd rank is named, and healthy ones never raise an alarm."""

from __future__ import annotations

import pytest
import torch

from instep.errors import ReplicasDiffer
from instep.mesh.mesh import Mesh
from instep.state.replicas import Odd, compare_replicas, listed, odd_one_out, ranks_listed
from instep.state.shards import MODEL, Shard
from tests.parity import numbers
from tests.world import world


def held(mesh: Mesh, changed: dict[int, str]) -> list[Shard]:
    """What a rank has: the same on all, but for one bit of the tensor that is ``changed`` on it."""
    entries = {name: numbers(90, 50, key=name) for name in ("w", "v", "exp_avg/w")}
    if name := changed.get(mesh.rank):
        entries[name].view(torch.int32)[7, 3] ^= 1
    ranks = mesh.world.group.ranks
    return [Shard.whole(MODEL + name, x, ranks, (i, "")) for i, (name, x) in enumerate(entries.items())]


@pytest.mark.parametrize(
    ("changed", "names"), [({}, ()), ({0: "w"}, ("w",)), ({2: "exp_avg/w"}, ("exp_avg/w",))]
)
@world(3)
def test_of_three_ranks_the_odd_one_is_named_with_what_it_holds(
    mesh: Mesh, changed: dict[int, str], names: tuple[str, ...]
) -> None:
    shards = held(mesh, changed)
    before = [x.tensor.clone() for x in shards]
    if not changed:
        compare_replicas(shards, 1, mesh.world.group)
        assert all(map(torch.equal, before, (x.tensor for x in shards)))
        return
    (odd,) = changed
    with pytest.raises(ReplicasDiffer) as caught:
        compare_replicas(shards, 1, mesh.world.group)
    assert str(caught.value) == (
        f"after 1 steps rank {odd} holds other values than the other ranks in '{names[0]}': a bit has "
        "flipped in memory, or an update was computed otherwise. Leave out the host of "
        f"rank {odd} and resume from a checkpoint of before"
    )
    assert (caught.value.ranks, caught.value.parameters) == ((odd,), names)
    assert getattr(caught.value, "told", False) is (mesh.rank != 0)


@pytest.mark.parametrize(
    ("changed", "steps", "words", "names"),
    [({1: "w"}, (1, 1), "One of ranks 0 and 1 is wrong and there is no majority", ("w",)),
     ({}, (0, 1), "ranks 0 and 1", ("the step",))],
)  # fmt: skip
@world(2)
def test_of_two_ranks_one_is_wrong_and_nobody_can_tell_which(
    mesh: Mesh, changed: dict[int, str], steps: tuple[int, int], words: str, names: tuple[str, ...]
) -> None:
    with pytest.raises(ReplicasDiffer, match=words) as caught:
        compare_replicas(held(mesh, changed), steps[mesh.rank], mesh.world.group)
    assert (caught.value.ranks, caught.value.parameters) == ((0, 1), names)


def said(*values: str) -> dict[str, str]:
    """What a rank says of a, b, c ..."""
    return dict(zip("abcd", values, strict=False))


VOTES: dict[str, tuple[list[dict[int, dict[str, str]]], Odd | None]] = {
    "none": ([{}], None),
    "agreed": ([{rank: said("x", "y") for rank in range(5)}], None),
    "one of three": ([{4: said("x", "y"), 5: said("x", "z"), 6: said("x", "y")}], Odd(("b",), (5,), True)),
    "one of two": ([{0: said("x", "y"), 1: said("x", "z")}], Odd(("b",), (0, 1), False)),
    "all of three": ([{0: said("x"), 1: said("y"), 2: said("z")}], Odd(("a",), (0, 1, 2), False)),
    "half of four": (
        [{0: said("x"), 1: said("x"), 2: said("y"), 3: said("y")}],
        Odd(("a",), (0, 1, 2, 3), False),
    ),
    "two of five": (
        [{0: said("x"), 1: said("y"), 2: said("z"), 3: said("x"), 4: said("x")}],
        Odd(("a",), (1, 2), True),
    ),
    "the first": (
        [{0: said("p", "q"), 1: said("x", "y"), 2: said("x", "y")}],
        Odd(("a", "b"), (0,), True),
    ),
    "of several shards": (
        [{0: said("x"), 1: said("x"), 2: said("y")}, {0: said("z"), 3: said("w")}],
        Odd(("a",), (0, 2, 3), False),
    ),
    "of other names": (
        [{0: said("x", "y"), 1: said("-", "y"), 2: said("x", "-")}],
        Odd(("a", "b"), (1, 2), True),
    ),
    "nothing": ([{0: said("x", "y"), 1: said("x"), 2: said("x", "y")}], Odd(("b",), (1,), True)),
    "something": ([{0: said("x"), 1: said("x", "y"), 2: said("x")}], Odd(("b",), (1,), True)),
}


@pytest.mark.parametrize("name", VOTES)
def test_the_odd_ranks_are_those_outside_of_the_majority(name: str) -> None:
    votes, expected = VOTES[name]
    assert odd_one_out(*votes) == expected


def test_names_and_ranks_are_listed_as_one_would_say_them():
    assert ranks_listed((1,)) == "rank 1"
    assert ranks_listed((1, 2)) == "ranks 1 and 2"
    assert ranks_listed((0, 1, 2)) == "ranks 0, 1 and 2"
    assert listed(("a",)) == "'a'"
    assert listed(("a", "b", "c", "d", "e")) == "'a', 'b', 'c' and 2 more"
