"""``instep.save`` and ``instep.load``: a module and its optimizer in one call, for a loop of your own.

A loop that can be stopped anywhere and started again:

    resumed = instep.load("checkpoints", model, optimizer)
    for step in range(resumed.step, 1000):
        ...
        instep.save("checkpoints", model, optimizer, step=step + 1)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from instep.checkpoint import contract, files, shards, state, whole
from instep.checkpoint import load as loading
from instep.checkpoint import save as saving
from instep.checkpoint.manifest import Json, Manifest, Scalar
from instep.checkpoint.owned import Holding, holding, require_all_rows
from instep.checkpoint.plan import plan, together
from instep.checkpoint.reload import newest, reload_found
from instep.errors import CheckpointRejected
from instep.ordered.hash import state_entries, state_sha256
from instep.replicate.wrapper import DataParallel
from instep.shard.sharding import Sharding


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
    knows its rank; with another model pass ``rank`` and ``world_size``. Whoever reads the checkpoint in the
    same run needs a barrier in between. ``extra`` is JSON of your own (a scheduler's state, the loss); tuples
    come back as lists. The newest ``keep`` stay, at least two.

    Where weights or moments are sharded (:func:`instep.fully_shard`, :class:`instep.ShardedOptimizer`) every
    rank writes its part into one directory, which all have to see, and returns when the whole has been
    verified. Collective; ``rank`` and ``world_size`` are those of the sharding.

    Raises:
        ValueError: rows of ranks have the moments (``instep.init(shard=N)``), and ``model`` is not the
            wrapper, which knows all of them.
    """
    path = Path(directory) / files.step_name(step)
    if (division := holding(model, optimizer)) is not None:
        require_all_rows(division, optimizer)
        return _save_sharded(Path(directory), model, optimizer, division, step, data_cursor, keep, extra)
    if isinstance(model, DataParallel):
        rank = model.group.rank if rank is None else rank
        world_size = world_size or model.group.size
    if rank:
        return path
    parts = whole.collect(model, optimizer)
    return saving.save(
        Path(directory),
        step=step,
        model=parts.model,
        optimizer=parts.optimizer,
        data_cursor=data_cursor,
        state_sha256=_hash(model, optimizer, step),
        numerical=_numerical(model),
        world_size=world_size or 1,
        extra={"user": extra, "optimizer": parts.rest},
        keep=keep,
    )


def _save_sharded(
    directory: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    division: Holding,
    step: int,
    data_cursor: int,
    keep: int,
    extra: Mapping[str, Json],
) -> Path:
    group, path = division.group, directory / files.step_name(step)
    made = plan(model, optimizer, division, path)
    draft = saving.draft(
        step=step,
        data_cursor=data_cursor,
        state_sha256=saving.NOT_YET,
        numerical=_numerical(model),
        world_size=group.size,
        extra={"user": dict(extra), "optimizer": made.rest},
    )
    saving.require_keep(keep)
    if made.exists and shards.already_saved(directory, draft, made, group):
        return path
    wait = shards.Wait(group.timeout_s, threading.Event())
    together(
        group,
        "the end of a save",
        lambda: shards.write(directory, draft, made, keep, wait),
        lambda written: b"",
    )
    return path


def load(directory: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> Resumed:
    """Load the newest checkpoint that verifies into ``model`` and ``optimizer``; every rank reads for itself.

    A wrapped or sharded model goes on counting its declared steps, which key the random numbers, where it was
    saved.
    Without any checkpoint nothing is touched and ``step`` is 0. CheckpointRejected if none verifies, or if it
    is of another model or optimizer; then nothing has been changed either.

    Any number of ranks loads what any other has saved, sharded or not. Into
    what is sharded itself it is collective: each rank reads the part that it holds.
    """
    division = holding(model, optimizer)
    found = loading.newest(Path(directory)) if division is None else newest(Path(directory), division.group)
    if found is None:
        return Resumed()
    rest = _require_shorthand(found.path, found.manifest)["optimizer"]
    if division is not None:
        reload_found(found, model, optimizer, division)
    else:
        whole.restore(found, model, optimizer)
        if (optimizer is None) == (rest is None):
            _require_hash(found, model, optimizer)
    if isinstance(model, DataParallel):
        model.next_step = found.manifest.step
    elif isinstance(sharding := getattr(model, "sharding", None), Sharding):
        sharding.next_step = found.manifest.step
    return Resumed(
        step=found.manifest.step,
        data_cursor=found.manifest.data_cursor,
        extra=found.manifest.extra["user"],
        path=found.path,
        rejected=tuple(reason for _, reason in found.rejected),
        differences=tuple(contract.differences(found.manifest.numerical, _numerical(model))),
    )


def _hash(model: nn.Module, optimizer: Optimizer | None, step: int) -> str:
    return state_sha256(state_entries(state.unwrapped(model), optimizer), step)


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


def _require_hash(found: loading.Found, model: nn.Module, optimizer: Optimizer | None) -> None:
    digest = _hash(model, optimizer, found.manifest.step)
    if digest != found.manifest.state_sha256:
        raise CheckpointRejected(
            f"{found.path}: expected hash {found.manifest.state_sha256[:12]}..., got {digest[:12]}... "
            "after loading: the model or the optimizer changes what it is given; load into plain ones"
        )
