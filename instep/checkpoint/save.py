"""Save a checkpoint: tensors and manifest, published whole, read back, and only then older ones deleted.

The order is the point. A run is never without a checkpoint that verifies: what exists is not touched until
the new one has been read back from the disk, and then only what is older than the newest ``keep``.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from instep.checkpoint import files, load, tensors
from instep.checkpoint.manifest import MANIFEST_FILE, FileRecord, Json, Manifest, Scalar
from instep.errors import CheckpointRejected

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
LEAST_KEPT = 2
NOT_YET = "0" * 64  # in a draft: the hash of a state that is still to be hashed


def save(
    directory: Path,
    *,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    data_cursor: int,
    state_sha256: str,
    numerical: Mapping[str, Scalar],
    world_size: int,
    extra: Mapping[str, Json] | None = None,
    keep: int = 3,
) -> Path:
    """Write ``directory/step-<step>`` and return its path once it has been verified on the disk.

    ``optimizer`` is any flat dictionary, by convention ``"exp_avg/block.0.weight"``.

    Nothing is ever overwritten. If the step is there already, the same state counts as saved, another state
    is a FileExistsError, and what does not verify is first renamed to ``step-<step>.rejected-<random>``. An
    OSError (disk full, read-only) names the path and leaves the checkpoints as they were.
    """
    require_keep(keep)
    plan = draft(
        step=step,
        data_cursor=data_cursor,
        state_sha256=state_sha256,
        numerical=numerical,
        world_size=world_size,
        extra=extra,
    )
    return write(Path(directory), plan, model, optimizer, keep)


def require_keep(keep: int) -> None:
    """ValueError for a ``keep`` that would leave too few."""
    if keep < LEAST_KEPT:
        raise ValueError(
            f"expected keep of at least {LEAST_KEPT}, got {keep}: a single one can be lost to one bad block"
        )


def draft(
    *,
    step: int,
    data_cursor: int,
    state_sha256: str,
    numerical: Mapping[str, Scalar],
    world_size: int,
    extra: Mapping[str, Json] | None,
) -> Manifest:
    """The manifest of a checkpoint that has no files yet; ValueError names a field that cannot be written."""
    return Manifest(
        step=step,
        data_cursor=data_cursor,
        state_sha256=state_sha256,
        world_size=world_size,
        numerical=dict(numerical),
        versions=_versions(),
        files={},
        extra=dict(extra or {}),
    )


def write(
    directory: Path,
    draft: Manifest,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    keep: int,
) -> Path:
    """What :func:`save` does once its arguments have been found sound."""
    files.make_directory(directory)
    path = directory / files.step_name(draft.step)
    if not is_saved(path, draft):
        contents = {MODEL_FILE: model, OPTIMIZER_FILE: optimizer}
        files.publish(directory, path.name, lambda temporary: _write(temporary, draft, contents))
        load.verify(path)
    prune(path, keep)
    files.remove_stale(directory)
    return path


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": version("safetensors"),
    }


def _write(path: Path, draft: Manifest, contents: Mapping[str, Mapping[str, Tensor]]) -> None:
    records = {}
    for name, named in contents.items():
        tensors.write(path / name, named)
        records[name] = FileRecord((path / name).stat().st_size, files.sha256(path / name))
    files.write_file(path / MANIFEST_FILE, replace(draft, files=records).to_bytes())


def is_saved(path: Path, draft: Manifest) -> bool:
    """Whether ``path`` is this very checkpoint; one that does not verify is moved out of the way."""
    if not path.is_dir() or path.is_symlink():
        return False
    try:
        found = load.verify(path)
    except CheckpointRejected:
        files.set_aside(path)
        return False
    same = _without_placement(found) == _without_placement(draft)
    if same:
        files.sync(path.parent)  # whoever published it may have died before
    return same


def _without_placement(manifest: Manifest) -> bytes:
    return replace(manifest, files={}, versions={}, world_size=1, pieces=None).to_bytes()


def prune(path: Path, keep: int) -> list[Path]:
    """Delete the checkpoints older than ``path``, which has just been verified, once ``keep`` are whole.

    Whole means that the sizes are right, and for the first one besides ``path`` the hashes too, so that two
    good ones stay whatever happens. Directories without a manifest of ours are never touched.
    """
    whole, deleted = 0, []
    for step, other in files.step_directories(path.parent):
        if step > (files.step_of(path.name) or 0):
            continue
        if whole >= keep and _is_ours(other):
            files.remove(other)
            deleted.append(other)
        elif whole < keep:
            whole += other == path or _is_whole(other, hashes=whole < LEAST_KEPT)
    return deleted


def _is_whole(path: Path, *, hashes: bool) -> bool:
    try:
        load.verify(path) if hashes else load.measure(path)
    except CheckpointRejected:
        return False
    return True


def _is_ours(path: Path) -> bool:
    try:
        load.read_manifest(path)
    except CheckpointRejected:
        return False
    return True
