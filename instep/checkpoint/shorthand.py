"""``instep.save`` and ``instep.load``: a module and its optimizer in one call, for a loop of your own.

A loop that can be stopped anywhere and started again:

    resumed = instep.load("checkpoints", model, optimizer)
    for step in range(resumed.step, 1000):
        ...
        instep.save("checkpoints", model, optimizer, step=step + 1)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from instep.checkpoint import contract, files
from instep.checkpoint import save as saving
from instep.checkpoint.load import Found, newest, restore_found
from instep.checkpoint.manifest import Json, Manifest, Scalar, differences
from instep.checkpoint.state import TrainingState
from instep.errors import CheckpointRejected
from instep.ordered.hash import SharedHash


@dataclass(frozen=True)
class Resumed:
    """What :func:`load` found; ``step`` is 0 and ``path`` None where there was no checkpoint yet."""

    step: int = 0
    data_cursor: int = 0
    extra: Mapping[str, Json] = field(default_factory=dict)
    path: Path | None = None
    rejected: tuple[str, ...] = ()  # why newer checkpoints were passed over
    differences: tuple[str, ...] = ()  # fields of the numerical configuration that changed since


def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    data_cursor: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    keep: int = 3,
    **extra: Json,
) -> Path:
    """Save ``model`` (any module, wrapped data-parallel or not) after ``step`` optimizer steps.

    Call it on every rank of a replicated model: rank 0 writes, the others return at once. A ``DataParallel``
    knows its rank; with another model pass ``rank`` and ``world_size``. A rank that reads the checkpoint in
    the same run needs a barrier in between. ``extra`` is JSON of your own (a scheduler's state, the loss);
    tuples come back as lists. The newest ``keep`` stay, at least two.

    Where weights or moments are sharded (:func:`instep.fully_shard`, :class:`instep.ShardedOptimizer`) every
    rank writes its part into one directory, which all have to see, and returns when the whole has been
    verified. Collective; ``rank`` and ``world_size`` are those of the sharding.

    Raises:
        ValueError: several shard groups have the moments (``instep.init(shard=N)``), and ``model`` is not the
            wrapper, which knows all of them.
        CheckpointRejected: what the ranks hold is not one whole state.
        FileExistsError: that step is there already, with another state.
        OSError: the directory cannot be written to.
    """
    state = TrainingState(model, optimizer)
    state.require_all_replicas()
    rank = state.everyone.rank if rank is None else rank
    if rank and not state.is_divided:
        return Path(directory) / files.step_name(step)
    draft = saving.draft(
        step=step,
        data_cursor=data_cursor,
        numerical=_numerical(state.module),
        world_size=state.everyone.size if state.is_divided else world_size or state.everyone.size,
        extra={"user": extra},
    )
    return saving.save(Path(directory), state, draft, keep=keep, timeout_s=state.group.timeout_s)


def load(directory: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> Resumed:
    """Load the newest checkpoint that verifies into ``model`` and ``optimizer``; every rank reads for itself.

    A wrapped or sharded model goes on counting its declared steps, which key the random numbers, where it was
    saved. Without any checkpoint nothing is touched and ``step`` is 0.

    Any number of ranks loads what any other has saved, sharded or not. Into what is sharded itself it is
    collective: each rank reads the part that it holds.

    Raises:
        CheckpointRejected: none verifies, or it is of another model or optimizer, and nothing has been
            changed; or the model or the optimizer changes what it is given.
    """
    state = TrainingState(model, optimizer)
    found = newest(Path(directory), state.group)
    if found is None:
        return Resumed()
    options = _require_shorthand(found.path, found.manifest)["optimizer"]
    restore_found(found, state)
    if (optimizer is None) == (options is None):
        _require_hash(found, state)
    state.drop_others_moments()
    state.resume_at(found.manifest.step)
    return Resumed(
        step=found.manifest.step,
        data_cursor=found.manifest.data_cursor,
        extra=found.manifest.extra["user"],
        path=found.path,
        rejected=tuple(reason for _, reason in found.rejected),
        differences=tuple(differences(found.manifest.numerical, _numerical(state.module))),
    )


def _numerical(model: nn.Module) -> dict[str, Scalar]:
    first = next(model.parameters(), torch.empty(0))
    return contract.describe(config={}, threads=torch.get_num_threads(), device=str(first.device))


def _require_shorthand(path: Path, manifest: Manifest) -> Mapping[str, Json]:
    if set(manifest.extra) != {"user", "optimizer"} or not isinstance(manifest.extra["user"], dict):
        raise CheckpointRejected(
            f"{path}: expected a checkpoint of instep.save, got one of another writer: resume with that, or "
            "read its tensors with instep.checkpoint.load.read_tensors"
        )
    return manifest.extra


def _require_hash(found: Found, state: TrainingState) -> None:
    digest, _ = SharedHash(state.group).digests(state.owned(state.hashed()), found.manifest.step)
    if digest != found.manifest.state_sha256:
        raise CheckpointRejected(
            f"{found.path}: expected hash {found.manifest.state_sha256[:12]}..., got {digest[:12]}... "
            "after loading: the model or the optimizer changes what it is given; load into plain ones"
        )
