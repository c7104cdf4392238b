"""What every recipe is told: a frozen dataclass per topic, and the checks that need no torch. Pure.

A recipe adds its model and its data, and makes one config of all: see ``recipes``. That has two kinds of
fields. Those that ``numerical`` returns may change the bits of the weights; all others say where and how the
same work is done, and must not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args, get_origin

from instep.run.settings import CheckpointConfig, ChecksConfig, LedgerConfig, LogsConfig, TraceConfig
from instep.run.toml import flatten

Range = tuple[str, Callable[[float], bool]]
ABOVE_0: Range = ("a number above 0", lambda number: number > 0)
FROM_0: Range = ("0 or more", lambda number: number >= 0)
STAGES: Range = ("0, 1, 2 or 3", lambda number: number in range(4))
SHARD_RANKS: Range = ("2 or more, or 0 for all ranks", lambda number: number == 0 or number >= 2)
FROM_2: Range = ("2 or more", lambda number: number >= 2)
BELOW_1: Range = ("a number from 0 to below 1", lambda number: 0 <= number < 1)
UP_TO_1: Range = ("a number from 0 to 1", lambda number: 0 <= number <= 1)

RANGES = {
    "ranks": FROM_0,
    "min_ranks": FROM_0,
    "steps": ABOVE_0,
    "seed": FROM_0,
    "stop_after": FROM_0,
    "timeout_s": ABOVE_0,
    "batch.global_size": ABOVE_0,
    "batch.micro_size": ABOVE_0,
    "optim.lr": ABOVE_0,
    "optim.warmup_steps": FROM_0,
    "optim.min_lr_ratio": UP_TO_1,
    "optim.clip": FROM_0,
    "optim.weight_decay": FROM_0,
    "optim.betas": BELOW_1,
    "optim.momentum": BELOW_1,
    "parallel.bucket_mb": ABOVE_0,
    "parallel.threads": ABOVE_0,
    "parallel.shard_stage": STAGES,
    "parallel.shard_ranks": SHARD_RANKS,
    "checkpoint.every": FROM_0,
    "checkpoint.keep": FROM_2,
    "eval.every": FROM_0,
    "checks.max_skipped": FROM_0,
    "checks.spike": FROM_0,
    "checks.skip_steps": FROM_0,
    "checks.replicas_every": FROM_0,
    "checks.leaves_every": FROM_0,
    "ledger.every": FROM_0,
    "trace.events": FROM_0,
}


Scalar = str | int | float | bool

NUMERICAL_TOPICS = ("model", "batch", "optim")
NOT_NUMERICAL = ("model.checkpoint",)  # of these topics: it says when activations are computed, not what
NUMERICAL_NAMES = (
    "seed",
    "steps",
    "autocast",
    "parallel.ordered",
    "parallel.threads",
    "checks.spike",
    "checks.skip_steps",
)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a step's samples are cut: into global-size / micro-size micro-batches, whose gradients are summed
    in a fixed order."""

    global_size: int
    """Samples per optimizer step, over all ranks."""
    micro_size: int
    """Samples per forward and backward."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How gradients become weights."""

    name: Literal["adamw", "sgd"] = "adamw"
    """The optimizer."""
    lr: float
    """Learning rate after warm-up."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """How the learning rate goes on after warm-up, until the last of --steps."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly."""
    min_lr_ratio: float = 0.1
    """Where the cosine ends, as a share of lr."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""
    weight_decay: float = 0.1
    """Decoupled in adamw, added to the gradient in sgd; vectors (norms, biases) are not decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments of adamw."""
    momentum: float = 0.9
    """Momentum of sgd."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks share a step. Only ordered and threads may change the bits."""

    strategy: Literal["naive", "flat", "overlap", "bucketed", "server", "threads"] = "bucketed"
    """How gradients get from the micro-batches to every rank. With server, rank 0 gets them and sends new
    weights; with threads, --ranks are threads of one process."""
    bucket_mb: float = 25.0
    """Size of a bucket of the bucketed strategy, in 2**20 bytes."""
    ordered: bool = True
    """Add in the order of the fixed tree; off: the backend's all-reduce, in whatever order it adds."""
    backend: Literal["auto", "gloo", "shm", "nccl"] = "auto"
    """What carries messages; auto takes nccl where every rank has a GPU, else shm where all ranks share a
    host, else gloo."""
    threads: int = 1
    """Threads per rank on a CPU."""
    shard_stage: int = 0
    """What is divided among the ranks instead of kept by each: 0 nothing, 1 the optimizer's state, 2 the
    gradients too, 3 the weights too. From 2 on, gradients travel block by block."""
    shard_ranks: int = 0
    """How many ranks form a shard group, which divides among its ranks what shard-stage says; every group has
    all of it. 0: all ranks are one group. Best is the number of ranks per host."""
    one_copy: bool = False
    """The ranks of a host, or of a shard group, share one copy of the weights; with shard-stage 1 or 2, on
    the shm backend."""

    @property
    def named_backend(self) -> str | None:
        """The backend, or None where it is to be chosen."""
        return None if self.backend == "auto" else self.backend


class Evaluation(Protocol):
    """When the loss on held-out data is measured; how, a recipe adds."""

    @property
    def every(self) -> int:
        """Steps between two evaluations; 0 evaluates at the end only."""


class RunConfig(Protocol):
    """What the config of every recipe has: what trains by it need not know which recipe it is."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def ranks(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def run_dir(self) -> Path | None: ...

    @property
    def resume(self) -> bool: ...

    @property
    def accept_contract(self) -> bool: ...

    @property
    def min_ranks(self) -> int: ...

    @property
    def fault(self) -> tuple[str, ...]: ...

    @property
    def stop_after(self) -> int: ...

    @property
    def autocast(self) -> Literal["off", "bf16"]: ...

    @property
    def timeout_s(self) -> float: ...

    @property
    def batch(self) -> BatchConfig: ...

    @property
    def optim(self) -> OptimConfig: ...

    @property
    def parallel(self) -> ParallelConfig: ...

    @property
    def checkpoint(self) -> CheckpointConfig: ...

    @property
    def eval(self) -> Evaluation: ...

    @property
    def checks(self) -> ChecksConfig: ...

    @property
    def ledger(self) -> LedgerConfig: ...

    @property
    def trace(self) -> TraceConfig: ...

    @property
    def logs(self) -> LogsConfig: ...

    @property
    def num_leaves(self) -> int: ...


def numerical(config: RunConfig) -> dict[str, Scalar]:
    """The settings that the bits of the weights may depend on, by dotted name; nothing of placement.

    Two runs with the same answer, on the same data, builds and hardware kind, end with the same bits.
    ``parallel.ordered`` is among them because without the ordered sum the placement itself is.
    """
    found: dict[str, Scalar] = {}
    for name, _, value in flatten(config):
        in_topic = name.partition(".")[0] in NUMERICAL_TOPICS and name not in NOT_NUMERICAL
        if in_topic or name in NUMERICAL_NAMES:
            parts = (
                {f"{name}.{i}": part for i, part in enumerate(value)}
                if isinstance(value, tuple)
                else {name: value}
            )
            found.update(parts)
    return found


def check(config: RunConfig) -> None:
    """Raise ``ValueError``, naming the setting and the fix, for settings that do not go with each other."""
    size, micro = config.batch.global_size, config.batch.micro_size
    if size % micro:
        below = size - size % micro
        raise ValueError(
            f"batch.global_size {size} is no multiple of batch.micro_size {micro}: "
            f"use {f'{below} or ' if below else ''}{below + micro}, or another micro-batch"
        )
    if config.parallel.strategy in ("server", "threads") and not config.parallel.ordered:
        raise ValueError(
            f"parallel.ordered false with parallel.strategy {config.parallel.strategy}, which always adds in "
            "the order of the tree: leave it on, or use another strategy"
        )
    _check_sharding(config)
    if config.ranks:
        check_ranks(config, config.ranks)
        check_rows(config.ranks, config.parallel.shard_ranks)


def check_settings(config: Any, ranges: Mapping[str, Range]) -> None:
    """Raise ``ValueError`` for a word that is none of its setting's, or a number outside of its range."""
    for name, kind, value in flatten(config):
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ValueError(f"{name}: expected one of {', '.join(get_args(kind))}, got {value!r}")
        wanted, holds = ranges.get(name, ("", lambda _: True))
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{name}: expected a finite number, got {number}")
            if not holds(number):
                raise ValueError(f"{name}: expected {wanted}, got {number}")


def check_ranks(config: RunConfig, num_ranks: int) -> None:
    """Raise ``ValueError`` where some of ``num_ranks`` data-parallel ranks would have no micro-batch."""
    if num_ranks > config.num_leaves:
        what = "threads" if config.parallel.strategy == "threads" else "ranks"
        raise ValueError(
            f"{num_ranks} {what}, but only {config.num_leaves} micro-batches "
            f"(global {config.batch.global_size} / micro {config.batch.micro_size}): use at most "
            f"{config.num_leaves} ranks, a smaller batch.micro_size or a larger batch.global_size"
        )


def check_world(config: RunConfig, world_size: int, *, restarted: bool = False) -> None:
    """Raise ``ValueError`` unless ``world_size`` processes can make this run.

    One that its launcher has ``restarted`` goes on with as many as there are: shard groups are larger then.
    """
    if config.parallel.strategy != "threads":
        check_ranks(config, world_size)
        if not restarted:
            check_rows(world_size, config.parallel.shard_ranks)
    elif world_size > 1:
        raise ValueError(
            f"parallel.strategy threads is one process, but a launcher has started {world_size}: start one, "
            "or use another strategy"
        )


def _check_sharding(config: RunConfig) -> None:
    """Raise ``ValueError`` for settings that the stage of sharding does not go with."""
    parallel, stage = config.parallel, config.parallel.shard_stage
    named = f"parallel.shard_stage {stage}"
    if stage and parallel.strategy in ("server", "threads"):
        holder = "rank 0 has" if parallel.strategy == "server" else "one process has"
        raise ValueError(
            f"{named} with parallel.strategy {parallel.strategy}, where {holder} all of the optimizer's "
            "state: set parallel.shard_stage 0, or use another strategy"
        )
    if stage >= 2 and parallel.strategy != "bucketed":
        raise ValueError(
            f"{named} with parallel.strategy {parallel.strategy}: it sends gradients block by block to the "
            "rank that keeps them, and has no other way; leave the strategy out, or set "
            "parallel.shard_stage 1"
        )
    if stage >= 2 and not parallel.ordered:
        raise ValueError(
            f"{named} with parallel.ordered false: it always adds in the order of the tree; leave ordered "
            "on, or set parallel.shard_stage 1"
        )
    if stage >= 2 and config.ledger.leaves:
        raise ValueError(
            f"{named} with ledger.leaves: no rank has a whole gradient to hash; set ledger.leaves false, or "
            "parallel.shard_stage 0 or 1, whose bits are the same"
        )
    if parallel.shard_ranks and not stage:
        raise ValueError(
            f"parallel.shard_ranks {parallel.shard_ranks} with {named}, where nothing is divided: set "
            "parallel.shard_stage 1, 2 or 3, or leave shard_ranks out"
        )
    if parallel.one_copy and stage not in (1, 2):
        raise ValueError(
            f"parallel.one_copy with {named}: ranks that share the weights divide the optimizer's state, "
            "and do not divide the weights; set parallel.shard_stage 1 or 2, or leave one_copy out"
        )
    if parallel.one_copy and parallel.backend not in ("auto", "shm"):
        raise ValueError(
            f"parallel.one_copy with parallel.backend {parallel.backend}, whose ranks share no memory: set "
            "parallel.backend shm, with the ranks of a shard group on one host, or leave one_copy out"
        )


def local_ranks(config: RunConfig, num_cores: int) -> int:
    """How many ranks to start on this host when no launcher did: ``ranks``, or what its cores carry."""
    return config.ranks or max(min(num_cores // config.parallel.threads, config.num_leaves), 1)


# How many ranks make a shard group, which has all of a divided state once. Four ranks in groups of two, on a
# mesh of dp(2) * shard(2):
#
#     group 0     rank 0: first half     rank 1: second half
#     group 1     rank 2: first half     rank 3: second half


def check_rows(num_ranks: int, shard_ranks: int) -> None:
    """Raise ``ValueError`` unless ``num_ranks`` ranks are whole shard groups of ``shard_ranks``."""
    if not shard_ranks or num_ranks % shard_ranks == 0:
        return
    below = num_ranks - num_ranks % shard_ranks
    raise ValueError(
        f"{num_ranks} rank{'s' * (num_ranks > 1)} for shard groups of parallel.shard_ranks {shard_ranks}: "
        f"use {f'{below} or ' if below else ''}{below + shard_ranks} ranks, another parallel.shard_ranks, or "
        "0 to divide the state among all ranks"
    )


def shard_axis(num_ranks: int, shard_ranks: int) -> int:
    """The size of the mesh's axis ``shard``: 1 without shard groups, else ``shard_ranks``.

    A run may go on with another number of ranks, which cannot be cut like that. Then groups are longer, the
    next number that divides the ranks, so that none of them has to hold more than was asked for.
    """
    if not shard_ranks:
        return 1
    return next((n for n in range(shard_ranks, num_ranks) if num_ranks % n == 0), num_ranks)
