"""What every run is told of itself, beside what it trains: a frozen dataclass per topic. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved."""

    every: int = 100
    """Steps between two checkpoints; 0 saves at the end only."""
    keep: int = 3
    """Newest checkpoints to keep; at least 2, because one bad block is enough to lose one."""


@dataclass(frozen=True, kw_only=True)
class ChecksConfig:
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
    """Steps from one that is made twice, its micro-batches on other ranks the second time, and compared, to
    the next; on three ranks or more, a rank that computes otherwise is named. 0: never."""


@dataclass(frozen=True, kw_only=True)
class LedgerConfig:
    """What steps.jsonl has for instep compare, beside a sample of the state at each step."""

    every: int = 50
    """Steps between two hashes of the whole state; 0: at the end only."""
    leaves: bool = False
    """Write down the hash of every micro-batch's gradient, so that instep compare can tell whether a gradient
    was computed otherwise, or only the sum."""


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """What every rank records of its time; instep report shows it."""

    events: int = 1 << 17
    """How many events each rank keeps, the last ones; a step has some 30 to 300, of 56 bytes each. 0: none
    on disk."""


@dataclass(frozen=True, kw_only=True)
class LogsConfig:
    """Where else the figures of steps.jsonl go, from rank 0."""

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
class ScriptLayout:
    """How the ranks of a script share a step, as its wrappers and optimizers say."""

    strategy: str = "none"
    shard_stage: int = 0
    bucket_mb: float = 0.0
    ordered: bool = True
    backend: str = "auto"
    threads: int = 1
    schedule: str = ""

    @property
    def named_backend(self) -> str | None:
        """The backend, or None where it was to be chosen."""
        return None if self.backend == "auto" else self.backend


@dataclass(frozen=True, kw_only=True)
class ScriptBatch:
    """The sizes of a loader's batches, 0 where there is none; and how many micro-batches a step has."""

    global_size: int = 0
    micro_size: int = 0
    num_micro_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class ScriptOptimizer:
    """The class of the first optimizer."""

    name: str = ""


@dataclass(frozen=True, kw_only=True)
class ScriptEvaluation:
    """When the run asks for the loss that the script has for it (``evaluate_with``)."""

    every: int = 0  # else before the first step and after the last


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """By which file a run was started, and what followed its name; "" where another command did."""

    script: str = ""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScriptSettings(ScriptCommand):
    """A run of a script, as ``config.toml`` has it."""

    steps: int = 0
    stop_after: int = 0
    seed: int = 0
    items: str = ""
    items_per_step: int = 0
    loss_unit: str = ""
    timeout_s: float = 300.0
    run_dir: Path | None = None
    resume: bool = False
    accept_contract: bool = False
    batch: ScriptBatch = field(default_factory=ScriptBatch)
    optim: ScriptOptimizer = field(default_factory=ScriptOptimizer)
    parallel: ScriptLayout = field(default_factory=ScriptLayout)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: ScriptEvaluation = field(default_factory=ScriptEvaluation)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)
