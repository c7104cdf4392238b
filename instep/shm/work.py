"""What an operation returns: torch's idea of work that is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.work import Work

NO_TIMEOUT = timedelta(0)  # what torch passes where a caller gave none


class ShmWork(dist.Work):
    """``work`` of a lane, whose result are ``tensors``.

    ``wait`` raises what the operation raised. ``get_future`` is for those who wait from C++, as torch's
    DistributedDataParallel does; its value is the list of ``tensors``.
    """

    def __init__(self, work: Work, tensors: list[Any], source: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors
        self._source = source
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until done; True. A ``timeout`` that passes is a ``RuntimeError``, as in gloo's work."""
        limited = timeout > NO_TIMEOUT
        if not self._work.finished.wait(timeout.total_seconds() if limited else None):
            raise RuntimeError(f"{self._work.operation} did not end within {timeout.total_seconds():g} s")
        self._work.wait()
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._work.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._work.done() and self._work.error is None

    def exception(self) -> BaseException | None:
        """What it raised so far."""
        return self._work.error

    def result(self) -> list[Tensor]:
        """The tensors that it writes to."""
        return self._tensors

    def _source_rank(self) -> int:
        """Of a receive: the group rank that sent."""
        return self._source() if self._source else -1

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that C++ can wait for."""
        if self._future is None:
            began: torch.futures.Future[Any] = torch.futures.Future()
            # An exception that is set from Python is a value to C++; one that a callback raises is an error.
            self._future = began.then(self._value)
            # Callbacks may use the group and wait for it, so they run in no thread that its work needs.
            threading.Thread(
                target=self._set, args=(began,), name="instep shm callbacks", daemon=True
            ).start()
        return self._future

    def _set(self, began: torch.futures.Future[Any]) -> None:
        self._work.finished.wait()
        began.set_result(None)

    def _value(self, _: torch.futures.Future[Any]) -> list[Any]:
        if self._work.error is not None:
            raise self._work.error
        return self._tensors
