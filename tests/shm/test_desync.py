"""Ranks that come with different operations are told so, all of them, with both sides; nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch

from instep.errors import Desync, InstepError
from tests.shm import calls
from tests.shm.calls import group_of
from tests.world import world

Tensors = list[torch.Tensor]
Use = Callable[[Any, Tensors, bool], Any]  # of a group and twelve ones, thrice


REDUCE: Use = lambda pg, x, now: calls.all_reduce(pg, x[0], now=now)  # noqa: E731
# What ranks 0 and 1 do, what rank 2 does, and how each is told.
SUM = "all_reduce (sum) of 12 float32"
PAIRS: dict[str, tuple[Use, Use, str, str]] = {
    "length": (
        REDUCE,
        lambda pg, x, now: calls.all_reduce(pg, x[0][:0], now=now),
        SUM,
        "all_reduce (sum) of 0 float32",
    ),
    "operation": (REDUCE, lambda pg, x, now: calls.barrier(pg, now=now), SUM, "barrier"),
    "root": (
        lambda pg, x, now: calls.gather(pg, x if pg.getRank() == 0 else [], x[0], 0, now=now),
        lambda pg, x, now: calls.gather(pg, x, x[0], 2, now=now),
        "gather of 12 float32 with root 0",
        "gather of 12 float32 with root 2",
    ),
    "length of a part": (
        lambda pg, x, now: calls.reduce_scatter(pg, x[0], x, now=now),
        lambda pg, x, now: calls.reduce_scatter(pg, x[0][:4], [y[:4] for y in x], now=now),
        "reduce_scatter (sum) of 12 float32",
        "reduce_scatter (sum) of 4 float32",
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("now", [True, False], ids=["at once", "async"])
@world(3, backend="shm")
def test_two_sides_are_told_on_every_rank_and_nothing_is_written(mesh, pair, now):
    pg = group_of(mesh)
    pg.set_timeout(timedelta(seconds=3))
    ours, theirs, our_words, their_words = PAIRS[pair]
    xs = [torch.full((12,), 5.0 + mesh.rank) for _ in range(3)]
    with pytest.raises(Desync) as told:
        (theirs if mesh.rank == 2 else ours)(pg, xs, now).wait()
    text = str(told.value)
    where = r", at shm/(calls|test_desync)\.py:\d+ \S+"
    both = f"ranks 0, 1 call {re.escape(our_words)}{where}; rank 2 calls {re.escape(their_words)}{where}"
    assert re.search(rf"different operations: {both}\. ", text), text
    if mesh.rank:
        assert text.endswith(". Rank 0 shows where each rank stands") and told.value.told
    else:
        _, *table, last = text.splitlines()
        assert [line.split()[0] for line in table] == ["rank", "2", "0", "1"]
        assert all(re.search(r" shm/(calls|test_desync)\.py:\d+ ", line) for line in table[1:])
        assert re.search(rf"{both}\. All ranks of a group must call the same", last)
    assert all(set(x.tolist()) == {5.0 + mesh.rank} for x in xs)
    # The group has come to its end: the next operation would meet something else.
    with pytest.raises(InstepError, match="different operations"):
        calls.barrier(pg).wait()


@world(3, backend="shm")
def test_ranks_that_call_something_else_than_publish_say_so(mesh):
    """Those that publish compare headers of their own: here they have none, and are stopped by the others."""
    pg = group_of(mesh)
    if mesh.rank == 2:
        pg.publish(lambda half: None, 5)
        with suppress(InstepError):
            pg.monitored_barrier()  # which may be paired with the exchange of what the others do
        with pytest.raises(InstepError):
            pg.monitored_barrier()
    else:
        with pytest.raises(Desync, match="ranks 0, 1 call barrier; rank 2 calls publish of 5 int64"):
            pg.monitored_barrier()


@pytest.mark.parametrize("private", [0, 1, None])
@world(2, backend="shm")
def test_shared_memory_is_not_written_to_either(mesh, private):
    pg = group_of(mesh)
    xs = [pg.allocate(4 * length).elements(torch.float32).fill_(7.0) for length in (12, 13)]
    x = xs[mesh.rank].clone() if mesh.rank == private else xs[mesh.rank]
    with pytest.raises(Desync, match=r"rank 0 calls .* of 12 float32, .*; rank 1 calls .* of 13 float32"):
        calls.all_reduce(pg, x).wait()
    assert all(set(tensor.tolist()) == {7.0} for tensor in (*xs, x))


@world(3, backend="shm")
def test_splits_that_do_not_fit_are_told_with_both_lengths(mesh):
    pg = group_of(mesh)
    x, out = torch.ones(6), torch.zeros(7 if mesh.rank == 2 else 6)
    expected = [2, 3, 2] if mesh.rank == 2 else [2, 2, 2]
    with pytest.raises(Desync, match="rank 1 sends 8 bytes to rank 2, which expects 12") as told:
        calls.all_to_all_single(pg, out, x, expected, [2, 2, 2]).wait()
    assert "Nothing was written" in str(told.value)
    assert not out.any()


@world(4, backend="shm", tp=2)
def test_ranks_of_a_subgroup_are_told_by_their_global_numbers(mesh):
    pg = mesh.along["dp"].pg
    mine, other = (mesh.rank % 2, mesh.rank % 2 + 2)
    with pytest.raises(
        Desync, match=f"rank {mine} calls .* of 1 float32, .*; rank {other} calls .* of 2 float32"
    ):
        calls.all_reduce(pg, torch.ones(1 + mesh.rank // 2)).wait()


@world(2, backend="shm")
def test_the_operation_before_is_done_and_those_behind_it_are_refused(mesh):
    pg = group_of(mesh)
    xs = [torch.ones(3) for _ in range(4)]
    works = [calls.all_reduce(pg, x, now=False) for x in xs[:1]]
    works.append(calls.all_reduce(pg, xs[1] if mesh.rank else xs[1][:2], now=False))
    works += [calls.all_reduce(pg, x, now=False) for x in xs[2:]]
    works[0].wait()
    for work in works[1:]:
        with pytest.raises(Desync, match="of 2 float32"):
            work.wait()
    assert [x.tolist() for x in xs] == [[2, 2, 2], [1, 1, 1], [1, 1, 1], [1, 1, 1]]


THREE = torch.ones(3)
# Calls of rank 0 in a group of two, and what each is told.
MISTAKES: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (
        lambda pg: calls.all_gather(pg, [THREE], THREE),
        "output: expected 2 x 3 elements of torch.float32, got 1 x",
    ),
    (
        lambda pg: calls.all_gather(pg, [THREE[:2]] * 2, THREE),
        r"2 x 3 elements .*, got 2 x \(2 of torch.float32",
    ),
    (lambda pg: calls.all_gather(pg, [THREE.int()] * 2, THREE), r"got 2 x \(3 of torch.int32"),
    (lambda pg: calls.all_gather_single(pg, torch.ones(5), THREE), "output: expected 1 x 6"),
    (lambda pg: calls.reduce_scatter(pg, THREE, [THREE]), "input: expected 2 x 3"),
    (lambda pg: calls.reduce_scatter_single(pg, THREE, torch.ones(8)), "input: expected 1 x 6"),
    (lambda pg: calls.all_to_all_single(pg, THREE, THREE), "2 ranks divide, got 3"),
    (lambda pg: calls.all_to_all_single(pg, THREE, THREE, [1, 1], [1, 2]), r"sum to 3 rows, got \[1, 1\]"),
    (lambda pg: calls.all_to_all_single(pg, THREE, THREE, [1, 2], [3]), r"expected 2 splits .*, got \[3\]"),
    (lambda pg: calls.all_to_all_single(pg, THREE, THREE, [4, -1], [1, 2]), "splits"),
    (lambda pg: calls.all_to_all(pg, [THREE], [THREE] * 2), "expected 2 outputs and inputs, got 1 and 2"),
    (lambda pg: calls.all_to_all(pg, [THREE.int()] * 2, [THREE] * 2), "expected tensors of one dtype, got "),
    (lambda pg: calls.scatter(pg, THREE, [THREE], 0), "input: expected 2 x 3"),
    (lambda pg: calls.gather(pg, [], THREE, 0), "output: expected 2 x 3"),
    (lambda pg: calls.broadcast(pg, THREE, 2), "root: expected a rank of a group of 2, got 2"),
)


@world(2, backend="shm")
def test_a_mistake_in_a_call_is_refused_before_anything_is_sent_and_the_group_lives_on(mesh):
    pg = group_of(mesh)
    for call, words in MISTAKES:
        if mesh.rank == 0:
            with pytest.raises(ValueError, match=words):
                call(pg).wait()
        x = torch.ones(3)
        calls.all_reduce(pg, x).wait()
        assert x.tolist() == [2, 2, 2]
