"""Ranks on a grid and slices of a flat tensor: every rank has one place, every slice the same length."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.mesh.axes import DATA_AXES, resolve, slice_length

GRID = resolve(8, pp=2, dp=2, tp=2)
# The drawing in the module: rows of tp, blocks of pp.
DRAWN = {
    (0, 0): (0, 1),
    (0, 1): (2, 3),
    (1, 0): (4, 5),
    (1, 1): (6, 7),
}

sizes = st.integers(1, 6)


def test_ranks_stand_as_drawn():
    for (pp, dp), ranks in DRAWN.items():
        for tp, rank in enumerate(ranks):
            assert GRID.coordinates(rank) == {"pp": pp, "dp": dp, "shard": 0, "ep": 0, "tp": tp}
            assert GRID.rank_at(pp=pp, dp=dp, shard=0, ep=0, tp=tp) == rank
            assert GRID.peers("tp", rank) == ranks


def test_shard_rows_are_neighbours_as_drawn():
    grid = resolve(6, shard=3)
    assert grid.partition("shard") == [(0, 1, 2), (3, 4, 5)]
    assert grid.partition("dp") == [(0, 3), (1, 4), (2, 5)]


@given(sizes, sizes, sizes, sizes)
@settings(deadline=None)
def test_the_ranks_that_share_a_batch_are_the_shard_rows_of_their_replicas(dp, shard, pp, tp):
    axes = resolve(dp * shard * pp * tp, dp=dp, shard=shard, pp=pp, tp=tp)
    for rank in range(axes.world_size):
        rows = [axes.peers("shard", peer) for peer in axes.peers("dp", rank)]
        assert axes.peers_along(DATA_AXES, rank) == sum(rows, ())


@given(sizes, sizes, sizes, st.sampled_from(["pp", "dp", "tp"]))
@settings(deadline=None)
def test_peers_differ_on_one_axis_only_and_stand_in_its_order(dp, pp, tp, axis):
    axes = resolve(dp * pp * tp, dp=dp, pp=pp, tp=tp)
    for rank in range(axes.world_size):
        peers = axes.peers(axis, rank)
        assert rank in peers
        for i, peer in enumerate(peers):
            assert axes.coordinates(peer) == {**axes.coordinates(rank), axis: i}
            assert axes.peers(axis, peer) == peers
    assert sorted(rank for group in axes.partition(axis) for rank in group) == list(range(axes.world_size))


@given(sizes, sizes, sizes, st.sampled_from(["pp", "dp", "tp"]))
@settings(deadline=None)
def test_one_axis_may_take_what_is_left(dp, pp, tp, left):
    given_sizes = {"dp": dp, "shard": 1, "pp": pp, "tp": tp, "ep": 1}
    axes = resolve(dp * pp * tp, **{**given_sizes, left: -1})
    assert {name: axes.size(name) for name in axes.names} == given_sizes
    assert axes.world_size == math.prod(axes.sizes)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"dp": 2, "pp": 2}, r"dp\(2\) \* pp\(2\) \* tp\(1\) = 4, but the world has 6 ranks: pass dp=-1"),
        (
            {"dp": 2, "shard": 2},
            r"dp\(2\) \* shard\(2\) \* pp\(1\) \* tp\(1\) = 4, but the world has 6 ranks",
        ),
        ({"dp": -1, "tp": 4}, r"the fixed axes need a multiple of 4 ranks, but the world has 6"),
        ({"dp": -1, "pp": -1}, "at most one axis can be -1, got pp and dp"),
        ({"dp": 0}, "dp=0: expected a positive number of ranks, or -1"),
        ({"tp": -2}, "tp=-2: expected a positive number of ranks, or -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_their_factors(wanted, message):
    with pytest.raises(ValueError, match=message):
        resolve(6, **wanted)


def test_an_unknown_axis_is_refused_with_the_known_ones():
    for use in (GRID.size, GRID.partition, lambda axis: GRID.peers(axis, 0)):
        with pytest.raises(
            ValueError, match="no axis 'cp' in this mesh: expected one of pp, dp, shard, ep, tp"
        ):
            use("cp")


counts = st.integers(0, 1 << 40)
multiples = st.integers(1, 4096)


@given(counts, st.integers(1, 4096), multiples)
@settings(deadline=None)
def test_slices_hold_everything_and_no_shorter_ones_would(num_elements, parts, multiple):
    length = slice_length(num_elements, parts, multiple)
    assert length % multiple == 0
    assert parts * length >= num_elements
    shorter = length - multiple
    assert shorter == 0 or parts * shorter < num_elements
