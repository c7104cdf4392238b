"""Which device and backend a rank gets, waits that lose nothing, and a GPU's work on the host's clock."""

from __future__ import annotations

import random
import re
import struct
import time
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from instep.net import device
from instep.net.device import Marks, activate, complete, default_backend, done_within, generators, resolve

CPU, CUDA, GPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("num_gpus", "wanted", "backend", "num_local", "expected"),
    [
        (0, None, None, 4, "cpu"),
        (2, None, None, 2, "cuda"),
        (2, None, "nccl", 2, "cuda"),
        (2, None, "gloo", 2, "cpu"),
        (2, None, "shm", 2, "cpu"),
        (2, "cuda", "gloo", 2, "cuda"),
        (2, "cuda:1", "gloo", 64, "cuda:1"),
        (2, "cpu", None, 3, "cpu"),
        (2, None, None, 3, "expected a GPU for each of 3 rank(s) on this host, got 2 GPU(s)"),
        (2, "cuda", "nccl", 3, "pass device='cuda:0' and backend='gloo' to share one"),
        (0, None, "nccl", 1, "expected a GPU for each of 1 rank(s) on this host, got 0 GPU(s)"),
        (2, "cuda:2", "gloo", 1, "device='cuda:2': expected a GPU of this host, which has 2"),
        (2, "cpu", "nccl", 1, "device='cpu' with backend='nccl'"),
        (2, "cuda:0", "shm", 2, "which exchanges host memory: pass backend='nccl', or 'gloo'"),
        (2, "mps", None, 1, "device='mps': expected 'cpu', 'cuda' (a GPU per local rank) or 'cuda:N'"),
        (2, "gpu", None, 1, "device='gpu': expected 'cpu'"),
    ],
)
def test_the_device_follows_from_what_there_is_and_what_is_asked(
    num_gpus, wanted, backend, num_local, expected, monkeypatch
):
    monkeypatch.setattr(device, "num_gpus", lambda: num_gpus)
    if " " in expected:
        with pytest.raises(ValueError, match=re.escape(expected)):
            resolve(wanted, backend, num_local)
    else:
        assert resolve(wanted, backend, num_local) == torch.device(expected)


def test_a_rank_activates_its_own_gpu_or_the_one_that_is_named(monkeypatch):
    activated: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", activated.append)
    assert activate(torch.device("cuda"), 1) == activate(GPU, 0) == GPU
    assert activate(CPU, 1) == CPU
    assert activated == [GPU, GPU]


@pytest.mark.parametrize(
    ("version", "switch", "allowed"), [(22809, "1", False), (23007, "1", True), (23007, "0", False)]
)
def test_nccl_shares_a_gpu_from_version_2_30_if_told_to(version, switch, allowed, monkeypatch):
    library = SimpleNamespace(ncclGetVersion=lambda found: setattr(found._obj, "value", version))
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: library)
    assert device.nccl_shares_gpus({"NCCL_MULTI_RANK_GPU_ENABLE": switch}) == allowed


def test_gpus_get_nccl_with_gloo_beside_it_one_host_shared_memory_and_others_gloo():
    assert [default_backend(GPU, one_host=one_host) for one_host in (True, False)] == ["nccl", "nccl"]
    assert [default_backend(CPU, one_host=one_host) for one_host in (True, False)] == ["shm", "gloo"]
    assert (complete("gloo"), complete("nccl")) == ("gloo", "cpu:gloo,cuda:nccl")
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


def test_a_wait_on_the_cpu_lasts_as_long_as_it_is_told_and_may_end_just_when_its_time_is_up():
    work = Under("goes on", "goes on", "done")
    assert [done_within(work, 0.2, on_gpu=False) for _ in range(3)] == [False, False, True]
    assert work.waits == [0.2, 0.2, 0.2]
    assert done_within(Under("late", "done"), 0.2, on_gpu=False) is True
    for script in (("fails",), ("late", "fails")):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            done_within(Under(*script), 0.2, on_gpu=False)


class Polled(Under):
    """Work on a GPU, where a wait that times out counts as the failure of the operation."""

    def is_completed(self) -> bool:
        self.state = self._next()
        return super().is_completed()


def test_work_on_a_gpu_is_polled_until_it_is_done_and_then_waited_for_once():
    work = Polled("goes on", "goes on", "done")
    assert done_within(work, 60, on_gpu=True)
    assert work.waits == [None]
    work, began = Polled("goes on"), time.monotonic()
    assert not done_within(work, 0.02, on_gpu=True)
    assert time.monotonic() - began >= 0.02
    assert work.waits == []


US, MS, S, HOUR = 1_000, 1_000_000, 1_000_000_000, 3600 * 1_000_000_000
LATENCY_NS = 6 * US  # of an event on an idle stream


@dataclass
class Gpu:
    """A GPU whose streams work off what is issued, and whose clock is not the host's: times in host ns."""

    now_ns: int = 10**15
    drift: float = 0.0  # how much faster its clock goes
    streams: list[FakeStream] = field(default_factory=list)
    events: int = 0
    waits: int = 0
    capturing: bool = False

    def now(self) -> int:
        """Reading the host's clock takes a while."""
        self.now_ns += 50
        return self.now_ns

    def sleep(self, ns: int) -> None:
        self.now_ns += ns

    @property
    def computing(self) -> FakeStream:
        return self.streams[0]

    def clock_ms(self, host_ns: int) -> float:
        return 123456.0 + (host_ns - 10**15) * (1 + self.drift) / 1e6


@dataclass
class FakeStream:
    gpu: Gpu
    busy_until_ns: int = 0

    def compute(self, ns: int) -> tuple[int, int]:
        """Issue work that takes ``ns``; when it will really run."""
        start = max(self.gpu.now_ns, self.busy_until_ns)
        self.busy_until_ns = start + ns
        return start, self.busy_until_ns


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    class FakeEvent:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing
            gpu.events += 1

        def record(self, stream: FakeStream) -> None:
            assert not gpu.capturing
            gpu.sleep(2 * US)
            self.over_ns = max(gpu.now_ns + LATENCY_NS, stream.busy_until_ns)

        def query(self) -> bool:
            assert not gpu.capturing
            gpu.sleep(US)
            return gpu.now_ns >= self.over_ns

        def synchronize(self) -> None:
            gpu.now_ns = max(gpu.now_ns, self.over_ns)
            gpu.sleep(5 * MS if gpu.waits == 0 else 3 * US)  # the first time, waking up takes longer
            gpu.waits += 1

        def elapsed_time(self, later: FakeEvent) -> float:
            assert gpu.now_ns >= max(self.over_ns, later.over_ns), "device not ready"
            ms = gpu.clock_ms(later.over_ns) - gpu.clock_ms(self.over_ns)
            assert ms >= 0
            return struct.unpack("f", struct.pack("f", ms))[0]

    def stream(*_: object) -> FakeStream:
        gpu.streams.append(FakeStream(gpu))
        return gpu.streams[-1]

    stream()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: gpu.computing)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    return gpu


@pytest.fixture
def marks(gpu: Gpu) -> Marks:
    return Marks(CUDA, gpu.now)


def span(gpu: Gpu, marks: Marks, what: object, ns: int) -> tuple[int, int]:
    """Issue work of ``ns`` and mark it; when it really runs."""
    begun = marks.begin()
    ran = gpu.computing.compute(ns)
    marks.end(begun, what)
    return ran


def near(found: int, expected: int, ns: int = 10 * US) -> bool:
    return abs(found - expected) <= ns


def test_spans_lie_where_the_gpu_worked_and_are_reported_once_they_are_over(gpu, marks):
    gpu.computing.compute(30 * MS)  # something before them
    ran = {name: span(gpu, marks, name, 10 * MS) for name in ("forward", "backward", "update")}
    found = []
    for _ in range(14):
        found.append(marks.settled())
        gpu.sleep(5 * MS)
    assert max(map(len, found)) == 1 and found[0] == []
    spans = [span for some in found for span in some]
    assert [what for what, *_ in spans] == list(ran)
    for what, start_ns, end_ns in spans:
        assert near(start_ns, ran[what][0]) and near(end_ns, ran[what][1])
        assert near(end_ns - start_ns, 10 * MS, 1 * US)


@pytest.mark.parametrize("drift", [-80e-6, 0.0, 80e-6])
def test_after_hours_spans_still_lie_where_they_were(gpu, marks, drift):
    gpu.drift = drift
    began, worst, last_end = gpu.now_ns, 0, 0
    draw = random.Random(0)
    while gpu.now_ns < began + 3 * HOUR:
        start, end = span(gpu, marks, "forward", 7 * MS)
        gpu.sleep(draw.randrange(100 * MS, 900 * MS))
        [(_, start_ns, end_ns)] = marks.settled()
        worst = max(worst, abs(start_ns - start), abs(end_ns - end))
        assert near(end_ns - start_ns, end - start, 10 * US)
        assert start_ns > last_end
        last_end = end_ns
    # A GPU's clock that went alone would be 0.86 s off by now.
    assert worst < 80e-6 * 2 * S + 20 * US


def test_nothing_is_marked_or_asked_while_a_graph_is_captured(gpu, marks):
    span(gpu, marks, "before", MS)
    gpu.sleep(2 * S)
    gpu.capturing = True
    assert marks.begin() is None
    assert marks.settled() == []
    gpu.capturing = False
    assert [what for what, *_ in marks.settled()] == ["before"]
