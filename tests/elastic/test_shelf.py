"""What a supervisor holds of memory copies: the last complete set, and what may become the next."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.elastic.memory import Kept, Place
from instep.elastic.shelf import Shelf


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf()
    yield made
    made.clear()


def kept(generation: int, rank: int, num_ranks: int) -> Kept:
    """With a descriptor of its own."""
    return Kept(Place(os.getpid(), os.open(os.devnull, os.O_RDONLY), 1), generation, rank, num_ranks)


def is_open(kept: Kept) -> bool:
    return Path(f"/proc/self/fd/{kept.place.fd}").exists()


def test_a_set_stays_until_the_next_one_is_complete(shelf: Shelf) -> None:
    old = [kept(1, rank, 3) for rank in (2, 0, 1)]
    for each in old:
        shelf.add(each)
    first, second = kept(2, 0, 2), kept(2, 1, 2)
    shelf.add(first)
    assert shelf.kept == (old[1], old[2], old[0], first)
    shelf.add(second)
    assert shelf.kept == (first, second)
    assert not any(map(is_open, old))
    assert is_open(first)


def test_a_generation_that_ended_before_all_had_copied_leaves_the_set_before_it(shelf: Shelf) -> None:
    whole, half, other = kept(1, 0, 1), kept(2, 0, 2), kept(3, 1, 2)
    for each in (whole, half, other):
        shelf.add(each)
    assert shelf.kept == (whole, half, other)
    shelf.add(last := kept(3, 0, 2))
    assert shelf.kept == (last, other)
    assert not is_open(half)


def test_a_larger_copy_takes_the_place_of_its_rank_s(shelf: Shelf) -> None:
    a, b, larger = kept(1, 0, 2), kept(1, 1, 2), kept(1, 0, 2)
    for each in (a, b, larger):
        shelf.add(each)
    assert shelf.kept == (larger, b)
    assert not is_open(a)


def test_what_comes_too_late_is_let_go(shelf: Shelf) -> None:
    whole, late = kept(3, 0, 1), kept(2, 1, 2)
    shelf.add(whole)
    shelf.add(late)
    assert shelf.kept == (whole,)
    assert not is_open(late)


def test_all_go_together(shelf: Shelf) -> None:
    held = [kept(1, 0, 1), kept(2, 0, 2)]
    for each in held:
        shelf.add(each)
    shelf.clear()
    assert shelf.kept == ()
    assert not any(map(is_open, held))
