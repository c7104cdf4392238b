"""A store that nobody waits in for a rank that has died.

Ranks that make a group wait for each other's addresses in a store, and a store knows no processes: a rank
that dies between two of them is missed until the deadline. The supervisor does know. So the wait is cut into
slices, and between two of them the rank looks whether its generation is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from instep.errors import PeerLost

SLICE_S = 0.005


class WatchedStore(dist.Store):
    """``inner``, until ``is_over()``: then everything raises ``PeerLost``."""

    def __init__(self, inner: dist.Store, is_over: Callable[[], bool], timeout_s: float) -> None:
        super().__init__()
        self._inner = inner
        self._is_over = is_over
        self._timeout_s = timeout_s

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all ``keys`` are there.

        Raises:
            PeerLost: the generation has ended.
            DistStoreError: they did not come in time.
        """
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        while not self._watched().check(list(keys)):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"{', '.join(keys)} did not come within {seconds:g} s")
            time.sleep(SLICE_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._inner.get(key)

    def set(self, key: str, value: str) -> None:
        self._watched().set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._watched().add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._watched().check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._watched().compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._watched().delete_key(key)

    def num_keys(self) -> int:
        return self._watched().num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def clone(self) -> WatchedStore:
        return WatchedStore(self._inner, self._is_over, self._timeout_s)

    def _watched(self) -> dist.Store:
        if self._is_over():
            raise PeerLost("a rank was lost while the ranks were meeting", operation="the meeting")
        return self._inner
