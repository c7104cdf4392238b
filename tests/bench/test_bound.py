"""The memory bound: what it is made of."""

import pytest

from instep.bench import bound
from instep.bench.bound import array_bytes, bound_s, cache_bytes


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
    monkeypatch.setattr(bound, "cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(bound, "available_bytes", lambda: 1 << 40)
    assert array_bytes(2) == 4 << 20
    monkeypatch.setattr(bound, "available_bytes", lambda: 8 << 20)
    assert 2 * 2 * array_bytes(2) <= 4 << 20
