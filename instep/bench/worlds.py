"""Worlds for measurements: ranks on this host or on several, alternating variants, results as JSON.

Two things are compared within one run, A, B, A, B, ..., by the same processes: what disturbs the machine for
longer than a sample disturbs both. Every sample begins with a barrier; how long it took is what the slowest
rank says.

``on_ranks`` forks the ranks of one host, and with "nccl" each has a GPU of its own. A rank on another host
(``on_hosts``, with a network of its own ``over_link``) is an interpreter of its own,
``python -m instep.bench.worlds MODULE:FUNCTION TOLD FOLDER``: it joins the world that its environment
describes, as under torchrun, and writes what the function returned.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import multiprocessing.connection
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from instep.bench.bandwidth import available_bytes
from instep.bench.hosts import RATE, Network, network, require_hosts
from instep.launch.launch import launch
from instep.mesh.join import init
from instep.net.device import complete, gpu_bytes, resolve, synchronize
from instep.record.display import LongWork, live

# A rank's part: its result, which has to survive JSON, from its world and its task.
Body = Callable[["World", dict[str, Any]], Any]

CALLS_TAKE_S = 2e-3  # a sample of something shorter is the mean of several calls
MOST_CALLS = 50
LONG_S = 0.05
FEWEST_SAMPLES = 3
ROUNDS, ROUNDS_S = 20, 50.0  # at most, and seconds for them, where no number of samples was asked for
BEGAN = time.monotonic()  # of the command
WHOLE = 0.0, 1.0
PREFIX = "instep-bench-"  # of folders for the task of the ranks and their results


class World:
    """One rank's side of a measurement: its number and device, a group to agree by, a group per backend."""

    def __init__(self, device: torch.device | None = None, work: LongWork | None = None) -> None:
        self.rank = dist.get_rank()
        self.work = work or LongWork()
        self.work.quiet = self.rank != 0
        self.size = dist.get_world_size()
        self.device = device or torch.device("cpu")
        self._groups: dict[tuple[str, str], ProcessGroup] = {}
        self._start = torch.zeros(1)

    def group(self, backend: str, user: str = "") -> ProcessGroup:
        """``user``'s group of this world, over ``backend``; made at the first call, collectively."""
        if (backend, user) not in self._groups:
            part = self.size < dist.get_world_size()
            pg = dist.new_group(
                list(range(self.size)), backend=complete(backend), use_local_synchronization=part
            )
            assert isinstance(pg, ProcessGroup)
            self._groups[backend, user] = pg
        return self._groups[backend, user]

    def first(self, size: int) -> World:
        """The world of the first ``size`` ranks: groups are theirs, ``barrier`` is still that of all."""
        smaller = copy.copy(self)
        smaller.size, smaller._groups = size, {}
        return smaller

    def barrier(self) -> None:
        """Returns on all ranks at nearly the same time."""
        dist.all_reduce(self._start)

    def slowest(self, seconds: float) -> float:
        """The greatest of the ranks' ``seconds``, on all of them."""
        found = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()

    def say(self, text: str) -> None:
        """A line from rank 0, above the live one."""
        if self.rank == 0:
            live().console.print(text)

    def rounds(self, samples: int, dropped: int) -> Iterator[int]:
        """``dropped`` rounds and then ``samples``, with progress; 0: as many as fit into ``ROUNDS_S``.

        Those are 3 to ``ROUNDS``, the same on all ranks.
        """
        began, number, total = time.monotonic(), 0, dropped + (samples or ROUNDS)
        while number < total:
            self.work.at(number / total, f"round {number} of {total}")
            yield number
            number += 1
            if not samples:
                fit = int(ROUNDS_S * number / self.slowest(time.monotonic() - began))
                total = dropped + min(max(fit - dropped, FEWEST_SAMPLES), ROUNDS)

    def interleave(
        self,
        things: Mapping[str, Callable[[], object]],
        samples: int,
        *,
        warm_up: int = 1,
        budget_s: float = math.inf,
    ) -> tuple[dict[str, list[float]], dict[str, int]]:
        """Seconds per call of each thing, ``samples`` of them, and how many calls each is the mean of.

        Before that, ``warm_up`` calls of each. The things take turns, and each in turn is the first. The
        times are this rank's; ``slowest_rank`` takes the slowest of all. Things that would take longer than
        ``budget_s`` seconds in all get fewer samples, though at least 3.
        """
        trials = {name: self._trial(thing, warm_up) for name, thing in things.items()}
        calls = {name: max(1, min(MOST_CALLS, round(CALLS_TAKE_S / s))) for name, s in trials.items()}
        turn_s = sum(trials[name] * calls[name] for name in things)
        if samples * turn_s > budget_s:
            samples = min(samples, max(FEWEST_SAMPLES, int(budget_s / turn_s)))
        names = list(things)
        times: dict[str, list[float]] = {name: [] for name in names}
        for sample in range(samples):
            shift = sample % len(names)
            for name in names[shift:] + names[:shift]:
                times[name].append(self._sample(things[name], calls[name]))
        return times, calls

    def _trial(self, thing: Callable[[], object], warm_up: int) -> float:
        """About how long one call takes, the same on all ranks: of short ones the least of three."""
        for _ in range(warm_up):
            thing()
        trial = self.slowest(self._sample(thing, 1))
        if trial < LONG_S:
            trial = min(trial, *(self.slowest(self._sample(thing, 1)) for _ in range(2)))
        return trial

    def _sample(self, thing: Callable[[], object], calls: int) -> float:
        self.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            thing()
        synchronize(self.device)
        return (time.perf_counter() - start) / calls


def on_ranks(
    body: Body,
    task: Mapping[str, Any],
    *,
    ranks: int,
    backend: str = "gloo",
    part: tuple[float, float] = WHOLE,
) -> list[Any]:
    """What ``body(world, task)`` returned on each of ``ranks`` new processes of one thread each, by rank.

    With the ``backend`` "nccl" the device of a world is a GPU, else the CPU. ``part``: which share of the
    command this is.

    Raises:
        ValueError: fewer than two ranks: there is nothing to talk about; fewer GPUs than NCCL needs.
        RankFailed: a rank failed.
    """
    if ranks < 2:
        raise ValueError(f"expected at least 2 ranks, got {ranks}: a single rank has no peer")
    if backend == "nccl":
        resolve("cuda", backend, ranks)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
        progress = {"part": part, "began": BEGAN}
        launch(_rank, (body, json.dumps(task), directory, backend, progress), ranks=ranks)
        return [json.loads((Path(directory) / str(rank)).read_text()) for rank in range(ranks)]


def on_hosts(body: Body, task: Mapping[str, Any], *, network: Network, per_host: int = 1) -> list[Any]:
    """What ``body(world, task)`` returned on each of ``per_host`` ranks of each host of ``network``, by rank.

    Raises:
        RuntimeError: a rank failed; the others end with the network.
    """
    path = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
        folder = Path(directory)
        (folder / "task").write_text(json.dumps(task))
        ranks = {}  # pidfd -> rank, process
        try:
            for rank, env in enumerate(network.environments(per_host)):
                name = f"{body.__module__}:{body.__qualname__}"
                command = [sys.executable, "-m", __name__, name, folder / "task", folder]
                host = network.hosts[rank // per_host]
                process = host.popen(command, env={**env, "PYTHONPATH": path})
                ranks[os.pidfd_open(process.pid)] = rank, process
            while ranks:
                for ended in multiprocessing.connection.wait(list(ranks)):
                    assert isinstance(ended, int)
                    rank, process = ranks.pop(ended)
                    os.close(ended)
                    if code := process.wait():
                        raise RuntimeError(f"rank {rank}, on host {rank // per_host}, ended with code {code}")
        finally:
            for pidfd in ranks:
                os.close(pidfd)
        num_ranks = per_host * len(network.hosts)
        return [json.loads((folder / str(rank)).read_text()) for rank in range(num_ranks)]


def over_link(
    body: Body, task: Mapping[str, Any], *, hosts: int, rate: str = RATE, per_host: int = 1
) -> list[Any]:
    """``on_hosts``, on ``hosts`` hosts with ``rate`` between them.

    Raises:
        ValueError: fewer than two hosts, or no rate.
        RuntimeError: this machine cannot have several hosts, or a rank failed.
    """
    if hosts < 2:
        raise ValueError(f"a link has two ends, got {hosts} rank: pass -n 2 or more")
    require_hosts()
    with network(hosts, rate=rate) as made:
        return on_hosts(body, task, network=made, per_host=per_host)


def require_memory(rank_bytes: float, *, ranks: int, backend: str = "gloo", fix: str) -> None:
    """Raise ``ValueError``, which ends with ``fix``, if ranks that take ``rank_bytes`` each will not fit."""
    if backend == "nccl":
        resolve("cuda", backend, ranks)
        needed, available, who, where = rank_bytes, gpu_bytes(), "a rank needs", "on each GPU"
    else:
        needed, available, who, where = (
            ranks * rank_bytes,
            available_bytes(),
            f"{ranks} ranks need",
            "available",
        )
    if needed > available:
        raise ValueError(
            f"{who} about {needed / 1e9:.1f} GB of memory for what they hold, and there are "
            f"{available / 1e9:.1f} GB {where}: {fix}"
        )


def _rank(body: Body, task: str, directory: str, backend: str = "gloo", progress: Any = None) -> None:
    mesh = init(backend="nccl" if backend == "nccl" else "gloo")
    work = LongWork(**(progress or {}))
    result = body(World(mesh.device, work), json.loads(task))
    work.close()
    (Path(directory) / str(mesh.rank)).write_text(json.dumps(result))
    mesh.close()


def slowest_rank(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Sample by sample, the time of the slowest rank."""
    return [max(times) for times in zip(*by_rank, strict=True)]


def main(body: str, task: str, directory: str) -> None:
    """A rank on another host: does what the file ``task`` says."""
    module, _, name = body.partition(":")
    _rank(getattr(importlib.import_module(module), name), Path(task).read_text(), directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
