"""Slices are equal, aligned, hold everything, and are not longer than that takes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from instep.mesh.slices import round_up, slice_length

counts = st.integers(0, 1 << 40)
multiples = st.integers(1, 4096)


@given(counts, multiples)
@settings(deadline=None)
def test_rounding_up_goes_to_the_next_multiple_and_no_further(number, multiple):
    found = round_up(number, multiple)
    assert found % multiple == 0
    assert found - multiple < number <= found


@given(counts, st.integers(1, 4096), multiples)
@settings(deadline=None)
def test_slices_hold_everything_and_no_shorter_ones_would(num_elements, parts, multiple):
    length = slice_length(num_elements, parts, multiple)
    assert length % multiple == 0
    assert parts * length >= num_elements
    shorter = length - multiple
    assert shorter == 0 or parts * shorter < num_elements


def test_a_slice_is_never_empty():
    assert slice_length(0, 4, 16) == 16
