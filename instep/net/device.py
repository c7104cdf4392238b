"""Where CPU and GPU differ: choosing the device, and ordering a lane's work against the computation.

On a GPU a kernel is only *issued* when Python moves on. A bucket is therefore handed to the lane with an
event recorded on the computing stream; the lane works on a stream of its own that first waits for the
event, and its thread returns when that stream has finished. On a CPU work is done when the call returns, and
all of this does nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

Event = torch.cuda.Event
T = TypeVar("T")
POLL_S = 50e-6
REBASE_NS = 1_000_000_000
NCCL_SHARES_FROM = 23000  # 2.30.0, as NCCL writes it
NO_MESSAGE_TAG = 2**31 - 1
SPIN_NS = 200_000  # many times the duration of an event on an idle stream
MAX_MARKED = 8192  # spans, if ``settled`` is never called


class Waitable(Protocol):
    """The result of torch.distributed for an operation in flight."""

    def wait(self, timeout: timedelta = ...) -> bool: ...
    def is_completed(self) -> bool: ...


def resolve(wanted: str | torch.device | None, backend: str | None, num_local: int) -> torch.device:
    """The device of this host's ``num_local`` ranks: the CPU, one GPU ("cuda:1"), or a GPU each ("cuda").

    By default a GPU each where there are GPUs and ``backend`` reads their memory. Creates no CUDA context.

    Raises:
        ValueError: the backend cannot exchange memory of that device, or there are too few GPUs.
    """
    found = num_gpus()
    if wanted is None:
        wanted = "cuda" if backend == "nccl" or (found and backend not in ("gloo", "shm")) else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(wanted)!r}: expected 'cpu', 'cuda' (a GPU per local rank) or 'cuda:N'")
    if device.type == "cpu":
        if backend == "nccl":
            raise ValueError("device='cpu' with backend='nccl', which exchanges GPU memory: use gloo")
        return torch.device("cpu")
    if backend == "shm":
        raise ValueError(
            f"device={str(device)!r} with backend={backend!r}, which exchanges host memory: pass "
            "backend='nccl', or 'gloo' where ranks share a GPU"
        )
    if device.index is not None and device.index >= found:
        raise ValueError(f"device={str(device)!r}: expected a GPU of this host, which has {found}")
    if device.index is None and num_local > found:
        raise ValueError(
            f"expected a GPU for each of {num_local} rank(s) on this host, got {found} GPU(s): start "
            "as many ranks as GPUs, pass device='cuda:0' and backend='gloo' to share one, or device='cpu'"
        )
    return device


def activate(wanted: torch.device, local_rank: int) -> torch.device:
    """The device of ``local_rank``, made the current one: this creates a CUDA context on a GPU."""
    if wanted.type == "cpu":
        return wanted
    device = torch.device("cuda", local_rank if wanted.index is None else wanted.index)
    torch.cuda.set_device(device)
    return device


def num_gpus() -> int:
    """The number of GPUs that this process sees; creates no CUDA context."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def current_gpu() -> int:
    """A unique number for the GPU that this process computes on; 0 on a CPU."""
    if not torch.cuda.is_initialized():
        return 0
    kind = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(str(kind.uuid).replace("-", "")[-15:], 16) + 1


def nccl_shares_gpus(environ: Mapping[str, str]) -> bool:
    """Whether NCCL accepts several ranks on one GPU: from 2.30, where the environment allows it."""
    if environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return False
    version = ctypes.c_int()  # of the loaded library: torch only knows the one that it was compiled with
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return False
    return version.value >= NCCL_SHARES_FROM


def gpu_names() -> list[str]:
    """The name of each GPU."""
    return [torch.cuda.get_device_name(i) for i in range(num_gpus())]


def gpu_bytes() -> int:
    """The memory of the smallest GPU; 0 where there is none."""
    sizes = (torch.cuda.get_device_properties(i).total_memory for i in range(num_gpus()))
    return min(sizes, default=0)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished all issued work, so that the host's clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int | None:
    """The peak of this process's memory on a GPU; None on a CPU (see ``process_memory``)."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def default_backend(device: torch.device, *, one_host: bool) -> str:
    """The torch.distributed backend for ``device``, on a world that shares a host or does not."""
    if device.type == "cuda":
        return "nccl"
    return "shm" if one_host else "gloo"


def complete(backend: str) -> str:
    """The name of ``backend`` for torch.distributed, with which "shm" is registered here.

    NCCL gets gloo beside it, because it has nothing for CPU tensors, and headers are in CPU memory.
    """
    if backend == "shm":
        _shm()
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def make_group(
    store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta, config: str
) -> dist.ProcessGroup:
    """A process group over ``ranks`` that torch's registry does not know; this one is ``ranks[rank]``.

    ``config`` is a backend, or one per device as in "cpu:gloo,cuda:nccl"; CPU tensors always have one.
    """
    if "shm" in config:
        gloo = _shm().connect(dist.PrefixStore("shm", store), rank, len(ranks), timeout, ranks)
        if isinstance(gloo, dist.ProcessGroup):  # else gloo, because the ranks share no memory
            return gloo
    else:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, len(ranks), timeout)
    pg = dist.ProcessGroup(store, rank, len(ranks))
    kinds = dist.ProcessGroup.BackendType
    pg._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    pg._set_default_backend(kinds.GLOO)
    if not torch.cuda.is_available():
        return pg
    if "nccl" not in config:
        pg._register_backend(torch.device("cuda"), kinds.GLOO, gloo)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda", store), rank, len(ranks), options)
        pg._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return pg


def share_memory(
    store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta
) -> dist.ProcessGroup | None:
    """A process group in shared memory over ``ranks``, of which this is number ``rank``, or None."""
    found: dist.ProcessGroup | None = _shm().share(store, rank, ranks, timeout)
    return found


def _shm() -> Any:
    """The backend "shm", registered; by name, because it is above this file."""
    return importlib.import_module("instep.shm")


def close_connections(pg: dist.ProcessGroup | None) -> None:
    """Close the connections of gloo, so that pending waits fail, which its abort does not do.

    A receive that times out closes the connections to all ranks ("Application timeout caused pair closure",
    gloo/transport/tcp/unbound_buffer.cc), unless its own is closed already.
    """
    if pg is None or shares_memory(pg):
        return
    byte = torch.empty(1, dtype=torch.uint8, device="cpu")
    for other in range(pg.size()):
        if other != pg.rank():
            with suppress(RuntimeError):
                pg.recv([byte], other, NO_MESSAGE_TAG).wait(timedelta(milliseconds=1))


def keep(pgs: Iterable[dist.ProcessGroup]) -> None:
    """Leak ``pgs``: gloo's destructor waits for operations in flight, also for those that never end."""
    for pg in pgs:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pg))


def shares_memory(pg: dist.ProcessGroup | None) -> bool:
    """Whether the ranks of ``pg`` can read and write each other's memory: a group of the backend "shm"."""
    return hasattr(pg, "map_all")


def generators(device: torch.device) -> list[torch.Generator]:
    """The generators that a forward on ``device`` may draw from."""
    own = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *own]


def done_within(work: Waitable, seconds: float, *, on_gpu: bool) -> bool:
    """Wait for ``work`` for some ``seconds``; False if it is not done. Raises the backend's error.

    A wait of gloo can be repeated after it has timed out, and has to be, because the work may end just then.
    NCCL counts a timeout as the failure of the operation, so it is polled, and waited for only when done.
    """
    if not on_gpu:
        try:
            return work.wait(timedelta(seconds=seconds))
        except (RuntimeError, TimeoutError):
            return work.is_completed() and work.wait()
    until = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return work.wait()


def as_here(function: Callable[[], T]) -> Callable[[], T]:
    """``function`` for another thread, on the GPU that is the current one of this thread."""
    if not torch.cuda.is_initialized():
        return function
    index = torch.cuda.current_device()

    def run() -> T:
        torch.cuda.set_device(index)
        return function()

    return run


def fetch(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to copy ``x`` to the host; the returned function waits for this copy alone, and gives it."""
    if x.device.type != "cuda":
        return lambda: x
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.current_stream(x.device).record_event()

    def wait() -> torch.Tensor:
        copied.synchronize()
        return host

    return wait


class Stream:
    """The order between a lane and the computation on ``device``; ``inline``: on the same stream."""

    def __init__(self, device: torch.device, *, inline: bool = False) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and not inline else None
        self.is_used = self._stream is not None

    def computed(self) -> Event | None:
        """Mark the work that the caller has issued so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    @contextmanager
    def after(self, event: Event | None) -> Iterator[None]:
        """Run the block on the lane's stream, after ``event``."""
        if self._stream is None or event is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(event)
            try:
                yield
            finally:  # after an error, too: from here on its memory may go to the computing stream
                self._stream.synchronize()  # in the lane's thread: the computing thread goes on issuing

    def run_after(self, event: Event | None, function: Callable[[], object]) -> None:
        """Call ``function`` on the lane's stream, after ``event``."""
        with self.after(event):
            function()


_Tie = tuple[Event, int]  # a completed event, and its time on the host's clock


class Marks:
    """Start and end of a GPU's work on the host's clock, without waiting for the GPU.

    The constructor waits for an event, which ties the GPU's clock to the host's. ``begin`` and ``end`` record
    an event each on the computing stream, and ``settled`` returns the completed spans:

        host   begin...end....................settled......>     issues, and goes on
        GPU    ...........|=== the span ===|...............>     executes later

    An event only knows its distance from another one, in float32 milliseconds, whose resolution after an hour
    is 0.25 ms, while the two clocks drift apart. So the tie is renewed every ``REBASE_NS``, by an event on an
    idle stream, which the host sees start and end within some ten microseconds.

    ``begin`` and ``end`` are for any thread, ``settled`` for one.
    """

    def __init__(self, device: torch.device, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._device, self._now = device, now
        self._aside = torch.cuda.Stream(device)
        self._free: list[Event] = []
        self._spans: deque[tuple[Any, Event, Event, _Tie]] = deque(maxlen=MAX_MARKED)
        ties = [self._tie() for _ in range(8)]  # the first ones include first-use costs
        _, self._base = min(ties, key=lambda tie: tie[0])
        self._renewal: _Tie | None = None  # in flight, and its time of issue

    def begin(self) -> tuple[Event, _Tie] | None:
        """Mark the position of the computing stream; None during a capture, when events have no time."""
        if torch.cuda.is_current_stream_capturing():
            return None
        base = self._base  # completed before the mark: distances are not negative
        return self._record(torch.cuda.current_stream(self._device)), base

    def end(self, begun: tuple[Event, _Tie], what: Any) -> None:
        """Name the work issued since ``begun``."""
        event, base = begun
        self._spans.append((what, event, self._record(torch.cuda.current_stream(self._device)), base))

    def settled(self) -> list[tuple[Any, int, int]]:
        """The completed spans as (what, start, end) in ns: once each, in the order of ``end``."""
        found: list[tuple[Any, int, int]] = []
        if torch.cuda.is_current_stream_capturing():  # a query would end the capture
            return found
        while self._spans:
            span = self._spans.popleft()
            what, begun, ended, base = span
            if not (ended.query() and begun.query()):
                self._spans.appendleft(span)
                break
            found.append((what, _when_ns(begun, base), _when_ns(ended, base)))
            self._free += begun, ended
        self._renew()
        return found

    def _record(self, stream: torch.cuda.Stream) -> Event:
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _tie(self) -> tuple[int, _Tie]:
        """(width, tie): an event timed midway between its issue and its end, which are ``width`` ns apart."""
        issued_ns = self._now()
        event = self._record(self._aside)
        event.synchronize()
        width_ns = self._now() - issued_ns
        return width_ns, (event, issued_ns + width_ns // 2)

    def _renew(self) -> None:
        """Replace an old base by a new event, timed by the old one, within the bounds that the host saw.

        Where even the idle stream has to wait the bounds are wide, and the GPU's clock counts alone.
        """
        now_ns = self._now()
        if self._renewal is None:
            if now_ns - self._base[1] < REBASE_NS:
                return
            self._renewal = self._record(self._aside), now_ns
        event, issued_ns = self._renewal
        while not event.query():
            if self._now() - issued_ns > SPIN_NS:
                return
        when_ns = min(max(_when_ns(event, self._base), issued_ns), self._now())
        self._base, self._renewal = (event, when_ns), None


def _when_ns(event: Event, base: _Tie) -> int:
    return base[1] + round(base[0].elapsed_time(event) * 1e6)


def marks_for(device: torch.device) -> Marks | None:
    """The timer of work on ``device``; None on a CPU, where work is done when the call returns."""
    return Marks(device) if device.type == "cuda" else None
