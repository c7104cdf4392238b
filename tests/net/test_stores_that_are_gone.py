"""A store whose host is gone, or behind a cut network, answers no question: an error is not kept up by it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from instep.errors import PeerLost
from instep.net import peers, process_group
from instep.net import store as stores
from instep.net.hang_report import IN, StatusRow
from instep.net.peers import Peer, Peers, own_peer
from instep.net.store import StatusStore

OPERATION = "the exchange of bucket 2"


class Cut(dist.Store):
    """``inner`` until it is ``cut``: then every call waits until the network is ``mended``.

    ``left`` are the calls until it is cut by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = dist.HashStore()
        self.left = math.inf
        self.cut = threading.Event()
        self.mended = threading.Event()

    def _through(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.cut.is_set() or self.left <= 0:
            self.mended.wait()
        self.left -= 1
        return call(*arguments)

    def set(self, key: str, value: str) -> None:
        self._through(self.inner.set, key, value)

    def get(self, key: str) -> bytes:
        answer: bytes = self._through(self.inner.get, key)
        return answer

    def add(self, key: str, amount: int) -> int:
        answer: int = self._through(self.inner.add, key, amount)
        return answer

    def check(self, keys: list[str]) -> bool:
        answer: bool = self._through(self.inner.check, keys)
        return answer

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=1)) -> None:
        self._through(self.cut.set)
        raise dist.DistStoreError("wait timeout after 100ms")


class Never:
    """An operation that does not end."""

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        threading.Event().wait(min(timeout.total_seconds(), 0.01))
        raise TimeoutError

    def is_completed(self) -> bool:
        return False


@pytest.fixture
def store() -> Iterator[Cut]:
    made = Cut()
    yield made
    made.mended.set()


def elsewhere(rank: int) -> Peer:
    return Peer(rank, "another host", 1, 1)


def test_the_error_of_a_wait_comes_at_its_deadline_whether_or_not_the_store_answers(store, monkeypatch):
    monkeypatch.setattr(peers, "POST_S", 0.0)
    me = own_peer(0)
    table = Peers([me, *map(elsewhere, range(1, 9))], me, 1.0, StatusStore(store))
    store.cut.set()
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 0 waited \d+\.\d s .*on another host, has not waited so far"):
        table.wait(Never(), OPERATION)
    assert time.monotonic() - began < 30  # the store would never answer


def test_a_store_that_comes_back_is_used_again(store, monkeypatch):
    """One slow answer to the question who is lost, and no rank posted anything any more."""
    monkeypatch.setattr(stores, "PATIENCE_S", 0.01)
    board = StatusStore(store)
    store.cut.set()
    assert board.lost() == ([], False)
    board.post(StatusRow(0, IN, OPERATION, 1))
    assert board.read(0) is None
    store.cut.clear()
    store.mended.set()
    monkeypatch.setattr(stores, "PATIENCE_S", 60)
    while (row := board.read(0)) is None:  # the slow answer comes first
        board.post(StatusRow(0, IN, OPERATION, 1))
    assert row.operation == OPERATION
    assert board.report_lost([1], dead=True) == ([1], True) == board.lost()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("calls", [0, 1], ids=["before", "inside"])
def test_a_group_that_is_cut_off_while_it_is_made_ends_by_the_deadline(store, monkeypatch, backend, calls):
    for module in (process_group, stores):
        monkeypatch.setattr(module, "backend_timeout", lambda timeout_s: timedelta(seconds=timeout_s))
    monkeypatch.setattr(stores, "PATIENCE_S", 0.1)
    store.left = calls
    began = time.monotonic()
    with pytest.raises(
        PeerLost,
        match=r"rank 1 waited \d+\.\d s in the making of group 'dp' of ranks 0, 1, and the store gives "
        "no answer: rank 0 or its host has ended, or the network to it is cut: look there",
    ) as lost:
        process_group.from_store(store, 1, 0.2, config=f"cpu:{backend}")("dp", [0, 1])
    assert time.monotonic() - began < 30
    assert lost.value.operation == stores.MAKING


def test_the_rank_that_did_not_come_to_the_making_of_a_group_is_named(monkeypatch):
    for module in (process_group, stores):
        monkeypatch.setattr(module, "backend_timeout", lambda timeout_s: timedelta(seconds=timeout_s))
    store = dist.HashStore()

    def come(rank: int, timeout_s: float) -> None:
        process_group.from_store(store, rank, timeout_s, config="cpu:gloo")("dp", [0, 1, 2])

    def come_too() -> None:
        with suppress(PeerLost):
            come(0, 1.0)

    other = threading.Thread(target=come_too)
    other.start()
    with pytest.raises(
        PeerLost,
        match=r"of ranks 0, 1, 2, and never came: rank 2\. .* raise timeout_s \(0.5 s\)\. Cause: ",
    ) as lost:
        come(1, 0.5)
    other.join()
    assert lost.value.ranks == (2,)
