"""What a rank announces of a call arrives, and differs where calls differ."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.shm.call import (
    CALL_BYTES,
    LOCATION,
    NOWHERE,
    SLOT_BYTES,
    Location,
    announcement,
    describe_call,
    disagreement,
)
from tests.shm.numbers import MOVED, REDUCTIONS

COUNTS = st.integers(0, 2**62)
CALLS = st.tuples(
    st.sampled_from(("all_gather", "all_reduce", "reduce_scatter")),
    st.sampled_from(MOVED),
    COUNTS,
    st.sampled_from(("", *REDUCTIONS)),
    st.integers(-1, 10_000),
)


@given(CALLS, CALLS, st.builds(Location, st.integers(-1, 2**31), COUNTS, COUNTS, COUNTS))
def test_announcements_differ_exactly_where_calls_do_and_carry_the_location(a, b, place):
    slots = [announcement(describe_call(*call), place) for call in (a, b)]
    assert [len(slot) for slot in slots] == [SLOT_BYTES] * 2
    assert (a == b) == (slots[0][:CALL_BYTES] == slots[1][:CALL_BYTES])
    assert Location(*LOCATION.unpack(slots[0][CALL_BYTES:])) == place


def test_a_disagreement_names_every_side_once_with_its_ranks():
    barrier, reduce = describe_call("barrier"), describe_call("all_reduce", torch.float32, 7, "sum")
    broadcast = describe_call("broadcast", torch.bool, 0, root=0)
    slots = [announcement(call, NOWHERE) for call in (barrier, reduce, barrier, broadcast, barrier)]
    others = "rank 5 calls all_reduce (sum) of 7 float32; rank 7 calls broadcast of 0 bool with root 0."
    assert f"ranks 4, 6, 9 call barrier; {others}" in str(disagreement(slots, [4, 5, 6, 7, 9]))
    assert disagreement(slots[:1] * 3, [0, 1, 2]) is None
