"""The closed form of equal buckets: it is the step played through, and no size is better than the best."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.comm.cost import AlphaBeta, best_bucket, uniform_exposed_s

MB = 10**6


def played(num_buckets, total, backward_s, link):
    """Exposed communication of a step with ``num_buckets`` equal buckets, one event after the other."""
    bucket = total / num_buckets
    free_at = 0.0
    for number in range(1, num_buckets + 1):
        full_at = backward_s * number / num_buckets
        free_at = max(free_at, full_at) + link.time_s(bucket)
    return free_at - backward_s


@given(
    num_buckets=st.integers(1, 200),
    latency_s=st.floats(1e-6, 1e-2),
    wire_s=st.floats(1e-3, 1.0),
    backward_s=st.floats(1e-3, 1.0),
)
def test_the_formula_is_the_step_played_through(num_buckets, latency_s, wire_s, backward_s):
    total = 100 * MB
    link = AlphaBeta(latency_s, wire_s / total)
    expected = played(num_buckets, total, backward_s, link)
    assert uniform_exposed_s(total / num_buckets, total, backward_s, link) == pytest.approx(
        expected, abs=1e-9
    )


@given(latency_s=st.floats(1e-6, 1e-2), wire_s=st.floats(1e-3, 1.0), backward_s=st.floats(1e-3, 1.0))
def test_no_other_size_is_better(latency_s, wire_s, backward_s):
    total = 100 * MB
    link = AlphaBeta(latency_s, wire_s / total)
    best = best_bucket(total, backward_s, link)
    assert 0 < best <= total
    least = uniform_exposed_s(best, total, backward_s, link)
    for share in range(1, 400):
        assert least <= uniform_exposed_s(total * share / 400, total, backward_s, link) + 1e-9
