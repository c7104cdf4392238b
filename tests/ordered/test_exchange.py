"""The reduced gradient has the bits of one process on every world; what usual reductions give has not."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import Tensor

from instep.errors import Desync
from instep.events import Recorder
from instep.memory import allocate
from instep.mesh.process_group import Group
from instep.ordered.buckets import Bucket
from instep.ordered.exchange import OrderedAllReduce
from instep.ordered.tree import rank_major, round_major
from tests.ordered.reductions import (
    NUM_ELEMENTS,
    SHAPES,
    Leaves,
    Reduce,
    content,
    drawn_gradients,
    exchange_in_slices,
    fill,
    filled_bucket,
    header_for,
    narrow_wire,
    one_process,
    ordered_exchange,
    plain_all_reduce,
    reduces_like_one_process,
    scaled_before,
    stacked_sum,
)
from tests.world import world

SIZES = [1, 2, 3, 5]


def placements(num_ranks: int) -> list[Leaves]:
    """Even and uneven ones, with ranks that have several roots and ranks that have no leaf."""
    nobody: list[list[int]] = [[] for _ in range(num_ranks - 1)]
    scattered = [leaf * leaf % num_ranks for leaf in range(11)]
    return [
        *[rank_major(num_leaves, num_ranks) for num_leaves in (1, 3, 8, 12, 13)],
        round_major(8, num_ranks),
        rank_major(13, num_ranks)[::-1],
        [*nobody, range(7)],
        [range(7), *nobody],
        [[leaf for leaf, owner in enumerate(scattered) if owner == rank] for rank in range(num_ranks)],
    ]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("size", SIZES)
def test_every_placement_gives_the_bits_of_one_process(size, backend):
    world(size, backend=backend)(every_placement_has_the_bits_of_one_process)()


def every_placement_has_the_bits_of_one_process(mesh):
    for leaves in placements(mesh.world.size):
        for exchange in (ordered_exchange, exchange_in_slices):
            assert reduces_like_one_process(exchange, mesh.world.group, leaves), (leaves, exchange)


@pytest.mark.parametrize(
    ("reduce", "size", "same"),
    [
        (ordered_exchange, 6, True),
        (stacked_sum, 5, False),
        (stacked_sum, 6, False),
        (stacked_sum, 2, True),  # two addends have one order
        (scaled_before, 3, False),
        (scaled_before, 6, False),
        (scaled_before, 4, True),  # a power of two rounds nothing
        (narrow_wire, 2, False),
        (narrow_wire, 3, False),
        (narrow_wire, 1, True),  # nothing crosses ranks
        (plain_all_reduce, 3, False),
        (plain_all_reduce, 5, False),
        (plain_all_reduce, 2, True),
    ],
)
def test_the_bit_test_tells_the_ordered_exchange_from_the_usual_reductions(reduce, size, same):
    world(size)(reduces_one_leaf_a_rank)(reduce=reduce, same=same)


def reduces_one_leaf_a_rank(mesh, reduce: Reduce, same: bool):
    group = mesh.world.group
    assert reduces_like_one_process(reduce, group, rank_major(group.size, group.size)) is same


def exchanged(group: Group, leaves: Leaves, weights: list[int] | None = None, **how) -> Bucket:
    """One exchange of gradients drawn for ``leaves``."""
    gradients = drawn_gradients(sum(map(len, leaves)), how.get("dtype", "float32"))
    own = {leaf: torch.tensor(gradients[leaf]) for leaf in leaves[group.rank]}
    bucket = filled_bucket(group, own, len(gradients), **how)
    weight = len(own) if weights is None else weights[group.rank]
    exchange = OrderedAllReduce(
        group, Recorder(), ordered=how.get("ordered", True), max_parameters=len(SHAPES)
    )
    exchange.run(bucket, header_for(bucket, leaves, weight), leaves)
    return bucket


@pytest.mark.parametrize("num_private", [0, 1, 3])
@pytest.mark.parametrize("leaves", [rank_major(3, 3), rank_major(8, 3), [[], range(7), []]])
def test_buckets_in_shared_memory_are_reduced_where_they_lie(leaves, num_private):
    world(3, backend="shm")(reduces_where_buckets_lie)(leaves=leaves, num_private=num_private)


def reduces_where_buckets_lie(mesh, leaves: Leaves, num_private: int):
    """The same bits if some ranks' buckets are private memory, but then they have to be sent."""
    group = mesh.world.group
    num_leaves = sum(map(len, leaves))
    gradients = drawn_gradients(num_leaves)
    own = {leaf: torch.tensor(gradients[leaf]) for leaf in leaves[group.rank]}
    memory = allocate if group.rank < num_private else group.allocate
    bucket = filled_bucket(group, own, num_leaves, memory=memory)
    exchange = OrderedAllReduce(group, Recorder(), ordered=True, max_parameters=len(SHAPES))
    exchange.transport.at_once_bytes = 0
    exchange.run(bucket, header_for(bucket, leaves, len(own)), leaves)
    assert content(bucket).numpy().tobytes() == one_process(gradients, num_leaves).tobytes()
    assert bool(exchange.scratch) is (num_private > 0)


@world(3, backend="shm")
@pytest.mark.parametrize("leaves", [rank_major(3, 3), rank_major(8, 3), [[], range(7), []]])
@pytest.mark.parametrize("num_private", [0, 1])
def test_small_buckets_in_shared_memory_come_with_their_headers(mesh, leaves, num_private):
    group = mesh.world.group
    num_leaves = sum(map(len, leaves))
    memory = allocate if group.rank < num_private else group.allocate
    exchange = OrderedAllReduce(group, Recorder(), ordered=True, max_parameters=len(SHAPES))
    for dtype in ("float32", "float64", "float32"):
        gradients = drawn_gradients(num_leaves, dtype)
        own = {leaf: torch.tensor(gradients[leaf]) for leaf in leaves[group.rank]}
        bucket = filled_bucket(group, own, num_leaves, dtype=dtype, memory=memory)
        assert bucket.nbytes * num_leaves < exchange.transport.at_once_bytes
        before = group.peers.flight.number
        exchange.run(bucket, header_for(bucket, leaves, len(own)), leaves)
        assert content(bucket).numpy().tobytes() == one_process(gradients, num_leaves).tobytes()
        assert group.peers.flight.number == before + 1


@world(3, backend="shm")
@pytest.mark.parametrize("last_is_small", [False, True])
def test_buckets_that_follow_each_other_share_rounds_and_the_last_one_ends_all(mesh, last_is_small):
    """n large ones take n + 1 rounds. Their homes are read when the last has come; one rank adds late."""
    group, leaves = mesh.world.group, rank_major(8, 3)
    exchange = OrderedAllReduce(group, Recorder(), ordered=True, max_parameters=len(SHAPES))
    gradients = drawn_gradients(8)
    own = {leaf: torch.tensor(gradients[leaf]) for leaf in leaves[group.rank]}
    buckets = [filled_bucket(group, own, 8, memory=group.allocate) for _ in range(4)]
    for bucket in buckets[:-1]:
        bucket.followed = True
    before = group.peers.flight.number
    for bucket in buckets:
        exchange.transport.at_once_bytes = 1 << 20 if last_is_small and not bucket.followed else 0
        if group.rank == 1:
            torch.randn(1 << 20).sort()
        exchange.run(bucket, header_for(bucket, leaves, len(own)), leaves)
    expected = one_process(gradients, 8).tobytes()
    assert [content(bucket).numpy().tobytes() for bucket in buckets] == [expected] * 4
    assert group.peers.flight.number == before + 4 + (not last_is_small)


@world(3, backend="shm")
def test_a_bucket_that_moves_is_found_where_it_is_now(mesh):
    group, leaves = mesh.world.group, rank_major(8, 3)
    exchange = OrderedAllReduce(group, Recorder(), ordered=True, max_parameters=len(SHAPES))
    exchange.transport.at_once_bytes = 0
    gradients = drawn_gradients(8)
    own = {leaf: torch.tensor(gradients[leaf]) for leaf in leaves[group.rank]}
    bucket, kept = filled_bucket(group, own, 8, memory=group.allocate), list[Tensor]()
    for number in range(4):
        before = bucket.home.data_ptr()
        fill(bucket, own, 8)
        assert (bucket.home.data_ptr() != before) is (len(kept) > 0)
        kept.clear()
        exchange.run(bucket, header_for(bucket, leaves, len(own)), leaves)
        assert content(bucket).numpy().tobytes() == one_process(gradients, 8).tobytes()
        if number == 1 + group.rank % 2:  # then it moves here, and elsewhere it stays
            kept.append(bucket.home[:1])


@world(3)
@pytest.mark.parametrize("weights", [[5, 0, 2], [1, 1, 1], [1, 0, 0], [10**12, 3, 1]])
def test_the_sum_is_multiplied_once_by_one_over_all_weights(mesh, weights):
    bucket = exchanged(mesh.world.group, rank_major(8, 3), weights)
    expected = one_process(drawn_gradients(8), sum(weights))
    assert content(bucket).numpy().tobytes() == expected.tobytes()


@world(3)
def test_double_precision_stays_double(mesh):
    bucket = exchanged(mesh.world.group, rank_major(8, 3), dtype="float64")
    expected = one_process(drawn_gradients(8, "float64"), 8)
    assert expected.dtype == np.float64
    assert content(bucket).numpy().tobytes() == expected.tobytes()


@world(2)
def test_one_exchange_serves_large_and_small_buckets_in_turn(mesh):
    group = mesh.world.group
    exchange = OrderedAllReduce(group, Recorder(), ordered=True, max_parameters=len(SHAPES))
    for num_leaves, dtype in [(7, "float32"), (2, "float32"), (3, "float64"), (13, "float32")]:
        leaves = rank_major(num_leaves, 2)
        gradients = drawn_gradients(num_leaves, dtype)
        own = {leaf: torch.tensor(gradients[leaf]) for leaf in leaves[group.rank]}
        bucket = filled_bucket(group, own, num_leaves, dtype=dtype)
        exchange.run(bucket, header_for(bucket, leaves, len(own)), leaves)
        assert content(bucket).numpy().tobytes() == one_process(gradients, num_leaves).tobytes()


@world(3)
def test_padding_stays_minus_zero(mesh):
    bucket = exchanged(mesh.world.group, rank_major(8, 3))
    padding = torch.ones(bucket.num_elements, dtype=torch.bool)
    for slot in bucket.slots:
        padding[slot.offset : slot.offset + slot.length] = False
    assert int(padding.sum()) == bucket.num_elements - NUM_ELEMENTS > 0
    assert bool((bucket.home[padding] == 0).all()) and bool(torch.signbit(bucket.home[padding]).all())


@world(3)
def test_a_leaf_without_a_gradient_leaves_even_the_sign_of_zero_alone(mesh):
    """Leaf 1, on rank 1, has no gradient and holds -0.0: the sum is that of leaves 0 and 2."""
    group, leaves = mesh.world.group, rank_major(3, 3)
    special = torch.tensor([0.0, -0.0, 1e-45, -1.5, float("inf"), 3.0]).repeat(NUM_ELEMENTS)[:NUM_ELEMENTS]
    own = torch.full_like(special, -0.0) if group.rank == 1 else special
    bucket = filled_bucket(group, {group.rank: own}, 3)
    OrderedAllReduce(group, Recorder(), ordered=True, max_parameters=len(SHAPES)).run(
        bucket, header_for(bucket, leaves, 1 if group.rank == 0 else 0), leaves
    )
    assert content(bucket).view(torch.int32).tolist() == (special + special).view(torch.int32).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_unordered_is_the_plain_sum_and_differs_in_bits(size):
    world(size)(unordered_is_near_the_mean)()


def unordered_is_near_the_mean(mesh):
    group = mesh.world.group
    num_leaves = 12
    found = content(exchanged(group, round_major(num_leaves, group.size), ordered=False)).numpy()
    expected = one_process(drawn_gradients(num_leaves), num_leaves)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert found.tobytes() != expected.tobytes()


@world(2)
def test_an_unordered_rank_without_leaves_adds_nothing_of_an_earlier_step(mesh):
    group, leaves = mesh.world.group, [range(2), []]
    gradients = drawn_gradients(2)
    own = {leaf: torch.tensor(gradients[leaf]) for leaf in leaves[group.rank]}
    bucket = filled_bucket(group, own, 2, ordered=False)
    if not own:
        bucket.home.fill_(7)
    exchange = OrderedAllReduce(group, Recorder(), ordered=False, max_parameters=len(SHAPES))
    exchange.run(bucket, header_for(bucket, leaves, len(own)), leaves)
    assert content(bucket).numpy().tobytes() == one_process(gradients, 2).tobytes()


@world(3)
def test_everybody_learns_who_had_a_gradient_for_what_and_who_could_not(mesh):
    group, leaves = mesh.world.group, rank_major(3, 3)
    bucket = filled_bucket(group, {group.rank: torch.ones(NUM_ELEMENTS)}, 3)
    for k, slot in enumerate(bucket.slots):
        slot.present = k == group.rank or k == 3
        slot.frozen = k == 2 and group.rank == 1
    OrderedAllReduce(group, Recorder(), ordered=True, max_parameters=len(SHAPES)).run(
        bucket, header_for(bucket, leaves, 1), leaves
    )
    assert bucket.presence == [0b1001, 0b1010, 0b1100]
    assert bucket.frozen == [0, 0b100, 0]


def ready(group: Group) -> tuple[OrderedAllReduce, Bucket, Leaves, Tensor]:
    """All for an exchange of one leaf a rank, and what this rank's bucket holds before it."""
    leaves = rank_major(group.size, group.size)
    bucket = filled_bucket(group, {group.rank: torch.full((NUM_ELEMENTS,), 1.0 + group.rank)}, group.size)
    exchange = OrderedAllReduce(group, Recorder(), ordered=True, max_parameters=len(SHAPES))
    return exchange, bucket, leaves, bucket.home.clone()


@world(3)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 5}, "rank 1 is at optimizer step 5; ranks 0, 2: 4"),
        ({"bucket": 1}, "rank 1 sends bucket 1; ranks 0, 2: 0"),
        ({"num_elements": 7}, "rank 1 has a bucket of 7 elements; ranks 0, 2: "),
    ],
)
def test_ranks_out_of_step_raise_one_error_and_reduce_nothing(mesh, change, words):
    exchange, bucket, leaves, before = ready(mesh.world.group)
    header = header_for(bucket, leaves, 1)
    with pytest.raises(Desync, match=words):
        exchange.run(bucket, header._replace(**change) if mesh.rank == 1 else header, leaves)
    assert bucket.home.tolist() == before.tolist()
    exchange.run(bucket, header, leaves)  # and the group is fit for more
    assert set(content(bucket).tolist()) == {2.0}


@world(3)
def test_a_rank_that_leaves_is_named_to_the_others(mesh):
    exchange, bucket, leaves, before = ready(mesh.world.group)
    header = header_for(bucket, leaves, 1)
    if mesh.rank == 2:
        exchange.announce_leave(header, "leaving a step")
    else:
        with pytest.raises(Desync, match="rank 2 left step 4 before its gradients were complete"):
            exchange.run(bucket, header, leaves)
        assert bucket.home.tolist() == before.tolist()
    exchange.run(bucket, header, leaves)
    assert set(content(bucket).tolist()) == {2.0}


@world(2)
def test_weights_that_sum_to_zero_are_an_error_on_every_rank(mesh):
    exchange, bucket, leaves, before = ready(mesh.world.group)
    with pytest.raises(ValueError, match="weights of all micro-batches of the step sum to 0"):
        exchange.run(bucket, header_for(bucket, leaves, 0), leaves)
    assert bucket.home.tolist() == before.tolist()


@world(2)
def test_agreeing_and_exchanging_are_recorded(mesh):
    exchange, bucket, leaves, _ = ready(mesh.world.group)
    exchange.transport.at_once_bytes = 0
    exchange.run(bucket, header_for(bucket, leaves, 1), leaves)
    events = {event.name: event for event in exchange.recorder.events}
    queued, agree, exchanged = (events[name] for name in ("queued", "agree", "exchange"))
    assert {event.lane for event in events.values()} == {"communication"}
    assert {event.bucket for event in events.values()} == {bucket.index}
    assert (agree.bytes, exchanged.bytes) == (0, bucket.nbytes)
    assert queued.end_ns <= agree.start_ns <= agree.end_ns <= exchanged.start_ns


def waits(exchange: OrderedAllReduce) -> list[int]:
    """For whom this rank has waited."""
    return [event.peer for event in exchange.recorder.events if event.name == "wait"]


HOUR_NS = 3600 * 10**9


@world(3)
def test_who_waits_records_for_which_rank(mesh):
    exchange, bucket, leaves, _ = ready(mesh.world.group)
    launched = time.monotonic_ns() + (HOUR_NS if mesh.rank == 1 else 0)
    exchange.run(bucket, header_for(bucket, leaves, 1)._replace(launched_ns=launched), leaves)
    assert waits(exchange) == ([] if mesh.rank == 1 else [1])
    assert all(event.duration_s < 3600 for event in exchange.recorder.events if event.name != "queued")


@world(2)
def test_times_of_another_host_are_translated_into_those_of_this_one(mesh):
    """By its own clock, an hour ahead, rank 1 was 59 minutes late; in truth it was a minute early."""
    exchange, bucket, leaves, _ = ready(mesh.world.group)
    exchange.offsets_ns = (0, HOUR_NS)
    launched = time.monotonic_ns() + (HOUR_NS - HOUR_NS // 60 if mesh.rank == 1 else 0)
    exchange.run(bucket, header_for(bucket, leaves, 1)._replace(launched_ns=launched), leaves)
    if mesh.rank == 0:
        assert waits(exchange) == []
