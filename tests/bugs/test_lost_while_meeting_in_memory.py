"""Two ranks were killed while three met in shared memory; the third slept on until the watchdog killed it.

The supervisor knew at once, and so did the store in which they met: it is asked between slices of the sleep.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from instep.errors import PeerLost
from instep.shm import handshake


class Words(list[int]):
    """Those of a segment in which no other rank ever writes."""

    def post(self, i: int, value: int) -> None:
        self[i] = value

    def sleep(self, i: int, target: int, seconds: float) -> None:
        assert seconds <= handshake.SLICE_S


class Store:
    """One that learns, while it is asked, that the group will not come about."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def check(self, keys: list[str]) -> bool:
        self.left -= 1
        if not self.left:
            raise PeerLost("a rank was lost during the rendezvous")
        return False


def test_a_rank_that_waits_in_memory_is_told_that_the_others_are_gone():
    shared = SimpleNamespace(words=Words([0, 0]), posted=[0, 1], rank=0, size=2)
    with pytest.raises(PeerLost, match="was lost during"):
        handshake._all_ranks(Store(questions=3), shared, 1, [0, 1], timeout_s=300.0)
