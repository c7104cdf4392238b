"""What a run was told that advice on it depends on, as it stands in the head of a rank's trace file. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from instep.timeline.predict import OVERLAPPING

MOST = 1 << 40  # of anything that a setting counts


@dataclass(frozen=True)
class RunSetting:
    """What the run was told."""

    strategy: str
    backend: str
    world_size: int
    ranks_per_host: int  # that share cores
    hosts: int  # that share no memory
    threads: int  # per rank
    cores: int  # of a host
    bucket_mb: float  # the cap, in 2**20 bytes; 0: not one number, or chosen later
    num_leaves: int  # micro-batches per step, of all ranks; 0: unknown
    micro_size: int = 0  # samples in one; 0: unknown
    pp: int = 1  # ranks of a pipeline
    model_ranks: int = 1  # that compute a micro-batch together, along tp and ep
    schedule: str = ""  # of a pipeline; "": there is none
    device: str = "cpu"
    num_workers: int = 0  # processes that read for a rank
    cuts: str | Sequence[int] = ""  # what a pipeline is cut by, or where: its stages' first layers

    @property
    def data_ranks(self) -> int:
        """Among which the micro-batches are shared out."""
        return self.world_size // (self.pp * self.model_ranks)

    @property
    def overlaps(self) -> bool:
        return self.strategy in OVERLAPPING


def setting_of(found: Any) -> RunSetting | None:
    """The ``RunSetting`` in the head of a file; None if it is not whole, or cannot be."""
    if not isinstance(found, Mapping):
        return None
    known = {field.name: found[field.name] for field in fields(RunSetting) if field.name in found}
    needed = {field.name for field in fields(RunSetting) if field.default is MISSING}
    if needed - known.keys() or not all(_can_be(name, value) for name, value in known.items()):
        return None
    setting = RunSetting(**known)
    return setting if setting.pp * setting.model_ranks <= setting.world_size else None


def _can_be(name: str, value: object) -> bool:
    if name in ("strategy", "backend", "schedule", "device") or (name == "cuts" and isinstance(value, str)):
        return isinstance(value, str)
    if name == "cuts":
        return isinstance(value, list) and all(type(x) is int and 1 <= x <= MOST for x in value)
    if isinstance(value, bool) or not isinstance(value, int | float if name == "bucket_mb" else int):
        return False
    least = 0 if name in ("bucket_mb", "num_leaves", "micro_size", "num_workers") else 1
    return least <= value <= MOST
