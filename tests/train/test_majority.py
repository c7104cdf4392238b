"""Of several ranks that should say the same, those that do not."""

from __future__ import annotations

import pytest

from instep.train.majority import Odd, listed, odd_one_out, ranks_listed


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
