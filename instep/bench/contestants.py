"""Who takes part when steps are compared: instep's strategies, torch's DDP, and what to hold them against.

    naive flat overlap bucketed    ``instep.DataParallel``, over gloo and over shared memory
    unordered                      bucketed with ``ordered=False``: the backend's all-reduce adds
    server                         ``instep.ParameterServer``
    threads                        ``instep.ThreadedReplicas``: rank 0 alone, with the batches of all ranks
    stage1 stage2 stage3           what each rank holds a part of, with weights of their own (``sharded``)
    DDP                            torch's ``DistributedDataParallel``, as it comes
    none                           as many processes at once, and no synchronisation: the baseline
    alone                          rank 0 steps, the others wait: what one rank could do with the machine
    wire, latency                  no step: an all-reduce of as many bytes as the gradients have, of 4 bytes

Many contestants are in one process at a time, so that they can take turns, and memory is what there is
least of. They share the memory of the weights: each has a copy of the module whose parameters are other
objects, with hooks and gradients of their own, over the same storage. Plain SGD has no moments, and with a
step size of zero it reads and writes all weights without changing a bit of them; so does AdamW without decay.
So nobody disturbs anybody, every step of every contestant computes the same numbers, and what remains per
contestant is its gradients, and moments if the optimizer has some.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from instep.bench.ranks import World
from instep.bench.settings import Setting
from instep.bench.sharded import KINDS, Kind, shard, whole
from instep.events import Recorder
from instep.replicate.server import ParameterServer
from instep.replicate.threads import ThreadedReplicas
from instep.replicate.wrapper import DataParallel
from instep.shm import ShmGroup
from instep.shm.futex import available

BUCKET_MB = 25.0
NUM_LATENCIES = 10


class Stage:
    """What the contestants of one rank share: a world, the weights, this rank's batch."""

    def __init__(self, world: World, setting: Setting) -> None:
        torch.manual_seed(0)
        self.world, self.setting = world, setting
        batches = torch.randint(256, (world.size, setting.batch, setting.tokens + 1))
        self.batch = batches[world.rank]
        self.batches = batches.flatten(0, 1)

    @cached_property
    def module(self) -> nn.Module:
        """The weights that contestants share, made when the first of them wants some."""
        return whole(self.setting.config)

    @property
    def optimizer(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """Class and options."""
        if self.setting.optimizer == "sgd":
            return torch.optim.SGD, {"lr": 0.0}
        return torch.optim.AdamW, {"lr": 0.0, "weight_decay": 0.0, "fused": True}

    def copy(self) -> nn.Module:
        """The module with parameters of its own over the shared storage."""
        parameters = {id(p): nn.Parameter(p.detach()) for p in self.module.parameters()}
        return copy.deepcopy(self.module, parameters)

    def loss(self, model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte."""
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Loop:
    """The ordinary training loop around ``model``; ``step`` is what is timed.

    ``recorder`` holds what instep has recorded of it, if anything; ``forward_s`` is the time of the last
    forward, ``guard_s`` that of the hooks which instep has around every optimizer step.
    """

    def __init__(
        self,
        stage: Stage,
        model: nn.Module,
        batch: Tensor | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.stage = stage
        self.model = model
        self.batch = stage.batch if batch is None else batch
        self.recorder: Recorder | None = getattr(model, "recorder", None)
        kind, options = stage.optimizer
        self.optimizer = optimizer or kind(model.parameters(), **options)
        self.forward_s = self.guard_s = 0.0
        self._times: list[float] = []
        # torch calls the hooks of all optimizers before those of one, and after the step the other way round.
        self.optimizer.register_step_pre_hook(self._now)
        self.optimizer.register_step_post_hook(self._now)

    def step(self) -> None:
        began = time.perf_counter()
        loss = self.stage.loss(self.model, self.batch)
        self.forward_s = time.perf_counter() - began
        loss.backward()
        self._times = [time.perf_counter()]
        self.optimizer.step()
        self._now()
        called, checked, updated, returned = self._times
        self.guard_s = checked - called + returned - updated
        self.optimizer.zero_grad()

    def _now(self, *ignored: Any) -> None:
        self._times.append(time.perf_counter())


class Serve:
    """The loop around a parameter server, whose optimizer steps on rank 0 alone."""

    forward_s = guard_s = 0.0

    def __init__(self, stage: Stage, backend: str) -> None:
        module = stage.copy()
        kind, options = stage.optimizer
        optimizer = kind(module.parameters(), **options)
        self.stage = stage
        self.server = ParameterServer(module, optimizer, stage.world.group(backend), init_sync=False)
        self.recorder: Recorder | None = self.server.recorder

    def step(self) -> None:
        self.server.backward_and_step(self.stage.loss(self.server.module, self.stage.batch))


class Transfer:
    """No step at all: ``times`` all-reduces of ``num_bytes``."""

    recorder: Recorder | None = None
    forward_s = guard_s = 0.0

    def __init__(self, stage: Stage, num_bytes: int, times: int = 1) -> None:
        self.x = torch.zeros(num_bytes // 4)
        self.group = stage.world.group("gloo")
        self.times = times

    def step(self) -> None:
        for _ in range(self.times):
            dist.all_reduce(self.x, group=self.group)


class Absent(RuntimeError):
    """A contestant that cannot take part here; the text says why."""


class Idle:
    """A rank that has no part in it."""

    recorder: Recorder | None = None
    forward_s = guard_s = 0.0

    def step(self) -> None:
        pass


Player = Loop | Serve | Transfer | Idle


@dataclass(frozen=True)
class Contestant:
    """``strategy`` over ``backend`` ("" where nothing is communicated), as one line of a table."""

    strategy: str
    backend: str = ""
    bucket_mb: float | None = None  # where it is not the default

    @property
    def name(self) -> str:
        size = "" if self.bucket_mb is None else f"{self.bucket_mb:g}MB"
        return "-".join(filter(None, (self.strategy, size, self.backend)))

    @property
    def kind(self) -> Kind:
        """What is divided; of stage 0 nothing."""
        return KINDS.get(self.strategy, Kind(0))

    @property
    def words(self) -> set[str]:
        """By which it can be chosen."""
        return {self.strategy, self.name, *(["sharded"] if self.kind.stage else [])}

    @property
    def label(self) -> str:
        """The strategy, and what is not the default about it."""
        if self.kind.stage:
            return self.kind.label
        size = "" if self.bucket_mb is None else f" {self.bucket_mb:g} MB"
        return ("bucketed unordered" if self.strategy == "unordered" else self.strategy) + size

    def play(self, stage: Stage) -> Player:
        """Take the place on this rank. Collective.

        Raises:
            Absent: it cannot take part here; on all ranks alike.
        """
        world = stage.world
        if self.strategy in ("alone", "threads") and world.rank != 0:
            return Idle()
        match self.strategy:
            case "none" | "alone":
                return Loop(stage, stage.copy())
            case "threads":
                return Loop(stage, ThreadedReplicas(stage.copy(), world.size), stage.batches)
            case "wire":
                return Transfer(stage, sum(p.nbytes for p in stage.module.parameters()))
            case "latency":
                return Transfer(stage, 4, NUM_LATENCIES)
            case "server":
                return Serve(stage, self.backend)
        if self.backend == "shm" and not available():
            raise Absent("this platform has no backend shm")
        if self.kind.stage:
            kind, options = stage.optimizer
            group = world.group(self.backend)
            model, optimizer = shard(self.kind, stage.setting.config, group, kind, options)
            self._require_shm(model, world)
            return Loop(stage, model, optimizer=optimizer)
        return Loop(stage, self._wrap(stage.copy(), world))

    def _wrap(self, module: nn.Module, world: World) -> nn.Module:
        group = world.group(self.backend)
        if self.strategy == "DDP":
            return nn.parallel.DistributedDataParallel(
                module, process_group=group, init_sync=False, bucket_cap_mb=self.bucket_mb
            )
        model = DataParallel(
            module,
            process_group=group,
            strategy="bucketed" if self.strategy == "unordered" else self.strategy,
            ordered=self.strategy != "unordered",
            bucket_cap_mb=self.bucket_mb or BUCKET_MB,
            init_sync=False,
        )
        self._require_shm(model, world)
        return model

    def _require_shm(self, model: Any, world: World) -> None:
        """Where the ranks share no memory, a group of "shm" is one of gloo: a time under a wrong name."""
        if self.backend == "shm" and world.size > 1 and not isinstance(model.group.pg, ShmGroup):
            raise Absent("these ranks do not exchange gradients through shared memory")


NONE, ALONE = Contestant("none"), Contestant("alone")
WIRE, LATENCY = Contestant("wire", "gloo"), Contestant("latency", "gloo")
DDP = Contestant("DDP", "gloo")
OURS = ("naive", "flat", "overlap", "bucketed")
# On one host.
HOST = (
    NONE,
    ALONE,
    DDP,
    *(Contestant(strategy, "gloo") for strategy in (*OURS, "unordered", "server")),
    Contestant("DDP", "shm"),
    *(Contestant(strategy, "shm") for strategy in (*OURS, "unordered")),
    Contestant("threads"),
)
# On one host, if they are asked for: each needs memory for weights of its own.
SHARDED = (
    *(Contestant(strategy, "gloo") for strategy, kind in KINDS.items() if not kind.one_copy),
    *(Contestant(strategy, "shm") for strategy in KINDS),
)
# Over a link. The smaller buckets are near the best size, S sqrt(latency / backward).
LINK = (
    NONE,
    WIRE,
    LATENCY,
    DDP,
    Contestant("DDP", "gloo", 4),
    *(Contestant(strategy, "gloo") for strategy in OURS),
    Contestant("bucketed", "gloo", 4),
    Contestant("server", "gloo"),
)
ALWAYS = {NONE, ALONE, WIRE, LATENCY, DDP}


def choose(
    all_of_them: Sequence[Contestant], words: Sequence[str], more: Sequence[Contestant] = ()
) -> list[Contestant]:
    """Those whose strategy or name is among ``words``, ``more`` too; and what they are held against.

    If there are no words, ``all_of_them``.

    Raises:
        ValueError: a word that is neither.
    """
    known = {word for one in (*all_of_them, *more) for word in one.words}
    for word in words:
        if word not in known:
            raise ValueError(f"strategy {word!r}: expected one of {', '.join(sorted(known))}")
    if not words:
        return list(all_of_them)
    return [one for one in (*all_of_them, *more) if one in ALWAYS or one.words & set(words)]
