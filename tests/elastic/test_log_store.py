"""Ranks that have one log open see one store, whatever a rank that died has left in it."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from multiprocessing import get_context

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from instep.elastic.log_store import LogStore
from instep.errors import PeerLost
from instep.launch.memory_file import MemoryFile

keys = st.sampled_from(["a", "b", "größer"])
values = st.text(max_size=20)
operations = st.one_of(
    st.tuples(st.just("set"), keys, values),
    st.tuples(st.just("delete_key"), keys),
    st.tuples(st.just("check"), st.lists(keys, min_size=1)),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("add"), st.just("n"), st.integers(-5, 5)),
    st.tuples(st.just("compare_set"), keys, values, values),
)


@pytest.fixture
def file() -> Iterator[MemoryFile]:
    made = MemoryFile.create()
    yield made
    made.close()


@given(st.lists(st.tuples(st.integers(0, 2), operations), max_size=30))
def test_three_ranks_see_what_one_store_of_torch_would_say(done: list[tuple[int, tuple]]) -> None:
    expected = dist.HashStore()
    with closing(MemoryFile.create()) as file:
        ranks = [LogStore(file) for _ in range(3)]
        for rank, (name, *arguments) in done:
            assert getattr(ranks[rank], name)(*arguments) == getattr(expected, name)(*arguments)
        for key in ("a", "b", "größer", "n"):
            for store in ranks:
                assert store.check([key]) == expected.check([key])
                assert not store.check([key]) or store.get(key) == expected.get(key)


def test_what_torch_writes_through_a_prefix_is_read(file: MemoryFile) -> None:
    store, other = LogStore(file), LogStore(file)
    dist.PrefixStore("one", store).set("key", b"\x00\xff".decode("latin-1"))
    assert other.check(["one/key"])
    assert other.get("one/key") == "\x00\xff".encode()


def count(file: MemoryFile) -> None:
    store = LogStore(file)
    for _ in range(200):
        store.add("n", 1)


def test_processes_and_threads_count_together(file: MemoryFile) -> None:
    store = LogStore(file)
    process = get_context("fork").Process(target=count, args=(file,))
    process.start()
    threads = [threading.Thread(target=lambda: [store.add("n", 1) for _ in range(200)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for joined in (*threads, process):
        joined.join()
    assert store.get("n") == b"600"


@pytest.mark.parametrize("left", [1, 7, 11])
def test_half_a_record_of_a_rank_that_died_is_none_and_is_written_over(file: MemoryFile, left: int) -> None:
    store, other = LogStore(file), LogStore(file)
    store.set("a", "1")
    begin = os.fstat(file.fd).st_size
    store.set("bbb", "2222222222222222")
    os.ftruncate(file.fd, begin + left)
    assert other.check(["a"])
    assert not other.check(["bbb"])
    other.set("c", "3")
    late = LogStore(file)
    assert (late.num_keys(), late.get("c")) == (2, b"3")


def test_it_lasts_when_its_maker_has_let_the_memory_go_and_leaves_no_descriptor() -> None:
    gc.collect()  # what tests before this one have left has descriptors, too
    file = MemoryFile.create()
    store = LogStore(file)
    before = len(os.listdir("/proc/self/fd"))
    file.close()
    store.set("a", "1")
    assert store.get("a") == store.clone().get("a") == b"1"
    del store
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_it_waits_for_what_another_thread_writes(file: MemoryFile) -> None:
    asked = threading.Event()

    def is_over() -> bool:
        asked.set()
        return False

    def write() -> None:
        asked.wait()
        LogStore(file).set("late", "x")

    writer = threading.Thread(target=write)
    writer.start()
    assert LogStore(file, is_over, 10).get("late") == b"x"
    writer.join()


def test_a_generation_that_ends_ends_the_wait(file: MemoryFile) -> None:
    looks = itertools.count()
    store = LogStore(file, lambda: next(looks) >= 3, 10)
    with pytest.raises(PeerLost, match="during the rendezvous") as lost:
        store.wait(["never"])
    assert lost.value.operation == "the rendezvous"
    assert next(looks) == 4


def test_nothing_is_written_for_a_generation_that_is_over(file: MemoryFile) -> None:
    store = LogStore(file, lambda: True, 10)
    with pytest.raises(PeerLost):
        store.set("a", "1")
    with pytest.raises(PeerLost):
        store.add("a", 1)
    assert not LogStore(file).check(["a"])


def test_the_deadline_names_what_did_not_come(file: MemoryFile) -> None:
    store = LogStore(file, timeout_s=10)
    with pytest.raises(RuntimeError, match=r"^a, b did not come within 0.01 s$"):
        store.wait(["a", "b"], timedelta(milliseconds=10))
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(RuntimeError, match=r"^c did not come within 0.02 s$"):
        store.clone().get("c")
