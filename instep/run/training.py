"""What trains, as far as a run has to do with it: a protocol, which knows no model, no data and no loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from torch import nn

from instep.checkpoint.state import TrainingState
from instep.mesh.mesh import Mesh
from instep.mesh.process_group import Group
from instep.ordered.hash import Sampled
from instep.replicate.gradient_hashes import GradientHashes
from instep.run.health import Health
from instep.run.rank_state import Made, RankState
from instep.run.timing import Timing


class Phases(Protocol):
    """Told in which phase of a step the main thread is."""

    def enter(self, phase: str) -> None:
        """A phase begins."""

    def set_step(self, step: int) -> None:
        """This rank has the state after ``step`` steps."""


class StepFigures(Protocol):
    """A dataclass of one step: every number in it is a figure, and goes to ``metrics.jsonl`` by its name.

    ``logged`` are further ones. The throughput is the one whose name ends in ``_per_s``: ``tokens_per_s``,
    ``samples_per_s``.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    loss: float
    rate: float
    norm: float
    step_ms: float
    exposed_ms: float
    waiting_ms: float
    skipped: str
    logged: dict[str, float]


class Training(Protocol):
    """What trains, on this rank, while it has a mesh."""

    command: str  # that makes the run, by whose words it speaks of settings: "instep run", "instep train"
    config: Any  # settings: steps, stop_after, parallel, and the topics that a run looks at
    mesh: Mesh
    group: Group  # the ranks that share out the batch
    generation: int
    state: TrainingState
    rank_state: RankState
    health: Health
    timing: Timing

    @property
    def settings(self) -> Any:
        """What its user has chosen, a dataclass."""

    @property
    def recorded(self) -> str:
        """``config.toml``: these settings."""

    @property
    def module(self) -> nn.Module:
        """All that is trained, without wrappers."""

    @property
    def contract(self) -> dict[str, Any]:
        """All that the bits of the run may depend on."""

    @property
    def seen(self) -> GradientHashes | None:
        """The hashes of the micro-batches of the last step, where they are asked for."""

    @property
    def steps_done(self) -> int:
        """Optimizer steps that the state is of."""

    @property
    def last(self) -> Made | None:
        """The step that led here."""

    @property
    def heartbeat(self) -> Phases:
        """Where the phases are told."""

    @property
    def canary(self) -> str:
        """The hash of what this process computes on one fixed example."""

    @property
    def cursor(self) -> int:
        """The global position in the stream of samples."""

    @property
    def owns(self) -> bool:
        """Whether this rank owns some of the state, or all: it takes part in its hash."""

    @property
    def loss_unit(self) -> str:
        """Such as "nats per byte"; "" for none."""

    @property
    def items_per_step(self) -> int:
        """What the throughput counts: tokens, samples."""

    @property
    def num_replicas(self) -> int:
        """How many share out the micro-batches."""

    @property
    def step_mode(self) -> str | None:
        """Which of the two contracts the last step was under."""

    def begin(self) -> None:
        """Take the state of before the first step. Collective where it is sharded."""

    def carried(self) -> dict[str, Any]:
        """What of the state is neither tensor nor option of an optimizer, as JSON."""

    def carry_on(self, carried: Mapping[str, Any]) -> None:
        """Go on from what ``carried`` has returned, here or elsewhere; there may be more in it."""

    def state_sha256(self) -> str:
        """The hash of the state."""

    def state_digests(self) -> tuple[str, dict[str, str]]:
        """``state_sha256``, and the short hash of each entry."""

    def sampled(self, every: int) -> list[Sampled]:
        """The blocks of the state whose turn it is, one in ``every``."""

    def compare_replicas(self) -> None:
        """Raise ``ReplicasDiffer`` unless ranks that hold the same shards hold the same bits. Collective."""

    def evaluate(self) -> float | None:
        """The loss over what is held out; None where that is the script's own. Collective."""

    def memory_usage(self) -> Any:
        """``MemoryUsage`` of this rank."""

    def activations(self) -> int | None:
        """Bytes that a forward keeps for its backward; None where that is not known."""

    def memory_estimate(self) -> dict[str, int | float] | None:
        """Bytes of a rank as the formulas have them; None where there are none."""
