"""A store whose host is gone, or behind a cut network, answers no question: an error is not kept up by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from instep.errors import PeerLost
from instep.mesh import debug_server, peers, process_group
from instep.mesh.debug_server import StatusStore
from instep.mesh.hang_report import AFTER, IN, StatusRow
from instep.mesh.peers import Peer, Peers, own_peer
from instep.shm import handshake

OPERATION = "the exchange of bucket 2"


class Cut(dist.Store):
    """``inner`` until it is ``cut``: then every call waits until the network is ``mended``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dist.HashStore()
        self.cut = threading.Event()
        self.mended = threading.Event()

    def _through(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.cut.is_set():
            self.mended.wait()
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
        self.cut.set()
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
    table = Peers([me, *map(elsewhere, range(1, 9))], me, 1.0, StatusStore(store, "dp/0"))
    store.cut.set()
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 0 waited 1\.\d s .*on another host, has not waited so far"):
        table.wait(Never(), OPERATION)
    assert time.monotonic() - began < 5  # a tenth of the deadline for the post, and no more for the rest


def test_who_met_in_a_lost_store_is_not_asked_of_it(store):
    began = time.monotonic()
    with pytest.raises(PeerLost, match="rank 0 did not come"):
        handshake._wait(store, ["verdict"], 1, [0, 1, 2], 0.1)
    assert time.monotonic() - began < 5


def test_a_store_that_comes_back_is_used_again(store):
    board = StatusStore(store, "dp/0")
    board.questions.patience_s = 0.01
    store.cut.set()
    board.post(StatusRow(0, IN, OPERATION, 1))
    assert board.read(0) is None
    store.cut.clear()
    store.mended.set()
    board.questions.patience_s = 60
    while (row := board.read(0)) is None:  # the post that was under way ends first
        pass
    assert row.operation == OPERATION
    board.post(StatusRow(0, AFTER, OPERATION, 1))
    assert getattr(board.read(0), "status", "") == AFTER


def test_a_group_is_made_by_the_deadline_or_the_error_names_the_rank_and_the_store(store):
    store.cut.set()
    began = time.monotonic()
    with pytest.raises(
        dist.DistStoreError, match=r"rank 1: no answer from the store within 2\.011 s \(instep/groups/dp"
    ):
        process_group.from_store(store, 1, 0.01, config="cpu:gloo")("dp", [0, 1])
    assert time.monotonic() - began < 10


def test_a_status_store_that_is_gone_when_it_is_made_stays_empty(store, monkeypatch):
    monkeypatch.setattr(debug_server, "PATIENCE_S", 0.01)
    store.cut.set()
    board = StatusStore(store, "dp/0")
    board.post(StatusRow(0, IN, OPERATION, 1))
    assert board.read(0) is None
