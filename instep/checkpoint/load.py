"""Find a checkpoint that can be trusted, say why newer ones cannot, and read its tensors.

Nothing points to "the latest": a pointer can be newer than what it points to. The directory is scanned,
newest first, and the first checkpoint whose every file has the hash that its manifest says is taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from instep.checkpoint import files, manifest, pieces, ranges, tensors
from instep.checkpoint.manifest import FileRecord, Manifest
from instep.errors import CheckpointRejected


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that verifies, and the newer ones that did not, each with the reason."""

    path: Path
    manifest: Manifest
    rejected: list[tuple[Path, str]] = field(default_factory=list)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in directory ``path``, believed only as far as its own hash goes."""
    file_path = path / manifest.MANIFEST_FILE
    with _reading(file_path), files.open_regular(file_path) as file:
        data = file.read(manifest.MAX_BYTES + 1)
    return manifest.parse(data, file_path)


def measure(path: Path) -> Manifest:
    """Check the manifest, the step in the directory's name, and that every file is there in its size."""
    found = read_manifest(path)
    step = files.step_of(path.name)
    if step is not None and step != found.step:
        raise CheckpointRejected(
            f"{path}: expected step {step} by its name, got {found.step} in its manifest"
        )
    for name, record in found.files.items():
        _measure_file(path / name, record)
    return found


def verify(path: Path) -> Manifest:
    """Check what :func:`measure` does, then the SHA-256 of every file and the headers of the tensor files.

    Raises CheckpointRejected, which says which file is wrong and in what.
    """
    return verify_share(path, 0, 1)


def verify_share(path: Path, share: int, num_shares: int) -> Manifest:
    """As :func:`verify`, but of the hashes only every ``num_shares``-th: others look at the rest."""
    found = measure(path)
    for name in sorted(found.files)[share::num_shares]:
        _verify_hash(path / name, found.files[name])
    ranges.source(path, found)
    return found


def source(path: Path) -> pieces.Source:
    """The state in checkpoint ``path``, sharded or not, to be read range by range.

    Only names and shapes are compared: :func:`verify` first, or a hash of what was read afterwards.
    """
    return ranges.source(path, read_manifest(path))


def _measure_file(path: Path, record: FileRecord) -> None:
    with _reading(path), files.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != record.bytes:
        raise CheckpointRejected(
            f"{path}: expected {record.bytes} bytes, got {size}: cut off or replaced; take another checkpoint"
        )


def _verify_hash(path: Path, record: FileRecord) -> None:
    with _reading(path):
        digest = files.sha256(path)
    if digest != record.sha256:
        raise CheckpointRejected(
            f"{path}: expected sha256 {record.sha256[:12]}..., got {digest[:12]}...: changed after it was "
            "written; take another checkpoint"
        )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointRejected(
            f"{path}: cannot be read ({error.strerror}): restore it, or take another checkpoint"
        ) from error


def newest(directory: Path) -> Found | None:
    """The newest checkpoint in ``directory`` that verifies; None if there is no checkpoint at all.

    If there are some and none verifies, CheckpointRejected with every reason: better a run that stops than
    one that silently starts from nothing.
    """
    rejected: list[tuple[Path, str]] = []
    for _, path in files.step_directories(Path(directory)):
        try:
            return Found(path, verify(path), rejected)
        except CheckpointRejected as error:
            rejected.append((path, str(error)))
    if not rejected:
        return None
    raise none_verifies(directory, rejected)


def none_verifies(directory: Path, rejected: list[tuple[Path, str]]) -> CheckpointRejected:
    """There are checkpoints, and each was ``rejected`` for its reason."""
    reasons = "\n  ".join(reason for _, reason in rejected)
    return CheckpointRejected(
        f"{directory}: expected a checkpoint that verifies, got {len(rejected)} that do not: restore one, or "
        f"start in an empty directory\n  {reasons}"
    )


def layout(path: Path, file: str) -> tensors.Layout:
    """What ``file`` of checkpoint ``path`` holds, by its header: shape and dtype of each tensor.

    Of a sharded checkpoint, what all of the files hold together that stand for ``file``.
    """
    found = _vouched(Path(path), file)
    if found.pieces is not None:
        return ranges.source(path, found).contents(_kind(file)).layout
    return tensors.contents(path / file).layout


def read_tensors(path: Path, file: str, expected: tensors.Layout) -> dict[str, Tensor]:
    """The tensors of ``file`` in checkpoint ``path``; see :func:`instep.checkpoint.tensors.read`.

    Those of a sharded checkpoint are put together. CheckpointRejected for a file that the manifest does not
    name: nobody has checked its hash.
    """
    found = _vouched(Path(path), file)
    if found.pieces is None:
        return tensors.read(path / file, expected)
    whole, kind = ranges.source(path, found), _kind(file)
    tensors.require_expected(path, whole.contents(kind), expected)
    return {name: whole.whole(kind + whole.ties.get(name, name)) for name in expected}


def _kind(file: str) -> str:
    return file.removesuffix(".safetensors") + ":"


def _vouched(path: Path, file: str) -> Manifest:
    if not files.PLAIN_NAME.fullmatch(file):
        raise ValueError(f"expected the plain name of a file in {path}, got {file!r}")
    found = read_manifest(path)
    known = found.files if found.pieces is None else ("model.safetensors", "optimizer.safetensors")
    if file not in known:
        raise CheckpointRejected(
            f"{path}: expected {file} among the files of its manifest, got {', '.join(known) or 'none'}: "
            "take another checkpoint"
        )
    return found
