"""The best bucket size: the closed forms against a step that is played through bucket by bucket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.bench.alphabeta import best_bucket, comm_bound_s, compute_bound_s, exposed_s
from instep.timeline.predict import Cost, fit

MB = 1e6


def played(num_buckets, total, backward_s, link):
    """Exposed communication of a step with ``num_buckets`` equal buckets, one event after the other."""
    bucket = total / num_buckets
    free_at = 0.0
    for number in range(1, num_buckets + 1):
        full_at = backward_s * number / num_buckets
        free_at = max(free_at, full_at) + link.time_s(bucket)
    return free_at - backward_s


def test_the_example_of_the_notes():
    link = Cost(latency_s=0.2e-3, s_per_byte=2e-9)  # 200 ms for 100 MB, and backward takes 100 ms: comm-bound
    best = best_bucket(100 * MB, 0.1, link)
    assert best / MB == pytest.approx(4.5, abs=0.05)
    assert 100 * MB / best == pytest.approx(22, abs=0.5)
    # exposed: b S - T_b + 2 sqrt(a T_b)
    assert exposed_s(best, 100 * MB, 0.1, link) == pytest.approx(0.2 - 0.1 + 2 * (0.2e-3 * 0.1) ** 0.5)


def test_compute_bound_buckets_are_the_smallest_with_which_the_network_keeps_up():
    link = Cost(latency_s=1e-3, s_per_byte=0.5e-9)  # 50 ms for 100 MB under 100 ms of backward
    best = best_bucket(100 * MB, 0.1, link)
    assert best == pytest.approx(1e-3 * 100 * MB / (0.1 - 0.05))
    assert link.time_s(best) == pytest.approx(
        0.1 * best / (100 * MB)
    )  # travels as fast as the next one fills
    assert exposed_s(best, 100 * MB, 0.1, link) == pytest.approx(1e-3 * 0.1 / (0.1 - 0.05))


@given(
    num_buckets=st.integers(1, 200),
    latency_s=st.floats(1e-6, 1e-2),
    wire_s=st.floats(1e-3, 1.0),
    backward_s=st.floats(1e-3, 1.0),
)
def test_the_formula_is_the_step_played_through(num_buckets, latency_s, wire_s, backward_s):
    total = 100 * MB
    link = Cost(latency_s, wire_s / total)
    expected = played(num_buckets, total, backward_s, link)
    assert exposed_s(total / num_buckets, total, backward_s, link) == pytest.approx(expected, abs=1e-9)


@given(latency_s=st.floats(1e-6, 1e-2), wire_s=st.floats(1e-3, 1.0), backward_s=st.floats(1e-3, 1.0))
def test_no_other_size_is_better(latency_s, wire_s, backward_s):
    total = 100 * MB
    link = Cost(latency_s, wire_s / total)
    best = best_bucket(total, backward_s, link)
    assert 0 < best <= total
    least = exposed_s(best, total, backward_s, link)
    for share in range(1, 400):
        assert least <= exposed_s(total * share / 400, total, backward_s, link) + 1e-9


def test_each_regime_has_the_larger_of_the_two_forms():
    total, backward_s = 100 * MB, 0.1
    slow, fast = Cost(1e-4, 5e-9), Cost(1e-4, 1e-10)
    for bucket in (2 * MB, 20 * MB):
        assert exposed_s(bucket, total, backward_s, slow) == comm_bound_s(bucket, total, backward_s, slow)
        assert exposed_s(bucket, total, backward_s, fast) == compute_bound_s(bucket, fast)


def test_a_bucket_larger_than_everything_is_everything():
    link = Cost(1e-4, 1e-9)
    assert exposed_s(1e12, 100 * MB, 0.1, link) == exposed_s(100 * MB, 100 * MB, 0.1, link)
    assert exposed_s(1e12, 100 * MB, 0.1, link) == pytest.approx(link.time_s(100 * MB))
    assert best_bucket(100 * MB, 1e-9, link) == 100 * MB


def test_the_fit_finds_the_link_that_made_the_times():
    link = Cost(3e-4, 0.7e-9)
    sizes = [4e3, 64e3, 1e6, 32e6]
    found = fit(sizes, [link.time_s(size) for size in sizes])
    assert found.latency_s == pytest.approx(link.latency_s)
    assert found.s_per_byte == pytest.approx(link.s_per_byte)


def test_the_largest_message_does_not_drown_the_latency():
    link = Cost(3e-4, 0.7e-9)
    sizes = [4e3, 64e3, 1e6, 32e6]
    times = [link.time_s(size) for size in sizes]
    times[-1] *= 1.1
    assert fit(sizes, times).latency_s == pytest.approx(link.latency_s, rel=0.05)


@pytest.mark.parametrize(
    ("times", "link"), [([1e-3, 0.5e-3], "no cost per byte"), ([1e-6, 1e-2], "no latency")]
)
def test_neither_figure_is_negative(times, link):
    found = fit([1e3, 1e6], times)
    assert found.latency_s >= 0 and found.s_per_byte >= 0
    assert (found.s_per_byte if link == "no cost per byte" else found.latency_s) == 0


def test_one_size_is_no_line():
    with pytest.raises(ValueError, match="two sizes or more"):
        fit([1e3, 1e3], [1e-3, 2e-3])
