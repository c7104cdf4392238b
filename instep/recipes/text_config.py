"""The text recipe's config, a GPT on bytes, and configs that are known to work. Pure.

``default`` and ``tiny`` are functions to read, to call, and to change with ``dataclasses.replace``. What the
recipe computes stands in ``text``, which needs torch.

There are two kinds of settings. Those that ``numerical`` returns may change the bits of the weights; all
others say where and how the same work is done, and must not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from instep.checkpoint.manifest import Scalar
from instep.errors import counted
from instep.models.config import GPTConfig, preset
from instep.pipeline import schedules
from instep.pipeline.cuts import BY
from instep.run import toml
from instep.run.settings import CheckpointConfig, Count, MeshConfig, Positive, RunConfig
from instep.run.toml import ABOVE_0, BELOW_1, FROM_0, UP_TO_1, scalars

STAGES = toml.Range("0, 1, 2 or 3", lambda number: number in range(4))

NUMERICAL_TOPICS = ("model", "batch", "optim")
NOT_NUMERICAL = ("model.checkpoint",)  # of these topics: it says when activations are computed, not what
TP_CHUNKS = 8
EXPERT_WIDTH = (
    32  # a multiple makes the weights of an expert, 4 * width**2, whole blocks of ``BLOCK_ELEMENTS``
)
ABOUT_NODES = ("parallel.nodes", "parallel.rounding")
ABOUT_EXPERTS = ("model.experts", "model.top_k", "optim.aux_loss", "optim.balance_rate")
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
    """Width of the residual stream (d_model)."""
    heads: int
    """Number of attention heads; width is a multiple of it."""
    context: int
    """Bytes of a window."""
    dropout: float = 0.0
    """Dropout probability."""
    tied: bool = True
    """Tie the output layer's weights to the embedding's."""
    checkpoint: bool = False
    """Recompute each block in backward instead of keeping its activations: less memory, more time, the same
    bits."""
    experts: Count = 0
    """Experts in the place of each feed-forward layer, each as wide; 0: none."""
    top_k: Positive = 2
    """Experts per token."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """A step's global-size / micro-size micro-batches, whose gradients are summed in a fixed order."""

    global_size: Positive
    """Samples per optimizer step, over all ranks."""
    micro_size: Positive
    """Samples per forward and backward."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its schedule."""

    name: Literal["adamw", "sgd"] = "adamw"
    """The optimizer."""
    lr: Annotated[float, ABOVE_0]
    """Learning rate after warm-up."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after warm-up, until the last of --steps."""
    warmup_steps: Count = 0
    """Steps of linear warm-up."""
    min_lr_ratio: Annotated[float, UP_TO_1] = 0.1
    """Last learning rate of the cosine, as a share of lr."""
    clip: Annotated[float, FROM_0] = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""
    weight_decay: Annotated[float, FROM_0] = 0.1
    """Decoupled in adamw, added to the gradient in sgd; vectors (norms, biases) are not decayed."""
    betas: Annotated[tuple[float, float], BELOW_1] = (0.9, 0.95)
    """Decay rates of the two moments of adamw."""
    momentum: Annotated[float, BELOW_1] = 0.9
    """Momentum of sgd."""
    aux_loss: Annotated[float, FROM_0] = 0.01
    """With experts: coefficient of the auxiliary loss that balances their loads."""
    balance_rate: Annotated[float, FROM_0] = 0.0
    """With experts: change per step of the biases of loss-free balancing; 0: none."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(MeshConfig):
    """How the ranks share a step. Only ordered, nodes, rounding and threads may change the bits."""

    strategy: Literal["naive", "flat", "overlap", "bucketed"] = "bucketed"
    """When, and in which pieces, gradients are reduced."""
    bucket_mb: Annotated[float, ABOVE_0] = 25.0
    """Size of a bucket of the bucketed strategy, in 2**20 bytes."""
    ordered: bool = True
    """Add in the order of the sum tree; off: the backend's all-reduce."""
    nodes: Literal["float32", "bfloat16", "int8"] = "float32"
    """Format of the tree's sums, in memory and in messages: 4, 2 or 1 byte per weight."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of smaller nodes; stochastic is unbiased, by keyed random bits."""
    tp_chunks: Count = 0
    """Chunks of the products that tp cuts, a power of two: the bits depend on it and not on tp. 0: 8 where tp
    is above 1, else layers stay whole."""
    sequence: bool = False
    """Sequence parallelism: between the layers that tp cuts, a rank has a slice of each window."""
    shard_stage: Annotated[int, STAGES] = 0
    """Sharding among the ranks: 0 none, 1 optimizer state, 2 gradients too, 3 weights too. From 2 on,
    gradients travel block by block."""
    schedule: str = "1f1b"
    """Order of a pipeline's forwards and backwards: naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2 or zb-v; or
    a text file with a row of actions per rank."""
    chunks: Count = 0
    """Stages per rank, with interleaved; 0: two."""
    cuts: str = "layers"
    """Where a pipeline is cut: layers, equally many per stage; cost, equally many parameters; or the first
    layer of each further stage: 3,5. Layers are the embedding, blocks and the output."""
    deterministic: bool = True
    """On GPUs, set the switches for the same bits before CUDA starts."""

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


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How the loss on held-out text is measured; it has no effect on the weights."""

    every: Count = 100
    """Steps between two evaluations; 0: before the first step and after the last only."""
    windows: Positive = 64
    """Windows of held-out text per evaluation, each as long as the model's context."""


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """A whole run of the text recipe."""

    steps: Positive
    """Optimizer steps of the whole run; the learning rate's schedule ends there."""
    seed: Count = 0
    """Seed of the initial weights, the order of the data, and dropout."""
    data: Path | None = None
    """A file or folder of text; by default the source files of Python's standard library."""
    autocast: Literal["off", "bf16"] = "off"
    """Precision of the forward's matrix products; weights and gradients stay float32."""
    model: ModelConfig
    batch: BatchConfig
    optim: OptimConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def num_leaves(self) -> int:
        """G, the number of micro-batches in a step."""
        return self.batch.global_size // self.batch.micro_size

    @property
    def divides_experts(self) -> bool:
        """Whether experts are cut over ep, perhaps one rank; in stages 2 and 3 blocks are divided instead."""
        return self.model.experts > 0 and self.parallel.shard_stage <= 1

    @property
    def cuts_layers(self) -> bool:
        """Whether layers are cut, over ranks or one."""
        return self.divides_experts or self.tp_chunks > 0

    @property
    def tp_chunks(self) -> int:
        """Chunks of cut products; 0: layers are whole."""
        return self.parallel.tp_chunks or (TP_CHUNKS if self.parallel.tp > 1 else 0)


def validate(config: Config) -> None:
    """Raise ``ValueError``, naming the setting and the fix, for a config that cannot be run."""
    toml.check(config)
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
        if name in ABOUT_EXPERTS and not config.model.experts:
            continue
        in_topic = name.partition(".")[0] in NUMERICAL_TOPICS and name not in NOT_NUMERICAL
        if in_topic or name.rstrip(".0123456789") in (*NUMERICAL_NAMES, *ABOUT_NODES):
            found[name] = value
    return found | ({"parallel.tp_chunks": config.tp_chunks} if config.tp_chunks else {})


def _check(config: Config) -> None:
    """Raise ``ValueError``, naming the setting and the fix, for settings that do not go with each other."""
    size, micro = config.batch.global_size, config.batch.micro_size
    if size % micro:
        below = size - size % micro
        raise ValueError(
            f"batch.global_size {size} is no multiple of batch.micro_size {micro}: "
            f"use {f'{below} or ' if below else ''}{below + micro}, or another micro-batch"
        )
    _check_sharding(config)
    _check_pipeline(config)
    _check_layers(config)
    _check_experts(config)
    if config.ranks:
        check_ranks(config, config.ranks)
        check_rows(config.ranks, config.parallel.shard)


def _check_pipeline(config: Config) -> None:
    """Raise ``ValueError`` for settings that a pipeline does not go with, but for what it says itself."""
    parallel = config.parallel
    schedule_of(parallel)
    if parallel.pp == 1:
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


def _check_layers(config: Config) -> None:
    """Raise ``ValueError`` for settings that layers cut over ranks do not go with."""
    parallel, chunks = config.parallel, config.tp_chunks
    if not chunks:
        if parallel.sequence:
            raise ValueError("parallel.sequence true with parallel.tp 1: set parallel.tp 2 or more")
        return
    named = f"parallel.tp {parallel.tp}, in {chunks} chunks,"
    for count, what in ((chunks, "parallel.tp_chunks"), (config.model.heads, "model.heads")):
        if count % parallel.tp:
            raise ValueError(f"{named} with {what} {count}: expected a multiple of parallel.tp")
    if parallel.shard_stage > 1:
        raise ValueError(
            f"{named} with parallel.shard_stage {parallel.shard_stage}: its weights are cut already; set "
            "parallel.shard_stage 1, which divides the optimizer's state, or parallel.tp 1"
        )
    if parallel.nodes == "int8" or parallel.rounding == "stochastic":
        raise ValueError(
            f"{named} with parallel.nodes {parallel.nodes}, parallel.rounding {parallel.rounding}: gradients "
            "would depend on tp; set parallel.nodes bfloat16 with nearest rounding, or parallel.tp 1"
        )


def _check_experts(config: Config) -> None:
    """Raise ``ValueError`` for settings that experts do not go with."""
    model, parallel = config.model, config.parallel
    if (model.experts or 1) % parallel.ep:
        raise ValueError(
            f"parallel.ep {parallel.ep} with model.experts {model.experts}: expected experts to be a multiple"
        )
    if not model.experts:
        return
    named = f"model.experts {model.experts}"
    if parallel.pp > 1 and config.optim.aux_loss:
        raise ValueError(
            f"{named} with parallel.pp {parallel.pp} and optim.aux_loss {config.optim.aux_loss}: experts are "
            "on other ranks than the loss; set optim.aux_loss 0 and optim.balance_rate 0.001"
        )
    if parallel.ep > 1 and not config.divides_experts:
        raise ValueError(
            f"parallel.ep {parallel.ep} with parallel.shard_stage {parallel.shard_stage}: experts are cut "
            "already; set parallel.shard_stage 1, or parallel.ep 1"
        )
    if parallel.ep > 1 and parallel.nodes != "float32":
        raise ValueError(f"parallel.ep {parallel.ep} with parallel.nodes {parallel.nodes}: leave nodes out")
    if not config.divides_experts and model.width % EXPERT_WIDTH:  # norms are added in blocks of 4096
        raise ValueError(
            f"{named} with model.width {model.width} and parallel.shard_stage {parallel.shard_stage}: the "
            f"norm of gradients would have other bits than in other layouts; set a multiple of {EXPERT_WIDTH}"
        )


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


def check_ranks(config: Config, num_ranks: int) -> None:
    """Raise ``ValueError`` where some of ``num_ranks`` ranks would have no micro-batch."""
    parallel = config.parallel
    together = parallel.tp * parallel.ep * parallel.pp
    if num_ranks > config.num_leaves * together:
        raise ValueError(
            f"{num_ranks} ranks, but only {config.num_leaves} micro-batches "
            f"(global {config.batch.global_size} / micro {config.batch.micro_size}): use at most "
            f"{config.num_leaves * together} ranks, a smaller --batch.micro-size or a larger "
            "--batch.global-size"
        )


def check_world(config: Config, world_size: int, *, restarted: bool = False) -> None:
    """Raise ``ValueError`` unless ``world_size`` processes can make this run.

    One that its launcher has ``restarted`` goes on with as many as there are: shard groups are larger then.
    """
    check_ranks(config, world_size)
    if not restarted:
        check_rows(world_size, config.parallel.shard)


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
    if stage >= 2 and config.record.leaves:
        raise ValueError(
            f"{named} with record.leaves: no rank has a whole gradient to hash; set record.leaves false, or "
            "parallel.shard_stage 0 or 1, whose bits are the same"
        )
    if parallel.shard != 1 and not stage:
        raise ValueError(
            f"parallel.shard {parallel.shard} with {named}, where nothing is divided: set "
            "parallel.shard_stage 1, 2 or 3, or leave parallel.shard out"
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


def check_rows(num_ranks: int, shard: int) -> None:
    """Raise ``ValueError`` unless ``num_ranks`` ranks are whole shard groups of ``shard``."""
    if shard < 1 or num_ranks % shard == 0:
        return
    below = num_ranks - num_ranks % shard
    raise ValueError(
        f"{counted(num_ranks, 'rank')} for shard groups of parallel.shard {shard}: "
        f"use {f'{below} or ' if below else ''}{below + shard} ranks, another parallel.shard, or "
        "1 to divide the state among all ranks"
    )


def merge(base: Config, tables: Mapping[str, Any], source: str) -> Config:
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
