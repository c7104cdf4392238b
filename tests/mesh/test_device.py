"""Which device and backend a rank gets, and waits that are cut into slices and lose nothing."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

from instep.mesh.device import Stream, choose, complete, default_backend, done_within, generators

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_a_rank_without_a_gpu_or_with_gloo_computes_on_the_cpu(monkeypatch):
    assert choose(0, 1, "gloo") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose(3, 4) == CPU


@pytest.mark.parametrize("local_rank", [0, 1])
def test_every_rank_of_a_host_has_a_gpu_of_its_own(local_rank, monkeypatch):
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose(local_rank, 2) == torch.device("cuda", local_rank)
    assert chosen == [torch.device("cuda", local_rank)]


def test_ranks_that_would_share_a_gpu_compute_on_the_cpu_or_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose(0, 3) == CPU
    with pytest.raises(ValueError, match=r"nccl needs a GPU per rank, got 2 GPUs for 3 rank\(s\)"):
        choose(0, 3, "nccl")


def test_gpus_get_nccl_with_gloo_beside_it_for_headers():
    assert [default_backend(GPU, one_host=one_host) for one_host in (True, False)] == ["nccl", "nccl"]
    assert complete("gloo") == "gloo"
    assert complete("nccl") == "cpu:gloo,cuda:nccl"


def test_ranks_of_one_host_get_shared_memory_and_others_get_gloo():
    assert [default_backend(CPU, one_host=one_host) for one_host in (True, False)] == ["shm", "gloo"]


def test_a_forward_on_the_cpu_draws_from_its_default_generator():
    assert generators(CPU) == [torch.default_generator]


class Under:
    """Work under way that answers each wait by a script, whose last word holds for good.

    "late" goes on until the wait has just given up, and has ended when it is asked right after.
    """

    def __init__(self, *script: str) -> None:
        self.script = list(script)
        self.state = "goes on"
        self.waits: list[float | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits.append(None if timeout is None else timeout.total_seconds())
        self.state = self._next()
        if self.state == "fails":
            raise RuntimeError("Connection closed by peer")
        if self.state != "done":
            raise RuntimeError("Timed out waiting 200ms for recv operation to complete")
        return True

    def is_completed(self) -> bool:
        return self.state != "goes on"

    def _next(self) -> str:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


def test_a_wait_on_the_cpu_lasts_as_long_as_it_is_told():
    work = Under("goes on", "goes on", "done")
    assert [done_within(work, 0.2, on_gpu=False) for _ in range(3)] == [False, False, True]
    assert work.waits == [0.2, 0.2, 0.2]


def test_a_failure_of_the_backend_is_raised():
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        done_within(Under("fails"), 0.2, on_gpu=False)


def test_work_that_ends_just_when_a_wait_gives_up_is_done():
    """Its time is up, and when asked it is complete: that is no failure."""
    assert done_within(Under("late", "done"), 0.2, on_gpu=False) is True
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        done_within(Under("late", "fails"), 0.2, on_gpu=False)


class Polled(Under):
    """Work on a GPU, where a wait that times out counts as the failure of the operation."""

    def is_completed(self) -> bool:
        self.state = self._next()
        return super().is_completed()


def test_work_on_a_gpu_is_asked_until_it_is_done_and_then_waited_for_once():
    work = Polled("goes on", "goes on", "done")
    assert done_within(work, 60, on_gpu=True)
    assert work.waits == [None]


def test_work_on_a_gpu_that_goes_on_is_never_waited_for():
    work = Polled("goes on")
    began = time.monotonic()
    assert not done_within(work, 0.02, on_gpu=True)
    assert time.monotonic() - began >= 0.02
    assert work.waits == []


def test_on_the_cpu_what_has_returned_has_happened():
    stream, done = Stream(CPU), []
    computed = stream.computed()
    with stream.after(computed):
        done.append("exchange")
    assert computed is None
    assert done == ["exchange"]
