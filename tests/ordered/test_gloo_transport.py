"""Slices over messages: the bits of one process, and a rank that goes is noticed at once."""

from __future__ import annotations

import threading

import pytest
import torch

from instep.errors import PeerLost
from instep.events import Recorder
from instep.mesh.process_group import Group
from instep.ordered.exchange import OrderedAllReduce
from instep.ordered.gloo_transport import GlooTransport
from instep.ordered.tree import rank_major
from tests.ordered.reductions import (
    NUM_ELEMENTS,
    SHAPES,
    Leaves,
    content,
    drawn_gradients,
    filled_bucket,
    header_for,
    one_process,
)
from tests.world import world


def reduced(group: Group, leaves: Leaves):
    """A bucket that is not small, after its exchange, and the sum by one process."""
    num_leaves = sum(map(len, leaves))
    exchange = OrderedAllReduce(group, Recorder(), ordered=True, max_parameters=len(SHAPES))
    assert isinstance(exchange.transport, GlooTransport)
    exchange.transport.at_once_bytes = 0
    drawn = drawn_gradients(num_leaves)
    bucket = filled_bucket(group, {i: torch.tensor(drawn[i]) for i in leaves[group.rank]}, num_leaves)
    exchange.run(bucket, header_for(bucket, leaves, len(leaves[group.rank])), leaves)
    return bucket, one_process(drawn, num_leaves)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_slices_have_the_bits_of_one_process_and_padding_stays_minus_zero(size):
    world(size)(reduces)()


def reduces(mesh):
    group = mesh.world.group
    nobody: list[list[int]] = [[] for _ in range(group.size - 1)]
    for leaves in (rank_major(group.size, group.size), rank_major(13, group.size), [*nobody, range(7)]):
        bucket, expected = reduced(group, leaves)
        assert content(bucket).numpy().tobytes() == expected.tobytes()
        padding = torch.ones(bucket.num_elements, dtype=torch.bool)
        for slot in bucket.slots:
            padding[slot.offset : slot.offset + slot.length] = False
        assert int(padding.sum()) == bucket.num_elements - NUM_ELEMENTS > 0
        assert bool((bucket.home[padding] == 0).all()) and bool(torch.signbit(bucket.home[padding]).all())


def test_a_rank_that_goes_is_missed_at_once():
    world(2, timeout_s=20)(goes)(missed=threading.Event())


def goes(mesh, missed: threading.Event):
    group = mesh.world.duplicate()
    if mesh.rank == 1:
        group.close()
        assert missed.wait(30)
        return
    try:
        with pytest.raises(PeerLost, match="after 4 optimizer steps") as lost:
            reduced(group, rank_major(8, 2))
        assert lost.value.operation.startswith("the exchange of bucket")
    finally:
        missed.set()
    group.close()
