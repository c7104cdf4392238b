"""A store whose waits end with the generation, and which is a store like any other until then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from itertools import count

import pytest
import torch.distributed as dist

from instep.elastic.store import WatchedStore
from instep.errors import PeerLost


def never() -> bool:
    return False


@pytest.fixture
def inner() -> Iterator[dist.Store]:
    return dist.HashStore()


def test_it_passes_everything_on(inner: dist.Store) -> None:
    store = WatchedStore(inner, never, 10)
    store.set("a", "1")
    assert inner.get("a") == store.get("a") == b"1"
    assert store.add("n", 2) == 2
    assert store.add("n", 3) == 5
    assert store.check(["a", "n"])
    assert not store.check(["a", "b"])
    assert store.compare_set("a", "1", "2") == b"2"
    assert store.num_keys() == inner.num_keys()
    assert store.delete_key("a")
    assert not inner.check(["a"])


def test_it_can_stand_below_a_prefix(inner: dist.Store) -> None:
    store = WatchedStore(inner, never, 10)  # torch's prefix would not keep it alive
    prefixed = dist.PrefixStore("one", store)
    prefixed.set("a", "1")
    assert inner.get("one/a") == b"1"
    assert prefixed.get("a") == b"1"
    assert prefixed.add("n", 1) == 1
    assert prefixed.check(["n"])


def test_it_waits_for_what_another_thread_writes(inner: dist.Store) -> None:
    asked = threading.Event()

    def is_over() -> bool:
        asked.set()
        return False

    def write() -> None:
        asked.wait()
        inner.set("late", "x")

    writer = threading.Thread(target=write)
    writer.start()
    assert WatchedStore(inner, is_over, 10).get("late") == b"x"
    writer.join()


def test_a_generation_that_ends_ends_the_wait(inner: dist.Store) -> None:
    looks = count()
    store = WatchedStore(inner, lambda: next(looks) >= 3, 10)
    with pytest.raises(PeerLost, match="while the ranks were meeting") as lost:
        store.wait(["never"])
    assert lost.value.operation == "the meeting"
    assert next(looks) == 4


def test_nothing_is_written_for_a_generation_that_is_over(inner: dist.Store) -> None:
    store = WatchedStore(inner, lambda: True, 10)
    with pytest.raises(PeerLost):
        store.set("a", "1")
    with pytest.raises(PeerLost):
        store.add("a", 1)
    assert not inner.check(["a"])


def test_the_deadline_names_what_did_not_come(inner: dist.Store) -> None:
    store = WatchedStore(inner, never, 10)
    with pytest.raises(RuntimeError, match=r"^a, b did not come within 0.01 s$"):
        store.wait(["a", "b"], timedelta(milliseconds=10))
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(RuntimeError, match=r"^c did not come within 0.02 s$"):
        store.clone().get("c")
