"""The settings of a run: one frozen dataclass, a topic of it per table of ``config.toml``. Pure.

``RunConfig`` is what ``instep run`` has flags for, what ``instep.Run`` is told, and the base of the settings
of ``instep train``. ``ScriptConfig`` adds what a script, its wrappers, optimizers and loaders say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from instep.run.toml import ABOVE_0, FROM_0, FROM_2, Range

Count = Annotated[int, FROM_0]
Positive = Annotated[int, ABOVE_0]
SHARD = Range("1 or more, or -1 for all ranks", lambda number: number >= 1 or number == -1)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the ranks are arranged and exchange, as in instep.init."""

    backend: Literal["auto", "gloo", "shm", "nccl"] = "auto"
    """Transport of messages; auto: nccl if every rank has a GPU, else shm if all ranks share a host,
    else gloo."""
    device: str = "auto"
    """cpu; cuda, a GPU per rank; or cuda:0, one GPU for all ranks, over gloo. auto: cuda if there are GPUs
    that the backend can use."""
    threads: Positive = 1
    """Threads per rank on a CPU."""
    pp: Positive = 1
    """Ranks per pipeline, each with some of the layers."""
    tp: Positive = 1
    """Ranks that share layers, each with a part of them."""
    ep: Positive = 1
    """Ranks that share the experts of a layer."""
    shard: Annotated[int, SHARD] = 1
    """Ranks per shard group, which together have one copy of the sharded state; 1: all ranks are one group.
    Best is the number of ranks per host."""
    deterministic: bool = False
    """On GPUs, set the switches for the same bits before CUDA starts."""

    @property
    def named_backend(self) -> str | None:
        """The backend, or None where it is to be chosen."""
        return None if self.backend == "auto" else self.backend

    @property
    def named_device(self) -> str | None:
        """The device, or None where it is to be chosen."""
        return None if self.device == "auto" else self.device


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved."""

    every: Count = 100
    """Steps between two checkpoints; 0: at the end only."""
    keep: Annotated[int, FROM_2] = 3
    """Newest checkpoints to keep."""
    frozen: bool = True
    """Write frozen parameters, too. Without them a checkpoint of adapters has megabytes, and the script that
    resumes has to build the same base model."""
    best: str = ""
    """Keep the best checkpoint, too, by this figure: val_loss, or max:val_acc if more is better. It is
    saved after the step that logs the figure."""


@dataclass(frozen=True, kw_only=True)
class ChecksConfig:
    """Checks during training. Only spike and skip-steps may change the bits."""

    max_skipped: Count = 5
    """Steps in a row that may be skipped because their gradient is not finite or a spike; one more ends the
    run."""
    spike: Annotated[float, FROM_0] = 0.0
    """Skip a step whose gradient norm is this many median absolute deviations above the median of the last
    ones; 0: never. With one optimizer."""
    skip_steps: Annotated[tuple[int, ...], FROM_0] = ()
    """Steps, counted from 0, that read their samples and leave the weights alone."""
    replicas_every: Count = 50
    """Steps between two comparisons of all ranks' weights and moments; 0: never."""
    replay_every: Count = 0
    """Replay one step in N, its micro-batches on other ranks the second time, and compare the two; on three
    ranks or more, the rank that computes differently is named. 0: never."""


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """Records in the run directory, besides a line per step."""

    hash_every: Count = 50
    """Hash the full state every N steps, for instep compare; 0: at the end only."""
    leaves: bool = False
    """Hash every micro-batch's gradient, so that instep compare can tell a different gradient from a
    different sum."""
    events: Count = 1 << 17
    """Last events that each rank keeps for instep report; a step has some 30 to 300, of 56 bytes each. 0:
    none on disk."""
    tensorboard: bool = False
    """Log to tensorboard/ in the run directory, too; needs instep[tensorboard]."""
    wandb: str = ""
    """Log to this Weights & Biases project, too, offline without a key; needs instep[wandb]."""

    @property
    def loggers(self) -> list[str]:
        """Those that were asked for."""
        return [name for name in ("tensorboard", "wandb") if getattr(self, name)]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run, whatever it trains."""

    ranks: Count = 0
    """Ranks (processes) to start on this host; 0: one per GPU, or per core. Under torchrun, Slurm or mpirun
    their number is the launcher's."""
    run_dir: Path | None = None
    """Directory of the run; by default a new one in runs/."""
    resume: bool = False
    """Resume the run in --run-dir from its newest checkpoint that verifies."""
    accept_contract: bool = False
    """Resume although the contract (libraries, processor: all that bits depend on) has changed; the record
    says where. A change of code or of the number of steps is noted; other settings stay those of the run."""
    min_ranks: Count = 0
    """Minimum number of ranks to keep training while one is replaced; 0: wait for the replacement."""
    stop_after: Count = 0
    """Checkpoint and exit with code 75 after this step; 0: train to the end."""
    fault: tuple[str, ...] = ()
    """Inject a fault, to watch a recovery: kill:rank=1,step=12,phase=exchange, or a slow rank:
    slow:rank=1,step=20,steps=100,phase=data,seconds=0.03. May be given several times."""
    timeout_s: Annotated[float, ABOVE_0] = 300.0
    """Seconds that a rank may keep the others waiting before it is replaced or the run ends."""
    seed: Count = 0
    """Seed of a step's random numbers: dropout, noise, the order of the data if the script uses it."""
    parallel: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    record: RecordConfig = field(default_factory=RecordConfig)


@dataclass(frozen=True, kw_only=True)
class ScriptRecord(RecordConfig):
    """What the figures of a script are of."""

    items: str = ""
    """What the throughput counts, such as tokens; by default samples, or steps without a loader."""
    items_per_step: Count = 0
    """How many of these items a step has."""
    loss_unit: str = ""
    """Unit of the loss, where it is shown."""


@dataclass(frozen=True, kw_only=True)
class ScriptLayout(MeshConfig):
    """How the ranks of a script share a step, as its wrappers and optimizers say."""

    strategy: str = "none"
    shard_stage: int = 0
    bucket_mb: float = 0.0
    ordered: bool = True
    schedule: str = ""
    cuts: str | tuple[int, ...] = ""


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
    """What a run was started by: a file, or a ``module`` (``-m``), and what followed its name; "" where
    another command did."""

    script: str = ""
    module: str = ""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScriptConfig(ScriptCommand, RunConfig):
    """A run of a script, as ``config.toml`` has it."""

    steps: int = 0
    parallel: ScriptLayout = field(default_factory=ScriptLayout)
    record: ScriptRecord = field(default_factory=ScriptRecord)
    batch: ScriptBatch = field(default_factory=ScriptBatch)
    optim: ScriptOptimizer = field(default_factory=ScriptOptimizer)
    eval: ScriptEvaluation = field(default_factory=ScriptEvaluation)
