"""The columns of nccl-tests: factors, counts; and the bound of the memory."""

import pytest

from instep.bench import bandwidth
from instep.bench.bandwidth import (
    FACTORS,
    array_bytes,
    bound_s,
    bus_factor,
    cache_bytes,
    figures,
    whole_count,
)


@pytest.mark.parametrize(
    ("collective", "of_two", "of_four"),
    [
        ("all_reduce", 1.0, 1.5),
        ("all_gather", 0.5, 0.75),
        ("reduce_scatter", 0.5, 0.75),
        ("all_to_all", 0.5, 0.75),
        ("broadcast", 1.0, 1.0),
        ("reduce", 1.0, 1.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(collective, of_two, of_four):
    assert bus_factor(collective, 2) == of_two
    assert bus_factor(collective, 4) == of_four


def test_one_rank_has_no_bus():
    assert all(bus_factor(collective, 1) == 0 for collective in FACTORS)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(num_ranks):
    halves = ("reduce_scatter", "all_gather")
    assert bus_factor("all_reduce", num_ranks) == sum(bus_factor(half, num_ranks) for half in halves)


def test_a_gigabyte_in_a_second_is_a_gigabyte_per_second():
    found = figures("all_reduce", 10**9, 4, 1e6)
    assert found == {"algbw(GB/s)": 1.0, "busbw(GB/s)": 1.5}


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("size", [1, 1000, 64_000, 10**8])
def test_messages_are_whole_parts_and_not_larger_than_asked(size, num_ranks):
    count = whole_count(size, num_ranks)
    assert count % num_ranks == 0
    assert count >= num_ranks
    assert 4 * count <= max(size, 4 * num_ranks)
    assert 4 * (count + num_ranks) > size


def test_the_last_level_cache_is_the_largest_that_the_system_names(tmp_path):
    for index, size in enumerate(("32K", "32K", "1024K", "32768K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == 32 << 20


def test_a_system_that_says_nothing_has_an_ordinary_cache(tmp_path):
    assert cache_bytes(tmp_path) == 32 << 20


def test_two_ranks_read_and_write_their_tensors_once():
    assert bound_s(10**8, 2, 20e9) == pytest.approx(0.02)


def test_arrays_are_four_caches_unless_memory_is_short(monkeypatch):
    monkeypatch.setattr(bandwidth, "cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(bandwidth, "available_bytes", lambda: 1 << 40)
    assert array_bytes(2) == 4 << 20
    monkeypatch.setattr(bandwidth, "available_bytes", lambda: 8 << 20)
    assert 2 * 2 * array_bytes(2) <= 4 << 20
