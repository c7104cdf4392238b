"""The text recipe's config, a GPT on bytes, and configs that are known to work. Pure.

``default`` and ``tiny`` are functions to read, to call, and to change with ``dataclasses.replace``. What the
recipe computes stands in ``text_recipe``, which needs torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from instep.models.config import GPTConfig, preset
from instep.run import toml
from instep.train.run_config import (
    ABOVE_0,
    RANGES,
    BatchConfig,
    CheckpointConfig,
    ChecksConfig,
    LedgerConfig,
    LogsConfig,
    OptimConfig,
    ParallelConfig,
    TraceConfig,
    check,
    check_settings,
)

TEXT_RANGES = {**RANGES, "eval.windows": ABOVE_0}  # GPTConfig checks the numbers of the model


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
class EvalConfig:
    """How the loss on held-out text is measured; it has no effect on the weights."""

    every: int = 100
    """Steps between two evaluations; 0 evaluates at the end only."""
    windows: int = 64
    """Windows of held-out text per evaluation, each as long as the model's context."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run of the text recipe; all but its data, model and eval is ``config.RunConfig``."""

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
    check_settings(config, TEXT_RANGES)
    try:
        GPTConfig(**asdict(config.model))
    except ValueError as error:
        raise ValueError(f"model: {error}") from None
    check(config)
    if config.parallel.strategy == "threads" and config.model.dropout:
        raise ValueError(
            f"model.dropout {config.model.dropout:g} with parallel.strategy threads, which share torch's "
            "random generator: set model.dropout 0, or use another strategy"
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
