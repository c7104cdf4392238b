"""Worlds for measurements: ranks on this host, several ways to do a thing timed alternately, results as JSON.

Two things are compared within one run, A, B, A, B, ..., by the same processes: what disturbs the machine for
longer than a sample disturbs both. Every sample begins with a barrier; how long it took is what the slowest
rank says.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from instep.mesh.join import init
from instep.mesh.launch import launch

# A rank's part: its result, which has to survive JSON, from its world and what it was told.
Body = Callable[["World", dict[str, Any]], Any]

CALLS_TAKE_S = 2e-3  # a sample of something shorter is the mean of several calls
MOST_CALLS = 50
LONG_S = 0.05
FEWEST_SAMPLES = 3


class World:
    """One rank's side of a measurement: who it is, a group for agreeing, and a group per backend."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._groups: dict[tuple[str, str], ProcessGroup] = {}
        self._start = torch.zeros(1)

    def group(self, backend: str, user: str = "") -> ProcessGroup:
        """``user``'s group of all ranks over ``backend``; made at the first call, collectively."""
        if (backend, user) not in self._groups:
            pg = dist.new_group(backend=backend)
            assert isinstance(pg, ProcessGroup)
            self._groups[backend, user] = pg
        return self._groups[backend, user]

    def barrier(self) -> None:
        """Returns on all ranks at nearly the same time."""
        dist.all_reduce(self._start)

    def slowest(self, seconds: float) -> float:
        """The greatest of the ranks' ``seconds``, on all of them."""
        found = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()

    def say(self, text: str) -> None:
        """A line of progress, from rank 0."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

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
        times are this rank's; ``merge`` takes the slowest of all. Things that would take longer than
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
        return (time.perf_counter() - start) / calls


def on_ranks(body: Body, told: Mapping[str, Any], *, ranks: int) -> list[Any]:
    """What ``body(world, told)`` returned on each of ``ranks`` new processes of one thread each, by rank.

    Raises:
        ValueError: fewer than two ranks: there is nothing to talk about.
        RankFailed: a rank failed.
    """
    if ranks < 2:
        raise ValueError(f"expected at least 2 ranks, got {ranks}: one has nobody to talk to")
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as directory:
        launch(_rank, (body, json.dumps(told), directory), ranks=ranks)
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank(body: Body, told: str, directory: str) -> None:
    mesh = init(backend="gloo")
    result = body(World(), json.loads(told))
    (Path(directory) / f"{mesh.rank}.json").write_text(json.dumps(result))
    mesh.close()


def merge(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Sample by sample, the time of the slowest rank."""
    return [max(times) for times in zip(*by_rank, strict=True)]
