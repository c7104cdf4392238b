"""What a run is told: a frozen dataclass per topic, and the checks that need no torch.

The config has two kinds of fields. Those that ``numerical`` returns may change the bits of the weights;
all others say where and how the same work is done, and must not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from instep.models.config import GPTConfig
from instep.train.ranges import check_range
from instep.train.rows import check_rows

Scalar = str | int | float | bool

NUMERICAL_TOPICS = ("model", "batch", "optim")
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
class Model:
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


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How a step's samples are cut: into global-size / micro-size micro-batches, whose gradients are summed
    in a fixed order."""

    global_size: int
    """Samples per optimizer step, over all ranks."""
    micro_size: int
    """Samples per forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Optim:
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
class Parallel:
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
    """How many ranks divide among them what shard-stage says: a row of so many has all of it, and every row
    has the same. 0: all ranks are one row. Best is the number of ranks per host."""
    one_copy: bool = False
    """The ranks of a host, or of a row of shard-ranks, share one copy of the weights; with shard-stage 1 or
    2, on the shm backend."""

    @property
    def named_backend(self) -> str | None:
        """The backend, or None where it is to be chosen."""
        return None if self.backend == "auto" else self.backend


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state is saved."""

    every: int = 100
    """Steps between two checkpoints; 0 saves at the end only."""
    keep: int = 3
    """Newest checkpoints to keep; at least 2, because one bad block is enough to lose one."""


@dataclass(frozen=True, kw_only=True)
class Eval:
    """How the loss on held-out text is measured; it has no effect on the weights."""

    every: int = 100
    """Steps between two evaluations; 0 evaluates at the end only."""
    windows: int = 64
    """Windows of held-out text per evaluation, each as long as the model's context."""


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What is watched while the run goes on, and what then happens. spike and skip-steps may change the
    bits, where they apply."""

    max_skipped: int = 5
    """Steps in a row that may be skipped because their gradient is not finite or a spike; one more ends the
    run."""
    spike: float = 0.0
    """Skip a step whose gradient norm is above the median of the last ones by this many median absolute
    deviations; 0: never."""
    skip_steps: tuple[int, ...] = ()
    """Steps, counted from 0, that read their samples and leave the weights alone."""
    replicas_every: int = 50
    """Steps between two comparisons of all ranks' weights and moments; 0: never."""
    leaves_every: int = 0
    """Steps between two in which every rank computes a micro-batch of another and compares; 0: never."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What ledger.jsonl, by which instep compare compares, has beside a sample of the state at each step."""

    every: int = 50
    """Steps between two hashes of the whole state; 0: at the end only."""
    leaves: bool = False
    """Write down the hash of every micro-batch's gradient, so that instep compare can tell whether a gradient
    was computed otherwise, or only the sum."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What every rank records of its time; instep report shows it."""

    events: int = 1 << 17
    """How many events each rank keeps, the last ones; a step has some 30 to 300, of 56 bytes each. 0: none
    on disk."""


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Where the figures of metrics.jsonl go beside it, from rank 0."""

    tensorboard: bool = False
    """Write tensorboard/ in the run directory; needs instep[tensorboard]."""
    wandb: bool = False
    """Tell Weights & Biases, offline without a key; needs instep[wandb]."""
    wandb_project: str = "instep"
    """The project there."""

    @property
    def names(self) -> list[str]:
        """Those that were asked for."""
        return [name for name in ("tensorboard", "wandb") if getattr(self, name)]


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    ranks: int = 0
    """Ranks (processes) to start on this host, or threads with parallel.strategy threads; 0: one per core,
    but no more than there are micro-batches. Where torchrun, Slurm or mpirun has started the ranks, there
    are as many as it says."""
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
    """Faults to inject, to watch a recovery: kill:rank=1,step=12,phase=exchange, or who is slow:
    slow:rank=1,step=20,steps=100,phase=data,seconds=0.03"""
    stop_after: int = 0
    """Stop cleanly after this step with a checkpoint, as a time limit would; --resume continues. 0: go on."""
    data: Path | None = None
    """A file or folder of text; by default the source files of Python's standard library."""
    autocast: Literal["off", "bf16"] = "off"
    """Precision of the forward's matrix products; weights and gradients stay float32."""
    timeout_s: float = 300.0
    """Longest that a rank waits for another, in seconds, before the run ends and names it."""
    model: Model
    batch: Batch
    optim: Optim
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    eval: Eval = field(default_factory=Eval)
    checks: Checks = field(default_factory=Checks)
    ledger: Ledger = field(default_factory=Ledger)
    trace: Trace = field(default_factory=Trace)
    logs: Logs = field(default_factory=Logs)

    @property
    def num_leaves(self) -> int:
        """G, the number of micro-batches in a step."""
        return self.batch.global_size // self.batch.micro_size


def flatten(topic: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, declared type, value) of every setting below ``topic``, a dataclass instance."""
    hints = get_type_hints(type(topic))
    for item in fields(topic):
        name, value = f"{prefix}{item.name}", getattr(topic, item.name)
        if is_dataclass(value):
            yield from flatten(value, f"{name}.")
        else:
            yield name, hints[item.name], value


def numerical(config: Config) -> dict[str, Scalar]:
    """The settings that the bits of the weights may depend on, by dotted name; nothing of placement.

    Two runs with the same answer, on the same data, builds and hardware kind, end with the same bits.
    ``parallel.ordered`` is among them because without the ordered sum the placement itself is.
    """
    found: dict[str, Scalar] = {}
    for name, _, value in flatten(config):
        if name.partition(".")[0] in NUMERICAL_TOPICS or name in NUMERICAL_NAMES:
            parts = (
                {f"{name}.{i}": part for i, part in enumerate(value)}
                if isinstance(value, tuple)
                else {name: value}
            )
            found.update(parts)
    return found


def validate(config: Config) -> None:
    """Raise ``ValueError``, naming the setting and the fix, for a config that cannot be run."""
    for name, kind, value in flatten(config):
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ValueError(f"{name}: expected one of {', '.join(get_args(kind))}, got {value!r}")
        check_range(name, value)
    try:
        GPTConfig(**asdict(config.model))
    except ValueError as error:
        raise ValueError(f"model: {error}") from None
    size, micro = config.batch.global_size, config.batch.micro_size
    if size % micro:
        below = size - size % micro
        raise ValueError(
            f"batch.global_size {size} is no multiple of batch.micro_size {micro}: "
            f"use {f'{below} or ' if below else ''}{below + micro}, or another micro-batch"
        )
    _check_strategy(config)
    _check_sharding(config)
    if config.ranks:
        check_ranks(config, config.ranks)
        check_rows(config.ranks, config.parallel.shard_ranks)


def check_ranks(config: Config, num_ranks: int) -> None:
    """Raise ``ValueError`` where some of ``num_ranks`` data-parallel ranks would have no micro-batch."""
    if num_ranks > config.num_leaves:
        what = "threads" if config.parallel.strategy == "threads" else "ranks"
        raise ValueError(
            f"{num_ranks} {what}, but only {config.num_leaves} micro-batches "
            f"(global {config.batch.global_size} / micro {config.batch.micro_size}): use at most "
            f"{config.num_leaves} ranks, a smaller batch.micro_size or a larger batch.global_size"
        )


def check_world(config: Config, world_size: int, *, restarted: bool = False) -> None:
    """Raise ``ValueError`` unless ``world_size`` processes can make this run.

    One that its launcher has ``restarted`` goes on with as many as there are: rows are longer then.
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


def _check_strategy(config: Config) -> None:
    """Raise ``ValueError`` for settings that the strategy does not go with."""
    strategy, dropout = config.parallel.strategy, config.model.dropout
    if strategy in ("server", "threads") and not config.parallel.ordered:
        raise ValueError(
            f"parallel.ordered false with parallel.strategy {strategy}, which always adds in the order of "
            "the tree: leave it on, or use another strategy"
        )
    if strategy == "threads" and dropout:
        raise ValueError(
            f"model.dropout {dropout:g} with parallel.strategy threads, which share torch's random "
            "generator: set model.dropout 0, or use another strategy"
        )


def _check_sharding(config: Config) -> None:
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
            f"{named} with parallel.strategy {parallel.strategy}: it sends gradients block by block to who "
            "keeps them, and knows no other way; leave the strategy out, or set parallel.shard_stage 1"
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
            "parallel.backend shm, with the ranks of a row on one host, or leave one_copy out"
        )


def local_ranks(config: Config, num_cores: int) -> int:
    """How many ranks to start on this host when no launcher did: ``ranks``, or what its cores carry."""
    return config.ranks or max(min(num_cores // config.parallel.threads, config.num_leaves), 1)
