"""The arithmetic of steps over a link, on round numbers."""

import pytest

from instep.bench.theory import Link

MB = 10**6
PAIR = Link(compute_s=1.0, wire_s=0.8, latency_s=0.01, bytes_per_s=100 * MB, num_ranks=2)


def test_what_does_not_overlap_adds_up():
    assert PAIR.predict("flat", [80 * MB]) == pytest.approx(1.0 + 0.8 + 0.03)
    assert PAIR.predict("naive", [40 * MB, 40 * MB]) == pytest.approx(1.0 + 0.8 + 2 * 0.03)


def test_what_overlaps_takes_the_longer_one_and_the_last_message():
    assert PAIR.predict("bucketed", [60 * MB, 20 * MB]) == pytest.approx(1.0 + 0.2)
    slow = Link(compute_s=0.5, wire_s=0.8, latency_s=0.0, bytes_per_s=100 * MB, num_ranks=2)
    assert slow.predict("overlap", [70 * MB, 10 * MB]) == pytest.approx(0.8 + 0.1)


@pytest.mark.parametrize(("num_ranks", "times"), [(2, 1), (3, 4 / 3), (4, 1.5), (1000, 2)])
def test_an_all_reduce_never_moves_its_bytes_more_than_twice_over_a_link(num_ranks, times):
    link = Link(1.0, 1.0, 0.0, 100 * MB, num_ranks)
    assert link.around_s(100 * MB) == pytest.approx(times, rel=2e-3)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_the_servers_link_carries_every_workers_gradients_and_weights(num_ranks):
    link = Link(1.0, 1.0, 0.0, 100 * MB, num_ranks)
    assert link.predict("server", [100 * MB]) == pytest.approx(1.0 + 2 * (num_ranks - 1))


def test_a_strategy_without_a_formula_is_refused():
    with pytest.raises(ValueError, match="strategy 'ring': expected naive"):
        PAIR.predict("ring", [1])
