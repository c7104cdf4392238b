"""Threads that compute at once, each with the settings of the thread that asked them."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import TypeVar

import torch

from instep.events import Recorder
from instep.net.lane import Lane

T = TypeVar("T")


class ThreadSettings:
    """What torch keeps per thread, as the caller has it: grad mode, inference mode, autocast, threads, and of
    a GPU the stream, with which it is the current one.

    A new thread has as many threads for operators as there are cores, whatever ``torch.set_num_threads`` was
    told elsewhere, until something asks how many it has; convolutions do not ask, and round accordingly.

    The cache of autocast is off inside. All threads share it, and the first that leaves an autocast block
    empties it for the others, who would then cast a weight twice, or not, as it happens.
    """

    def __init__(self, device: torch.device) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.num_threads = torch.get_num_threads()
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", device.type})
            if torch.is_autocast_enabled(kind)
        ]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this thread is as the caller's was."""
        before = [(kind, torch.is_autocast_enabled(kind)) for kind, _ in self.autocast]
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        try:
            for kind, dtype in self.autocast:
                torch.set_autocast_enabled(kind, True)
                torch.set_autocast_dtype(kind, dtype)
            on_stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
            with on_stream, torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
                yield
        finally:
            for kind, enabled in before:
                torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_cache_enabled(cached)


class ThreadPool:
    """``size`` threads, made when they are first needed; a pool of one is the thread of the caller."""

    def __init__(self, size: int, recorder: Recorder) -> None:
        self.size = size
        self.recorder = recorder
        self._lanes = [
            Lane(f"instep replica {r}", inline=size == 1, profiled_as="compute") for r in range(size)
        ]
        self._end = weakref.finalize(self, _close, self._lanes)

    def run(self, name: str, functions: Sequence[Callable[[], T]], settings: ThreadSettings) -> list[T]:
        """What ``functions`` return, each called in a thread of its own with ``settings``.

        Returns when all have ended. Of several errors, the first in the order of ``functions`` is raised.
        """
        found: dict[int, T] = {}

        def call(r: int, function: Callable[[], T]) -> None:
            lane = self.recorder.as_lane(f"replica {r}")
            with lane, self.recorder.span(name, lane="compute"), settings.entered():
                found[r] = function()

        lanes = self._lanes[: len(functions)]
        with self.recorder.span("replicas", lane="compute"):
            works = [
                lane.submit(name, partial(call, r, function))
                for r, (lane, function) in enumerate(zip(lanes, functions, strict=True))
            ]
            for lane in lanes:
                lane.reset()  # which waits for what it has: the caller goes on with memory that all have used
        for r, work in enumerate(works):
            if work.error is not None:
                work.error.add_note(f"in replica {r} of {self.size}")
                raise work.error
        return [found[r] for r in range(len(functions))]

    def close(self) -> None:
        """End the threads. Also happens when the pool is collected."""
        self._end()


def _close(lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        lane.close()


def keep_for_thread(name: str, value: object) -> None:
    """Let torch keep ``value`` for this thread under ``name``, and for autograd's threads that work for it.

    What it keeps needs a reference, which it gives back; torch 2.10 takes none by itself, and crashed later.
    """
    if not _takes_references():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(name, value)


@cache
def _takes_references() -> bool:
    tried = object()
    before = sys.getrefcount(tried)
    torch._C._stash_obj_in_tls("instep tried", tried)
    taken = sys.getrefcount(tried) > before
    if not taken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tried))
    return taken
