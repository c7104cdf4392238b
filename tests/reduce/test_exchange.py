"""The reduced gradient has the bits of one process on every world; what usual reductions give has not."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from instep.errors import Desync, PeerLost
from instep.memory import allocate
from instep.net.process_group import Group
from instep.reduce.buckets import Bucket
from instep.reduce.exchange import OrderedAllReduce
from instep.reduce.header import (
    AGREED,
    UPDATE,
    VERSION,
    Header,
    disagreement,
    header_length,
    pack,
    unpack,
)
from instep.reduce.transport import GlooTransport
from instep.reduce.tree import rank_major, round_major
from tests.reduce.reductions import (
    NUM_ELEMENTS,
    Leaves,
    Reduce,
    content,
    drawn_bucket,
    drawn_gradients,
    exchange_in_slices,
    fill,
    filled_bucket,
    has_clean_padding,
    header_for,
    is_mean,
    narrow_wire,
    new_exchange,
    ordered_exchange,
    plain_all_reduce,
    reduces_like_one_process,
    run,
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


@pytest.mark.parametrize("num_private", [0, 1, 3])
@pytest.mark.parametrize("leaves", [rank_major(3, 3), rank_major(8, 3), [[], range(7), []]])
def test_buckets_in_shared_memory_are_reduced_where_they_lie(leaves, num_private):
    world(3, backend="shm")(reduces_where_buckets_lie)(leaves=leaves, num_private=num_private)


def reduces_where_buckets_lie(mesh, leaves: Leaves, num_private: int):
    """The same bits if some ranks' buckets are private memory, but then they have to be sent."""
    group = mesh.world.group
    memory = allocate if group.rank < num_private else group.allocate
    exchange = new_exchange(group, at_once_bytes=0)
    bucket = run(exchange, drawn_bucket(group, leaves, memory=memory), leaves)
    assert is_mean(bucket, sum(map(len, leaves)))
    assert bool(exchange.scratch) is (num_private > 0)


@world(3, backend="shm")
@pytest.mark.parametrize("leaves", [rank_major(3, 3), rank_major(8, 3), [[], range(7), []]])
@pytest.mark.parametrize("num_private", [0, 1])
def test_small_buckets_in_shared_memory_are_published_with_their_headers(mesh, leaves, num_private):
    group = mesh.world.group
    memory = allocate if group.rank < num_private else group.allocate
    exchange = new_exchange(group)
    for dtype in ("float32", "float64", "float32"):
        before = group.peers.flight.number
        bucket = run(exchange, drawn_bucket(group, leaves, dtype, memory=memory), leaves)
        assert bucket.nbytes * sum(map(len, leaves)) < exchange.transport.at_once_bytes
        assert is_mean(bucket, sum(map(len, leaves)))
        assert group.peers.flight.number == before + 1


@world(3, backend="shm")
@pytest.mark.parametrize("last_is_small", [False, True])
def test_buckets_that_follow_each_other_share_barriers_and_the_last_one_ends_all(mesh, last_is_small):
    """n large ones take n + 1 barriers. Their homes are read after the last one; one rank adds late."""
    group, leaves = mesh.world.group, rank_major(8, 3)
    exchange = new_exchange(group)
    buckets = [drawn_bucket(group, leaves, memory=group.allocate) for _ in range(4)]
    for bucket in buckets[:-1]:
        bucket.followed = True
    before = group.peers.flight.number
    for bucket in buckets:
        exchange.transport.at_once_bytes = 1 << 20 if last_is_small and not bucket.followed else 0
        if group.rank == 1:
            torch.randn(1 << 20).sort()
        run(exchange, bucket, leaves)
    assert all(is_mean(bucket, 8) for bucket in buckets)
    assert group.peers.flight.number == before + 4 + (not last_is_small)


@world(3, backend="shm")
def test_a_bucket_that_moves_is_found_at_its_new_address(mesh):
    group, leaves = mesh.world.group, rank_major(8, 3)
    exchange = new_exchange(group, at_once_bytes=0)
    gradients = drawn_gradients(8)
    own = {leaf: torch.tensor(gradients[leaf]) for leaf in leaves[group.rank]}
    bucket, kept = filled_bucket(group, own, 8, memory=group.allocate), list[Tensor]()
    for number in range(4):
        before = bucket.home.data_ptr()
        fill(bucket, own, 8)
        assert (bucket.home.data_ptr() != before) is (len(kept) > 0)
        kept.clear()
        assert is_mean(run(exchange, bucket, leaves), 8)
        if number == 1 + group.rank % 2:  # then it moves here, and elsewhere it stays
            kept.append(bucket.home[:1])


@world(3)
@pytest.mark.parametrize("weights", [[5, 0, 2], [1, 1, 1], [1, 0, 0], [10**12, 3, 1]])
def test_the_sum_is_multiplied_once_by_one_over_all_weights(mesh, weights):
    group, leaves = mesh.world.group, rank_major(8, 3)
    bucket = run(new_exchange(group), drawn_bucket(group, leaves), leaves, weights[group.rank])
    assert is_mean(bucket, 8, sum(weights))


@world(3)
def test_padding_stays_minus_zero(mesh):
    group = mesh.world.group
    for leaves in (rank_major(3, 3), rank_major(8, 3), [[], [], range(7)]):
        for at_once_bytes in (None, 0):
            exchange = new_exchange(group, at_once_bytes=at_once_bytes)
            assert has_clean_padding(run(exchange, drawn_bucket(group, leaves), leaves))


@world(3)
def test_a_leaf_without_a_gradient_leaves_even_the_sign_of_zero_alone(mesh):
    """Leaf 1, on rank 1, has no gradient and holds -0.0: the sum is that of leaves 0 and 2."""
    group, leaves = mesh.world.group, rank_major(3, 3)
    special = torch.tensor([0.0, -0.0, 1e-45, -1.5, float("inf"), 3.0]).repeat(NUM_ELEMENTS)[:NUM_ELEMENTS]
    own = torch.full_like(special, -0.0) if group.rank == 1 else special
    bucket = filled_bucket(group, {group.rank: own}, 3)
    run(new_exchange(group), bucket, leaves, 1 if group.rank == 0 else 0)
    assert content(bucket).view(torch.int32).tolist() == (special + special).view(torch.int32).tolist()


@world(2)
def test_an_unordered_rank_without_leaves_adds_nothing_of_an_earlier_step(mesh):
    group, leaves = mesh.world.group, [range(2), []]
    bucket = drawn_bucket(group, leaves)
    if group.rank == 1:
        bucket.home.fill_(7)
    assert is_mean(run(new_exchange(group, ordered=False), bucket, leaves), 2)


@world(3)
def test_presence_and_frozen_parameters_of_every_rank_are_known_to_all(mesh):
    group, leaves = mesh.world.group, rank_major(3, 3)
    bucket = filled_bucket(group, {group.rank: torch.ones(NUM_ELEMENTS)}, 3)
    for k, slot in enumerate(bucket.slots):
        slot.present = k == group.rank or k == 3
        slot.frozen = k == 2 and group.rank == 1
    run(new_exchange(group), bucket, leaves)
    assert bucket.presence == [0b1001, 0b1010, 0b1100]
    assert bucket.frozen == [0, 0b100, 0]


def prepared(group: Group) -> tuple[OrderedAllReduce, Bucket, Leaves, Tensor]:
    """An exchange, a bucket with one leaf per rank, the leaves by rank, and the bucket's values before."""
    leaves = rank_major(group.size, group.size)
    bucket = filled_bucket(group, {group.rank: torch.full((NUM_ELEMENTS,), 1.0 + group.rank)}, group.size)
    return new_exchange(group), bucket, leaves, bucket.home.clone()


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
    exchange, bucket, leaves, before = prepared(mesh.world.group)
    header = header_for(bucket, leaves, 1)
    with pytest.raises(Desync, match=words):
        exchange.run(bucket, header._replace(**change) if mesh.rank == 1 else header)
    assert bucket.home.tolist() == before.tolist()
    exchange.run(bucket, header)  # and the group is fit for more
    assert set(content(bucket).tolist()) == {2.0}


@world(3)
def test_a_rank_that_leaves_is_named_to_the_others(mesh):
    exchange, bucket, leaves, before = prepared(mesh.world.group)
    header = header_for(bucket, leaves, 1)
    if mesh.rank == 2:
        exchange.announce_leave(header, "leaving a step")
    else:
        with pytest.raises(Desync, match="rank 2 left step 4 before its gradients were complete"):
            exchange.run(bucket, header)
        assert bucket.home.tolist() == before.tolist()
    exchange.run(bucket, header)
    assert set(content(bucket).tolist()) == {2.0}


@world(2)
def test_weights_that_sum_to_zero_are_an_error_on_every_rank(mesh):
    exchange, bucket, leaves, before = prepared(mesh.world.group)
    with pytest.raises(ValueError, match="weights of all micro-batches of the step sum to 0"):
        exchange.run(bucket, header_for(bucket, leaves, 0))
    assert bucket.home.tolist() == before.tolist()


@world(2)
def test_agreeing_and_exchanging_are_recorded(mesh):
    exchange, bucket, leaves, _ = prepared(mesh.world.group)
    exchange.transport.at_once_bytes = 0
    run(exchange, bucket, leaves)
    events = {event.name: event for event in exchange.recorder.events}
    queued, agree, exchanged = (events[name] for name in ("queued", "agree", "exchange"))
    assert {event.lane for event in events.values()} == {"communication"}
    assert {event.bucket for event in events.values()} == {bucket.index}
    assert (agree.bytes, exchanged.bytes) == (0, bucket.nbytes)
    assert queued.end_ns <= agree.start_ns <= agree.end_ns <= exchanged.start_ns


def waits(exchange: OrderedAllReduce) -> list[int]:
    """The ranks that this rank has waited for."""
    return [event.peer for event in exchange.recorder.events if event.name == "wait"]


HOUR_NS = 3600 * 10**9


@world(3)
def test_who_waits_records_for_which_rank(mesh):
    exchange, bucket, leaves, _ = prepared(mesh.world.group)
    launched = time.monotonic_ns() + (HOUR_NS if mesh.rank == 1 else 0)
    exchange.run(bucket, header_for(bucket, leaves, 1)._replace(launched_ns=launched))
    assert waits(exchange) == ([] if mesh.rank == 1 else [1])
    assert all(event.duration_s < 3600 for event in exchange.recorder.events if event.name != "queued")


@world(2)
def test_times_of_another_host_are_translated_into_those_of_this_one(mesh):
    """By its own clock, an hour ahead, rank 1 was 59 minutes late; in truth it was a minute early."""
    exchange, bucket, leaves, _ = prepared(mesh.world.group)
    exchange.offsets_ns = (0, HOUR_NS)
    launched = time.monotonic_ns() + (HOUR_NS - HOUR_NS // 60 if mesh.rank == 1 else 0)
    exchange.run(bucket, header_for(bucket, leaves, 1)._replace(launched_ns=launched))
    if mesh.rank == 0:
        assert waits(exchange) == []


def test_a_rank_that_goes_is_missed_at_once():
    world(2, timeout_s=20)(goes)(missed=threading.Event())


def goes(mesh, missed: threading.Event):
    group = mesh.world.duplicate()
    if mesh.rank == 1:
        group.close()
        assert missed.wait(30)
        return
    try:
        exchange, leaves = new_exchange(group, at_once_bytes=0), rank_major(8, 2)
        assert isinstance(exchange.transport, GlooTransport)
        bucket = drawn_bucket(group, leaves)
        with pytest.raises(PeerLost, match="after 4 optimizer steps") as lost:
            run(exchange, bucket, leaves)
        assert lost.value.operation.startswith("the exchange of bucket")
    finally:
        missed.set()
    group.close()


GOOD = Header(
    version=VERSION,
    declared=1,
    step=12,
    exchange=0,
    bucket=3,
    num_elements=4096,
    num_leaves=8,
    weight=64,
    ready_ns=10**18,
    launched_ns=10**18,
    left=0,
)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
headers = st.builds(Header, *[int64 for _ in Header._fields])


@given(st.integers(0, 200), st.lists(headers, min_size=1, max_size=5), st.data())
@settings(deadline=None)
def test_headers_and_flags_arrive_as_they_were_sent(num_parameters, sent, data):
    length, num_flags = header_length(num_parameters), 2 * num_parameters
    flags = [data.draw(st.integers(0, (1 << num_flags) - 1)) for _ in sent]
    rows = torch.stack(
        [pack(header, bits, num_flags, length) for header, bits in zip(sent, flags, strict=True)]
    )
    assert rows.shape == (len(sent), length)
    assert unpack(rows, num_flags) == (sent, flags)


@pytest.mark.parametrize("field", sorted(set(AGREED) - {"op"}))
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_odd_rank_is_named_with_both_values(field, odd):
    ranks = [10, 20, 30]
    sent = [GOOD] * 3
    sent[odd] = GOOD._replace(**{field: 77})
    verdict = disagreement(sent, ranks)
    others = ", ".join(str(rank) for i, rank in enumerate(ranks) if i != odd)
    assert verdict is not None
    does, _ = AGREED[field]
    value = {"declared": "a declared step", "hooked": "instep's exchange"}.get(field, getattr(GOOD, field))
    said = f"the ranks are out of step: rank {ranks[odd]} {does.format(77)}; ranks {others}: {value}"
    assert verdict.what == said
    assert verdict.in_short == f"rank {ranks[odd]} is out of step"


def test_the_first_thing_that_differs_is_told_with_its_fix():
    late = GOOD._replace(step=11, exchange=1, bucket=0)
    verdict = disagreement([GOOD, late], [0, 1])
    assert verdict is not None
    said = str(verdict)
    assert "rank 1 is at optimizer step 11; rank 0: 12. Each rank must call optimizer.step()" in said
    assert "bucket" not in said


def test_ranks_that_do_different_things_are_told_what_in_words():
    steps = GOOD._replace(op=UPDATE)
    assert str(disagreement([steps, GOOD, steps], [4, 5, 6])).startswith(
        "the ranks are out of step: rank 5 is in the exchange of gradients; ranks 4, 6: optimizer.step(). "
    )


def test_a_rank_that_left_is_named_before_all_else():
    verdict = disagreement([GOOD, GOOD._replace(left=1, bucket=0), GOOD._replace(left=1)], [3, 5, 7])
    assert verdict is not None
    assert verdict.what.startswith("ranks 5, 7 left step 12 ")
    assert "nothing was reduced" in verdict.what
