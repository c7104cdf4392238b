"""The text recipe's config, a GPT on bytes, and configs that are known to work. Pure.

``default`` and ``tiny`` are functions to read, to call, and to change with ``dataclasses.replace``. What the
recipe computes stands in ``text``, which needs torch.

There are two kinds of settings. Those that ``numerical`` returns may change the bits of the weights; all
others say where and how the same work is done, and must not.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from instep.checkpoint.manifest import Scalar
from instep.models.config import GPTConfig, preset
from instep.pipeline import schedules
from instep.pipeline.cuts import BY, edges_at
from instep.recipes.ranges import (
    ABOVE_0,
    BELOW_1,
    FROM_0,
    FROM_2,
    SHARD_RANKS,
    STAGES,
    UP_TO_1,
    check_settings,
)
from instep.run import toml
from instep.run.settings import CheckpointConfig, ChecksConfig, LedgerConfig, LogsConfig, TraceConfig
from instep.run.toml import scalars

RANGES = {  # GPTConfig checks the numbers of the model
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
    "parallel.pp": ABOVE_0,
    "parallel.chunks": FROM_0,
    "parallel.shard_stage": STAGES,
    "parallel.shard_ranks": SHARD_RANKS,
    "checkpoint.every": FROM_0,
    "checkpoint.keep": FROM_2,
    "eval.every": FROM_0,
    "eval.windows": ABOVE_0,
    "checks.max_skipped": FROM_0,
    "checks.spike": FROM_0,
    "checks.skip_steps": FROM_0,
    "checks.replicas_every": FROM_0,
    "checks.leaves_every": FROM_0,
    "ledger.every": FROM_0,
    "trace.events": FROM_0,
}

NUMERICAL_TOPICS = ("model", "batch", "optim")
NOT_NUMERICAL = ("model.checkpoint",)  # of these topics: it says when activations are computed, not what
ABOUT_NODES = ("parallel.nodes", "parallel.rounding")
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
class ModelConfig:
    """The transformer; its tokens are bytes."""

    layers: int
    """Number of transformer blocks."""
    width: int
    """Length of the vector that stands for a byte between the blocks (d_model)."""
    heads: int
    """Number of attention heads; width is a multiple of it."""
    context: int
    """Number of bytes that attend to each other."""
    dropout: float = 0.0
    """Share of the activations that is zeroed in training."""
    tied: bool = True
    """Use the embedding's weights in the output layer, too."""
    checkpoint: bool = False
    """Compute each block again in backward instead of keeping its activations: less memory, more time, the
    same bits."""


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
    """How the ranks share a step. Only ordered, nodes, rounding and threads may change the bits."""

    strategy: Literal["naive", "flat", "overlap", "bucketed"] = "bucketed"
    """How gradients get from the micro-batches to every rank."""
    bucket_mb: float = 25.0
    """Size of a bucket of the bucketed strategy, in 2**20 bytes."""
    ordered: bool = True
    """Add in the order of the fixed tree; off: the backend's all-reduce, in whatever order it adds."""
    nodes: Literal["float32", "bfloat16", "int8"] = "float32"
    """What every sum of the fixed tree is rounded to, and travels in: 4, 2 or 1 byte per weight. The same
    bits on any ranks, others than in float32."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How smaller nodes are rounded; stochastic is right on average, by random bits that are keyed."""
    backend: Literal["auto", "gloo", "shm", "nccl"] = "auto"
    """What carries messages; auto takes nccl where every rank has a GPU, else shm where all ranks share a
    host, else gloo."""
    device: str = "auto"
    """cpu; cuda, a GPU per rank; or cuda:0, one GPU for all ranks, over gloo. auto takes cuda where there are
    GPUs and the backend can use them."""
    threads: int = 1
    """Threads per rank on a CPU."""
    shard_stage: int = 0
    """What is divided among the ranks instead of kept by each: 0 nothing, 1 the optimizer's state, 2 the
    gradients too, 3 the weights too. From 2 on, gradients travel block by block."""
    shard_ranks: int = 0
    """How many ranks form a shard group, which divides among its ranks what shard-stage says; every group has
    all of it. 0: all ranks are one group. Best is the number of ranks per host."""
    pp: int = 1
    """How many ranks a pipeline has, each with some of the layers; there are ranks / pp pipelines."""
    schedule: str = "1f1b"
    """In which order the ranks of a pipeline make forwards and backwards of their micro-batches: naive,
    gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zb-v; or the path of a text file, a row of actions per rank."""
    chunks: int = 0
    """Stages per rank, with interleaved; 0: as the schedule has them, two with interleaved."""
    cuts: str = "layers"
    """Where a pipeline is cut: layers, as many in each stage; cost, as many parameters; or the first layers
    of the stages but the first: 3,5. Layers are the embedding, blocks and the output."""

    @property
    def named_device(self) -> str | None:
        """The device, or None where it was to be chosen."""
        return None if self.device == "auto" else self.device

    @property
    def numbered_cuts(self) -> str | list[int]:
        """The cuts as a word, or as numbers.

        Raises:
            ValueError: they are neither.
        """
        if self.cuts in BY:
            return self.cuts
        try:
            return [int(number) for number in self.cuts.split(",")]
        except ValueError:
            raise ValueError(
                f"parallel.cuts {self.cuts!r}: expected one of {', '.join(BY)}, or numbers such as 3,5"
            ) from None

    @property
    def named_backend(self) -> str | None:
        """The backend, or None where it is to be chosen."""
        return None if self.backend == "auto" else self.backend


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How the loss on held-out text is measured; it has no effect on the weights."""

    every: int = 100
    """Steps between two evaluations; 0 evaluates before the first step and after the last only."""
    windows: int = 64
    """Windows of held-out text per evaluation, each as long as the model's context."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run of the text recipe."""

    ranks: int = 0
    """Ranks (processes) to start on this host; 0: one per core, but no more than there are micro-batches.
    Where torchrun, Slurm or mpirun has started the ranks, there are as many as it says."""
    steps: int
    """Optimizer steps of the whole run; the learning rate's schedule ends there."""
    seed: int = 0
    """Key of the initial weights, the order of the data, and dropout."""
    run_dir: Path | None = None
    """Where the run is recorded; by default a new folder in runs/."""
    resume: bool = False
    """Continue the run in --run-dir, with its config, from its newest checkpoint that verifies."""
    accept_contract: bool = False
    """Resume although the bits may not be those of one run: settings have changed (more steps, say), or the
    machine; the ledger says where."""
    min_ranks: int = 0
    """Go on with as few as this many when a rank dies, until it is back; 0: wait for another in its place."""
    fault: tuple[str, ...] = ()
    """Faults to inject, to watch a recovery: kill:rank=1,step=12,phase=exchange, or a slow rank:
    slow:rank=1,step=20,steps=100,phase=data,seconds=0.03"""
    stop_after: int = 0
    """Stop cleanly after this step with a checkpoint, as a time limit would; --resume continues. 0: go on."""
    data: Path | None = None
    """A file or folder of text; by default the source files of Python's standard library."""
    autocast: Literal["off", "bf16"] = "off"
    """Precision of the forward's matrix products; weights and gradients stay float32."""
    timeout_s: float = 300.0
    """Longest that a rank waits for another, in seconds, before the run ends and names it."""
    model: ModelConfig
    batch: BatchConfig
    optim: OptimConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)

    @property
    def num_leaves(self) -> int:
        """G, the number of micro-batches in a step."""
        return self.batch.global_size // self.batch.micro_size


def validate(config: Config) -> None:
    """Raise ``ValueError``, naming the setting and the fix, for a config that cannot be run."""
    check_settings(config, RANGES)
    try:
        GPTConfig(**asdict(config.model))
    except ValueError as error:
        raise ValueError(f"model: {error}") from None
    _check(config)


def numerical(config: Config) -> dict[str, Scalar]:
    """The settings that the bits of the weights may depend on, by dotted name; nothing of placement.

    Two runs with the same answer, on the same data, builds and hardware kind, end with the same bits.
    ``parallel.ordered`` is among them because without the ordered sum the placement itself is.
    """
    found = {}
    for name, value in scalars(config).items():
        if name in ABOUT_NODES and config.parallel.nodes == "float32":
            continue  # a run that was begun before there were others goes on
        in_topic = name.partition(".")[0] in NUMERICAL_TOPICS and name not in NOT_NUMERICAL
        if in_topic or name.rstrip(".0123456789") in (*NUMERICAL_NAMES, *ABOUT_NODES):
            found[name] = value
    return found


def run_options(config: Config) -> dict[str, Any]:
    """What ``instep.Run`` is to be told beside the run directory."""
    checks, logs = config.checks, config.logs
    return {
        # A new run may begin from what is written down of this one.
        "config": replace(config, resume=False, accept_contract=False),
        "contract": numerical(config),
        "seed": config.seed,
        "resume": config.resume,
        "accept_contract": config.accept_contract,
        "checkpoint_every": config.checkpoint.every,
        "keep": config.checkpoint.keep,
        "replicas_every": checks.replicas_every,
        "check_every": checks.leaves_every,
        "max_skipped": checks.max_skipped,
        "skip_steps": checks.skip_steps,
        "spike": checks.spike,
        "ledger_every": config.ledger.every,
        "ledger_leaves": config.ledger.leaves,
        "trace_events": config.trace.events,
        "tensorboard": logs.tensorboard,
        "wandb": logs.wandb and logs.wandb_project,
        "shard": config.parallel.shard_ranks or 1,
        "pp": config.parallel.pp,
        "backend": config.parallel.named_backend,
        "device": config.parallel.named_device,
        "deterministic": True,
        "threads": config.parallel.threads,
        "timeout_s": config.timeout_s,
        "items": "tokens",
        "items_per_step": config.batch.global_size * config.model.context,
        "loss_unit": "nats per byte",
    }


def _check(config: Config) -> None:
    """Raise ``ValueError``, naming the setting and the fix, for settings that do not go with each other."""
    size, micro = config.batch.global_size, config.batch.micro_size
    if size % micro:
        below = size - size % micro
        raise ValueError(
            f"batch.global_size {size} is no multiple of batch.micro_size {micro}: "
            f"use {f'{below} or ' if below else ''}{below + micro}, or another micro-batch"
        )
    _check_nodes(config.parallel)
    _check_sharding(config)
    _check_pipeline(config)
    if config.ranks:
        check_ranks(config, config.ranks)
        check_rows(config.ranks, config.parallel.shard_ranks)


def _check_nodes(parallel: ParallelConfig) -> None:
    """Raise ``ValueError`` for a format of tree nodes that has no effect, or no tree."""
    if parallel.nodes == "float32" and parallel.rounding != "nearest":
        raise ValueError(
            f"parallel.rounding {parallel.rounding} with parallel.nodes float32, which are not rounded any "
            "further: set parallel.nodes bfloat16 or int8, or leave the rounding out"
        )
    if parallel.nodes != "float32" and not parallel.ordered:
        raise ValueError(
            f"parallel.nodes {parallel.nodes} with parallel.ordered false, where the backend adds, and no "
            "tree: leave one of them out"
        )


def _check_pipeline(config: Config) -> None:
    """Raise ``ValueError`` for settings that a pipeline does not go with."""
    parallel, given = config.parallel, config.parallel.numbered_cuts
    if parallel.pp == 1:
        schedule_of(parallel)
        for name in ("schedule", "chunks", "cuts"):
            if (value := getattr(parallel, name)) != getattr(ParallelConfig, name):
                raise ValueError(
                    f"parallel.{name} {value} with parallel.pp 1, where no rank has a stage of its own: set "
                    f"parallel.pp 2 or more, or leave {name} out"
                )
        return
    named = f"parallel.pp {parallel.pp}"
    if not parallel.ordered:
        raise ValueError(
            f"{named} with parallel.ordered false: the stages of a pipeline add gradients in the order of "
            "the tree; leave it on"
        )
    if parallel.shard_stage > 1:
        raise ValueError(
            f"{named} with parallel.shard_stage {parallel.shard_stage}: the ranks of a stage have all of its "
            "weights and gradients; set parallel.shard_stage 1, which divides the optimizer's state among "
            "them, or parallel.pp 1"
        )
    num_stages = _num_stages(parallel)
    if num_stages > config.model.layers + 2:
        raise ValueError(
            f"{named} and parallel.schedule {parallel.schedule} make {num_stages} stages of a model that has "
            f"{config.model.layers + 2} layers (embedding, {config.model.layers} blocks, output): set a "
            "smaller parallel.pp or more model.layers"
        )
    if isinstance(given, list):
        edges_at(given, config.model.layers + 2, num_stages, f"parallel.cuts {parallel.cuts}")


def schedule_of(parallel: ParallelConfig) -> str:
    """The name of a schedule, or the text in the file that ``parallel.schedule`` is the path of.

    Raises:
        ValueError: it is neither.
    """
    if parallel.schedule in schedules.NAMES:
        return parallel.schedule
    try:
        return Path(parallel.schedule).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"parallel.schedule {parallel.schedule}: expected one of {', '.join(schedules.NAMES)}, or the "
            f"path of a text file with one of your own ({error})"
        ) from None


def _num_stages(parallel: ParallelConfig) -> int:
    """Of a pipeline; ValueError if its schedule is none."""
    given, chunks = schedule_of(parallel), parallel.chunks or None
    try:
        own = schedules.own(given, chunks)
        found = own or schedules.generate(given, parallel.pp, 2 * parallel.pp, chunks)
    except ValueError as error:
        raise ValueError(f"parallel.schedule {parallel.schedule}: {error}") from None
    if found.num_ranks != parallel.pp:
        raise ValueError(
            f"parallel.pp {parallel.pp} with parallel.schedule {parallel.schedule}, which is of "
            f"{found.num_ranks} ranks: set parallel.pp {found.num_ranks}, or another schedule"
        )
    return found.num_stages


def check_ranks(config: Config, num_ranks: int) -> None:
    """Raise ``ValueError`` where some of ``num_ranks`` data-parallel ranks would have no micro-batch."""
    if num_ranks > config.num_leaves:
        raise ValueError(
            f"{num_ranks} ranks, but only {config.num_leaves} micro-batches "
            f"(global {config.batch.global_size} / micro {config.batch.micro_size}): use at most "
            f"{config.num_leaves} ranks, a smaller batch.micro_size or a larger batch.global_size"
        )


def check_world(config: Config, world_size: int, *, restarted: bool = False) -> None:
    """Raise ``ValueError`` unless ``world_size`` processes can make this run.

    One that its launcher has ``restarted`` goes on with as many as there are: shard groups are larger then.
    """
    check_ranks(config, world_size)
    if not restarted:
        check_rows(world_size, config.parallel.shard_ranks)


def _check_sharding(config: Config) -> None:
    """Raise ``ValueError`` for settings that the stage of sharding does not go with."""
    parallel, stage = config.parallel, config.parallel.shard_stage
    named = f"parallel.shard_stage {stage}"
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


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Of ``step``, counted from 0: a linear rise, then a cosine down to ``min_lr_ratio``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(num_steps - 1 - config.warmup_steps, 1)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def local_ranks(config: Config, num_cores: int) -> int:
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


def merge(base: Config, tables: dict[str, Any], source: str) -> Config:
    """``base`` with what ``tables`` has in the place of its own, as ``run.toml.merge``.

    ``model.preset``, a name for layers, width and heads together, is read too, and yields to these three.
    """
    model = tables.get("model")
    if isinstance(model, dict) and "preset" in model:
        try:
            size = preset(str(model["preset"]))
        except ValueError as error:
            raise ValueError(f"{source}: model.preset: {error}") from None
        given = {key: value for key, value in model.items() if key != "preset"}
        sizes = {"layers": size.layers, "width": size.width, "heads": size.heads}
        tables = {**tables, "model": {**sizes, **given}}
    return toml.merge(base, tables, source)


def default() -> Config:
    """What ``instep train`` runs: 0.44 million parameters, about a minute on two cores."""
    return Config(
        model=ModelConfig(layers=2, width=128, heads=4, context=64),
        batch=BatchConfig(global_size=32, micro_size=4),
        optim=OptimConfig(lr=4e-3, warmup_steps=30, min_lr_ratio=0.05, betas=(0.9, 0.99)),
        eval=EvalConfig(every=200, windows=256),
        checkpoint=CheckpointConfig(every=200),
        steps=600,
    )


def tiny() -> Config:
    """Everything that can move a bit, dropout included, in two seconds: what the tests train."""
    return Config(
        model=ModelConfig(layers=2, width=32, heads=2, context=32, dropout=0.1),
        batch=BatchConfig(global_size=16, micro_size=2),
        optim=OptimConfig(lr=2e-3, warmup_steps=2),
        checkpoint=CheckpointConfig(every=0),
        eval=EvalConfig(every=0, windows=8),
        steps=20,
    )
