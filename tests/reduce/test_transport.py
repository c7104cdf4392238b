"""Slices over messages: a rank that goes is noticed at once."""

from __future__ import annotations

import threading

import pytest

from instep.errors import PeerLost
from instep.reduce.transport import GlooTransport
from instep.reduce.tree import rank_major
from tests.reduce.reductions import drawn_bucket, new_exchange, run
from tests.world import world


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
