"""The variants of a step that are compared: instep's strategies, torch's DDP, and the baselines.

    naive flat overlap bucketed    ``instep.DataParallel``, over gloo and over shared memory
    unordered                      bucketed with ``ordered=False``: the backend's all-reduce adds
    server                         ``instep.ParameterServer``
    threads                        ``instep.ThreadedReplicas``: rank 0 alone, with the batches of all ranks
    threads-declared               the same, a micro-batch per thread, which the loop declares
    stage1                         ``DataParallel`` and ``ShardedOptimizer``: the optimizer's state sharded
    stage2 stage3                  ``fully_shard``: the gradients too, the weights too
    DDP                            torch's ``DistributedDataParallel``, as it comes
    ...-declared                   the same in a declared step, of a micro-batch per rank
    DDP-gloo-float16               the same with torch's hook, which has gradients travel in that format
    none                           as many processes at once, and no synchronisation: the baseline
    alone                          rank 0 steps, the others wait: what one rank could do with the machine
    one                            the same, with the batches of all ranks, one after the other

Many variants are in one process at a time, so that they can take turns, and memory is what there is
least of. They share the memory of the weights: each has a copy of the module whose parameters are other
objects, with hooks and gradients of their own, over the same storage. Plain SGD has no moments, and with a
step size of zero it reads and writes all weights without changing a bit of them; so does AdamW without decay.
So no variant disturbs another, every step of every variant computes the same numbers, and what remains per
variant is its gradients, and moments if the optimizer has some.

Only the variants that shard move their weights, so each of those has weights of its own. They begin with the
values that all variants have, and in stage 3 no rank is given all of them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional as F
from torch.optim import Optimizer

from instep.bench.thread_clock import ThreadClock
from instep.bench.workloads import MLPConfig, Workload
from instep.bench.worlds import World
from instep.events import Recorder
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.replicate.server import ParameterServer
from instep.replicate.threads import ThreadedReplicas
from instep.replicate.wrapper import DataParallel
from instep.rng.keys import initialize
from instep.shard.fully import fully_shard
from instep.shard.optimizer import ShardedOptimizer
from instep.shm import ShmGroup
from instep.shm.segment import available
from instep.step.micro_batches import MicroBatch

BUCKET_MB = 25.0
DDP_HOOKS = {"float16": fp16_compress_hook}  # that of bfloat16 refuses CPUs
SEED = 0  # of the weights of all variants


class SharedModel:
    """What the variants on one rank share: a world, the weights, this rank's batch."""

    def __init__(self, world: World, workload: Workload) -> None:
        torch.manual_seed(0)
        self.world, self.workload = world, workload
        if workload.mlp:  # what goes in, and what should come out
            batches = torch.randn(world.size, workload.batch, 2 * workload.mlp.width)
        else:
            batches = torch.randint(workload.vocab, (world.size, workload.batch, workload.tokens + 1))
        self.batch = batches[world.rank].to(world.device)
        self.batches = batches.flatten(0, 1)

    def first(self, size: int) -> SharedModel:
        """The same weights and batch, for variants of the first ``size`` ranks."""
        smaller = copy.copy(self)
        smaller.module, smaller.world = self.module, self.world.first(size)
        return smaller

    @cached_property
    def module(self) -> nn.Module:
        """The weights that variants share, made when the first of them needs some."""
        return full_model(self.workload.model).to(self.world.device)

    @property
    def optimizer(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """Class and options."""
        if self.workload.optimizer == "sgd":
            return torch.optim.SGD, {"lr": 0.0}
        return torch.optim.AdamW, {"lr": 0.0, "weight_decay": 0.0, "fused": True}

    def copy(self, *, checkpoint: bool = False) -> nn.Module:
        """The module with parameters of its own over the shared storage.

        Each counts its own writes, as ``.detach()`` would not: to a model whose weights a variant writes on
        one rank alone, replicas would seem to differ, and it would hash them all.
        """
        parameters = {id(p): nn.Parameter(p.data) for p in self.module.parameters()}
        module = copy.deepcopy(self.module, parameters)
        if isinstance(module, GPT):
            module.config = replace(module.config, checkpoint=checkpoint)
        return module

    def loss(self, model: Callable[[Tensor], Tensor], batch: Tensor, *, autocast: str = "off") -> Tensor:
        """Mean cross-entropy of the next byte; of an MLP the mean squared error."""
        if (mlp := self.workload.mlp) is not None:
            return F.mse_loss(model(batch[:, : mlp.width]), batch[:, mlp.width :])
        with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=autocast == "bf16"):
            logits = model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


class TrainingLoop:
    """The ordinary training loop around ``model``; ``step`` is what is timed.

    ``recorder`` holds what instep has recorded of it, if anything; ``forward_s`` is the time of the last
    forward (on a GPU: until it is issued), ``guard_s`` that of the hooks which instep has around every
    optimizer step.
    """

    def __init__(
        self,
        shared: SharedModel,
        model: nn.Module,
        batch: Tensor | None = None,
        optimizer: Optimizer | None = None,
        autocast: str = "off",
    ) -> None:
        self.shared = shared
        self.model = model
        self.autocast = autocast
        self.batch = shared.batch if batch is None else batch
        self.recorder: Recorder | None = getattr(model, "recorder", None)
        kind, options = shared.optimizer
        self.optimizer = optimizer or kind(model.parameters(), **options)
        self.forward_s = self.guard_s = 0.0
        self._times: list[float] = []
        # torch calls the hooks of all optimizers before those of one, and after the step the other way round.
        self.optimizer.register_step_pre_hook(self._now)
        self.optimizer.register_step_post_hook(self._now)

    def step(self) -> None:
        began = time.perf_counter()
        loss = self.shared.loss(self.model, self.batch, autocast=self.autocast)
        self.forward_s = time.perf_counter() - began
        loss.backward()
        self._update()

    def _update(self) -> None:
        self._times = [time.perf_counter()]
        self.optimizer.step()
        self._now()
        called, checked, updated, returned = self._times
        self.guard_s = checked - called + returned - updated
        self.optimizer.zero_grad()

    def _now(self, *ignored: Any) -> None:
        self._times.append(time.perf_counter())


class AccumulationLoop(TrainingLoop):
    """One process makes the step of all ranks: their batches one after the other, then one update."""

    def __init__(self, shared: SharedModel) -> None:
        super().__init__(shared, shared.copy(), shared.batches)

    def step(self) -> None:
        W = self.shared.world.size
        for batch in self.batch.chunk(W):
            (self.shared.loss(self.model, batch) / W).backward()
        self._update()


class DeclaredLoop(TrainingLoop):
    """The loop of a declared step: each rank has the micro-batch that is its batch in the other loops."""

    def __init__(self, shared: SharedModel, model: DataParallel) -> None:
        super().__init__(shared, model)
        self.declare = model.micro_batches
        self.batches = shared.batches.to(shared.world.device).chunk(shared.world.size)

    def step(self) -> None:
        for micro_batch in self.declare(len(self.batches)):
            self.shared.loss(self.model, self.batches[micro_batch.index]).backward()
        self._update()


class DeclaredThreadsLoop(TrainingLoop):
    """The same by threads: each replica has forward and backward of its micro-batch to itself."""

    def __init__(self, shared: SharedModel) -> None:
        self.replicas = replicas_of(shared)
        super().__init__(shared, self.replicas, shared.batches)

    def step(self) -> None:
        W = self.shared.world.size
        batches = self.batch.chunk(W)

        def body(model: nn.Module, micro_batch: MicroBatch) -> None:
            self.shared.loss(model, batches[micro_batch.index]).backward()

        self.replicas.micro_batches(W, body)
        self._update()


class ServerLoop:
    """The loop around a parameter server, whose optimizer steps on rank 0 alone."""

    forward_s = guard_s = 0.0

    def __init__(self, shared: SharedModel, backend: str) -> None:
        module = shared.copy()
        kind, options = shared.optimizer
        optimizer = kind(module.parameters(), **options)
        self.shared = shared
        self.server = ParameterServer(module, optimizer, shared.world.group(backend))
        self.recorder: Recorder | None = self.server.recorder

    def step(self) -> None:
        self.shared.loss(self.server, self.shared.batch).backward()
        self.server.step()


class Unavailable(RuntimeError):
    """A variant that cannot run here; the text says why."""


class IdleRank:
    """A rank that has no part in a variant."""

    recorder: Recorder | None = None
    forward_s = guard_s = 0.0

    def step(self) -> None:
        pass


Runner = TrainingLoop | ServerLoop | IdleRank


SHARD_STAGES: Mapping[str, int] = {"stage1": 1, "stage2": 2, "stage3": 3}


def replicas_of(shared: SharedModel) -> ThreadedReplicas:
    """As many threads as there are ranks, of which the others are idle; it is recorded what they waited."""
    replicas = ThreadedReplicas(shared.copy(), shared.world.size, alone=True)
    replicas.recorder = ThreadClock()
    return replicas


def new_model(config: GPTConfig | MLPConfig) -> nn.Module:
    """A model with whatever values torch gives it."""
    if isinstance(config, GPTConfig):
        return GPT(config)
    layers = [nn.Linear(config.width, config.width) for _ in range(config.layers)]
    between = [nn.ReLU() for _ in layers[1:]]
    return nn.Sequential(
        *(module for pair in zip(layers, between, strict=False) for module in pair), layers[-1]
    )


def full_model(config: GPTConfig | MLPConfig) -> nn.Module:
    """A model with the first values, which are the same for all variants, and on all ranks."""
    if isinstance(config, GPTConfig):
        module: nn.Module = GPT(config)
        initialize(module, SEED)
        return module
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return new_model(config)


def sharded_model(
    stage: int,
    config: GPTConfig,
    group: ProcessGroup,
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    device: torch.device | None = None,
) -> tuple[Any, ShardedOptimizer]:
    """A model of its own and its optimizer, divided among the ranks of ``group``. Collective."""
    device = device or torch.device("cpu")
    if stage == 3:
        with torch.device("meta"):
            module: nn.Module = GPT(config)
        model: Any = fully_shard(module, group, stage=3, device=device)
        model.materialise(seed=SEED)
    elif stage == 2:
        model = fully_shard(full_model(config).to(device), group, stage=2)
    else:
        model = DataParallel(full_model(config).to(device), process_group=group, init_sync=False)
    return model, ShardedOptimizer(model.parameters(), optimizer, group, **options)


@dataclass(frozen=True)
class Variant:
    """``strategy`` over ``backend`` ("" where nothing is communicated), as one line of a table."""

    strategy: str
    backend: str = ""
    bucket_mb: float | None = None  # where it is not the default
    checkpoint: bool = False  # blocks are computed again in backward
    autocast: str = "off"
    declared: bool = False  # the loop declares its step
    format: str = ""  # of what travels, where it is not the gradients' own

    @property
    def name(self) -> str:
        size = "" if self.bucket_mb is None else f"{self.bucket_mb:g}MB"
        again = "checkpoint" if self.checkpoint else ""
        dtype = "" if self.autocast == "off" else self.autocast
        declared = "declared" if self.declared else ""
        return "-".join(
            filter(None, (self.strategy, size, self.backend, again, dtype, declared, self.format))
        )

    @property
    def stage(self) -> int:
        """What is divided; of stage 0 nothing."""
        return SHARD_STAGES.get(self.strategy, 0)

    @property
    def words(self) -> set[str]:
        """By which it can be chosen."""
        if self.declared or self.format:
            return {self.name, self.format or "declared"}
        return {self.strategy, self.name, *(["sharded"] if self.stage else [])}

    @property
    def label(self) -> str:
        """The strategy, and what is not the default about it."""
        if self.stage:
            return f"stage {self.stage}"
        size = "" if self.bucket_mb is None else f"{self.bucket_mb:g} MB"
        strategy = "bucketed unordered" if self.strategy == "unordered" else self.strategy
        declared = "declared" if self.declared else ""
        return " ".join(filter(None, (strategy, size, declared, self.format)))

    def copies(self, ranks: int) -> int:
        """How many times the bytes of the weights a rank keeps for it, but for moments: buckets, weights."""
        kept = {
            **dict.fromkeys(("none", "alone", "one"), 0),
            "flat": 2,
            "server": 1 + ranks,
            "threads": ranks,
            "threads-declared": 2 * ranks,
        }
        return kept.get(self.strategy, 1) + (self.stage > 0)

    def start(self, shared: SharedModel) -> Runner:
        """Set it up on this rank. Collective.

        Raises:
            Unavailable: it cannot run here; on all ranks alike.
        """
        world = shared.world
        if self in ON_RANK_0 and world.rank != 0:
            return IdleRank()
        match self.strategy:
            case "none" | "alone":
                return TrainingLoop(shared, shared.copy())
            case "threads":
                return TrainingLoop(shared, replicas_of(shared), shared.batches)
            case "threads-declared":
                return DeclaredThreadsLoop(shared)
            case "one":
                return AccumulationLoop(shared)
            case "server":
                return ServerLoop(shared, self.backend)
        if self.backend == "shm" and not available():
            raise Unavailable("this platform has no backend shm")
        if self.stage:
            if shared.workload.mlp:
                raise Unavailable("a model that is divided among ranks has to be a GPT")
            kind, options = shared.optimizer
            group = world.group(self.backend)
            model, optimizer = sharded_model(
                self.stage, shared.workload.config, group, kind, options, world.device
            )
            self._require_shm(model, world)
            return TrainingLoop(shared, model, optimizer=optimizer)
        module = self._wrap(shared.copy(checkpoint=self.checkpoint), world)
        if self.declared:
            assert isinstance(module, DataParallel)
            return DeclaredLoop(shared, module)
        return TrainingLoop(shared, module, autocast=self.autocast)

    def _wrap(self, module: nn.Module, world: World) -> nn.Module:
        group = world.group(self.backend)
        if self.strategy == "DDP":
            ddp = nn.parallel.DistributedDataParallel(
                module, process_group=group, init_sync=False, bucket_cap_mb=self.bucket_mb
            )
            if self.format:
                ddp.register_comm_hook(group, DDP_HOOKS[self.format])
            return ddp
        nodes: dict[str, Any] = {"nodes": self.format} if self.format else {}
        model = DataParallel(
            module,
            process_group=group,
            strategy="bucketed" if self.strategy == "unordered" else self.strategy,
            ordered=self.strategy != "unordered",
            bucket_cap_mb=self.bucket_mb or BUCKET_MB,
            init_sync=False,
            **nodes,
        )
        self._require_shm(model, world)
        return model

    def _require_shm(self, model: Any, world: World) -> None:
        """Where the ranks share no memory, a group of "shm" is one of gloo: a time under a wrong name."""
        if self.backend == "shm" and world.size > 1 and not isinstance(model.group.pg, ShmGroup):
            raise Unavailable("these ranks do not exchange gradients through shared memory")


NONE, ALONE, ONE = Variant("none"), Variant("alone"), Variant("one")
THREADS, DECLARED_THREADS = Variant("threads"), Variant("threads-declared")
ON_RANK_0 = {ALONE, ONE, THREADS, DECLARED_THREADS}
DDP = Variant("DDP", "gloo")
OURS = ("naive", "flat", "overlap", "bucketed")
# On one host.
HOST_VARIANTS = (
    NONE,
    ALONE,
    DDP,
    *(Variant(strategy, "gloo") for strategy in (*OURS, "unordered", "server")),
    Variant("DDP", "shm"),
    *(Variant(strategy, "shm") for strategy in (*OURS, "unordered")),
    THREADS,
)
# On one host: the ways to divide a step among workers.
WORKER_VARIANTS = (
    ONE,
    THREADS,
    DECLARED_THREADS,
    NONE,
    DDP,
    Variant("bucketed", "gloo"),
    Variant("bucketed", "shm"),
)
# On one host, if they are asked for: each needs memory for weights of its own.
SHARDED_VARIANTS = (
    *(Variant(strategy, backend) for backend in ("gloo", "shm") for strategy in SHARD_STAGES),
)
# On one host, if they are asked for.
DECLARED_VARIANTS = tuple(
    Variant(strategy, backend, declared=True)
    for backend in ("gloo", "shm")
    for strategy in ("flat", "bucketed")
)
# Over a link. The smaller buckets are near the best size, S sqrt(latency / backward).
LINK_VARIANTS = (
    NONE,
    DDP,
    Variant("DDP", "gloo", 4),
    *(Variant(strategy, "gloo") for strategy in OURS),
    Variant("bucketed", "gloo", 4),
    Variant("server", "gloo"),
)
BASELINES = {NONE, ALONE, DDP}


def over(backend: str, variants: Sequence[Variant]) -> list[Variant]:
    """Of ``variants`` those over ``backend``, and what they are held against.

    On GPUs, with "nccl", all that go over gloo on CPUs, but no threads: those share one device.
    """
    if backend != "nccl":
        return [one for one in variants if one.backend in ("", backend) or one in BASELINES]
    return [
        replace(one, backend="nccl") if one.backend else one
        for one in variants
        if one.backend in ("", "gloo") and one.strategy != "threads"
    ]


def choose(
    all_of_them: Sequence[Variant], words: Sequence[str], more: Sequence[Variant] = ()
) -> list[Variant]:
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
    return [one for one in (*all_of_them, *more) if one in BASELINES or one.words & set(words)]
