"""What advice is made from, the figures of one run, and what it is, a sentence with a gain. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from instep.events import GRADIENT_SYNC
from instep.timeline.breakdown import RankBreakdown
from instep.timeline.buckets import BucketRow
from instep.timeline.straggler import Slow

COMPUTE, EXPOSED, WAITING = "compute", "exposed communication", "waiting for a slower rank"
DATA, UPDATE, HOST = "waiting for data", "update", "host"
ADAMW_BYTES = 28  # moved per parameter: reads p, g, m, v, writes p, m, v, four bytes each
ASSUMED_BYTES_PER_S = 5e9  # of a rank's share of the memory, where no update shows it


@dataclass(frozen=True)
class Advice:
    """One thing to do.

    ``cause``: "slow rank", "loader", "threads", "uneven", "strategy", "giant bucket", "tiny buckets", "gloo",
    "slow link" or "accumulate".
    """

    cause: str
    text: str  # the cause in a sentence, and what to do about it
    gain_ms: float  # per step
    gain_share: float  # of the median step
    try_: str  # what to run; "" if it is no flag
    how: str  # how the gain was predicted
    changes_training: bool = False  # and not only how the same training is done


@dataclass(frozen=True)
class Setting:
    """What the run was told."""

    strategy: str
    backend: str
    world_size: int
    ranks_per_host: int  # that share cores
    hosts: int  # that share no memory
    threads: int  # per rank
    cores: int  # of a host
    bucket_mb: float  # the cap, in 2**20 bytes
    num_leaves: int  # micro-batches per step, of all ranks; 0: unknown
    micro_size: int = 0  # samples in one; 0: unknown

    @property
    def overlaps(self) -> bool:
        return self.strategy in ("overlap", "bucketed")


@dataclass(frozen=True)
class Facts:
    """What one run measured. ``backward_s`` is the median backward of a last micro-batch."""

    breakdowns: Sequence[RankBreakdown]
    buckets: Sequence[BucketRow]
    slow: Slow | None
    setting: Setting
    backward_s: float
    optimizer: str
    num_parameters: int
    slowdown: float | None

    @property
    def step_s(self) -> float:
        """The median step."""
        return median(row.median_s for row in self.breakdowns)

    @property
    def others(self) -> list[RankBreakdown]:
        """All ranks but the slow one."""
        return [row for row in self.breakdowns if self.slow is None or row.rank != self.slow.rank]

    def part_s(self, *parts: str) -> float:
        """Seconds of the median step on ``parts``: the median of the ranks that are not slow."""
        rows = self.others or self.breakdowns
        return median(sum(row.parts.get(part, 0.0) for part in parts) * _typical(row) for row in rows)

    @property
    def waited_s(self) -> float:
        """Seconds per step that the others wait for the slow rank, some of it perhaps as a message's time."""
        return 0.0 if self.slow is None else min(self.slow.excess_s, self.part_s(WAITING, EXPOSED))

    @property
    def sync_s(self) -> float:
        """Seconds per step of exposed exchanges of gradients, without waiting for the slow rank."""
        rows = self.others or self.breakdowns
        measured_s = median(row.causes.get(GRADIENT_SYNC, 0.0) * _typical(row) for row in rows)
        return max(measured_s - max(self.waited_s - self.part_s(WAITING), 0.0), 0.0)

    @property
    def other_messages_s(self) -> float:
        """Seconds per step that ranks wait for messages other than gradients, such as the loss."""
        return max(self.part_s(EXPOSED) - self.sync_s - max(self.waited_s - self.part_s(WAITING), 0.0), 0.0)

    @property
    def measured_memory(self) -> bool:
        """Whether the update shows how fast the memory is."""
        return self.optimizer == "adamw" and self.part_s(UPDATE) > 0 and self.num_elements > 0

    @property
    def memory_bytes_per_s(self) -> float:
        """A rank's share of the memory's rate: all ranks update at once."""
        if not self.measured_memory:
            return ASSUMED_BYTES_PER_S
        return ADAMW_BYTES * self.num_elements / self.part_s(UPDATE)

    @property
    def num_elements(self) -> int:
        """Of all parameters; where nobody says, as many as the buckets have of four bytes."""
        return self.num_parameters or sum(row.bytes for row in self.buckets) // 4

    def advice(
        self,
        cause: str,
        gain_s: float,
        text: str,
        how: str,
        try_: str = "",
        *,
        changes_training: bool = False,
    ) -> Advice:
        """What may gain ``gain_s`` per step."""
        return Advice(cause, text, gain_s * 1e3, gain_s / self.step_s, try_, how, changes_training)

    def with_leaves(self, num_leaves: int) -> str:
        """The flag for so many micro-batches per step."""
        size = self.setting.micro_size
        return f"--batch.global-size {num_leaves * size}" if size and num_leaves else ""


def _typical(row: RankBreakdown) -> float:
    """The median step by the mean one, which single long steps have made longer."""
    return row.median_s / row.wall_s if row.wall_s > 0 else 1.0


def in_ms(seconds: float) -> str:
    """Seconds as a reader likes to see them: "41 ms", "4.1 ms"."""
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def in_percent(share: float) -> str:
    """A share as a reader likes to see it: "12 %"."""
    return f"{share:.0%}".replace("%", " %")
