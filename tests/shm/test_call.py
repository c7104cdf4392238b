"""What ranks tell each other about an operation arrives as it was told, and differences are put in words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.shm.call import (
    CALL_BYTES,
    DTYPES,
    LOCATION_BYTES,
    OPERATIONS,
    REDUCTIONS,
    Call,
    Location,
    disagreement,
)

COUNTS = st.integers(0, 2**62)
CALLS = st.builds(
    Call,
    st.sampled_from(OPERATIONS),
    st.sampled_from(DTYPES),
    COUNTS,
    st.sampled_from(REDUCTIONS),
    st.integers(-1, 10_000),
)


@given(CALLS, CALLS, st.binary(max_size=100))
def test_calls_are_equal_exactly_where_their_bytes_are(a, b, rest):
    assert (a == b) == (a.to_bytes() == b.to_bytes())
    assert len(a.to_bytes()) == CALL_BYTES
    assert Call.from_bytes(a.to_bytes() + rest) == a


@given(st.builds(Location, st.integers(-1, 2**31), COUNTS, COUNTS, COUNTS), st.binary(max_size=100))
def test_locations_arrive_as_they_were_told(place, rest):
    assert len(place.to_bytes()) == LOCATION_BYTES
    assert Location.from_bytes(place.to_bytes() + rest) == place


def test_every_dtype_has_the_name_that_torch_gives_it():
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES[1:])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (Call("barrier"), "barrier"),
        (Call("all_reduce", "float32", 7, "max"), "all_reduce (max) of 7 float32"),
        (Call("broadcast", "bool", 0, root=0), "broadcast of 0 bool with root 0"),
        (Call("reduce", "int64", 1, "bxor", 3), "reduce (bxor) of 1 int64 with root 3"),
    ],
)
def test_a_call_in_words(call, words):
    assert str(call) == words


def test_a_disagreement_tells_every_side_once_with_its_ranks():
    barrier, reduce = Call("barrier"), Call("all_reduce", "float32", 7, "sum")
    text = str(disagreement([barrier, reduce, barrier, Call("map_all"), barrier], [4, 5, 6, 7, 9]))
    others = "rank 5 calls all_reduce (sum) of 7 float32; rank 7 calls map_all."
    assert f"ranks 4, 6, 9 call barrier; {others}" in text
