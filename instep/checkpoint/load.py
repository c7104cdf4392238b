"""Find a checkpoint that can be trusted, say why newer ones cannot, and give a state what is in it.

No pointer names "the latest": it could be newer than what it points to. The directory is scanned, newest
first, and the first checkpoint whose every file has the hash that its manifest says is taken. Of each tensor,
a rank reads the elements that it is to hold, and nothing is changed before all ranks have read theirs and,
where the hash of the whole is known, have it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from instep.checkpoint import files, manifest, tensors
from instep.checkpoint.manifest import FileRecord, Json, Manifest, parse_json
from instep.checkpoint.owner import require_own
from instep.checkpoint.state import TrainingState
from instep.checkpoint.tensors import Contents
from instep.errors import CheckpointRejected
from instep.net.agree import all_or_none, all_tell, on_first_rank, raise_on_all
from instep.net.process_group import Group, alone
from instep.state.hash import SharedHash
from instep.state.shards import KINDS, MODEL, held_shape
from instep.state.stored import Extent, Source, StoredTensor, stored_from_json

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that verifies, and the newer ones that did not, each with the reason."""

    path: Path
    manifest: Manifest
    rejected: list[tuple[Path, str]] = field(default_factory=list)


def newest(
    directory: Path, group: Group | None = None, *, published: bool = False, best: bool = False
) -> Found | None:
    """The newest checkpoint in ``directory`` that verifies; None if there is no checkpoint at all.

    With ``best`` the newest of those that were the best so far, when they were saved.

    It has to be this user's or root's; with ``published`` that of the directory's owner will do, too.

    With ``group``, the same for all of its ranks, which share the reading: each compares every W-th file with
    its hash. Collective over it.

    If there are some and none verifies, CheckpointRejected with every reason: better a run that stops than
    one that silently starts from nothing.
    """
    group = group or alone()
    rejected: list[tuple[Path, str]] = []

    def names() -> list[str]:
        found = (path for _, path in files.step_directories(Path(directory)))
        return [str(path) for path in found if not best or _is_best(path)]

    named = on_first_rank(group, "the list of checkpoints", names, errors=(CheckpointRejected,))
    for path in map(Path, named):
        try:
            return Found(path, _verify_together(path, group, published=published), rejected)
        except CheckpointRejected as error:
            rejected.append((path, str(error)))
    if not rejected:
        return None
    reasons = "\n  ".join(reason for _, reason in rejected)
    problem = (
        f"{directory}: expected a checkpoint that verifies, got {len(rejected)} that do not: restore one, or "
        f"start in an empty directory\n  {reasons}"
    )
    raise_on_all(group, CheckpointRejected(problem))


def _is_best(path: Path) -> bool:
    try:
        return read_manifest(path).is_best
    except CheckpointRejected:
        return False


def _verify_together(path: Path, group: Group, *, published: bool) -> Manifest:
    def mine() -> Manifest:
        require_own(path, published=published)
        return verify(path, group.rank, group.size)

    found, told = all_tell(
        group,
        f"the verification of {path.name}",
        mine,
        lambda found: hashlib.sha256(found.to_bytes()).digest(),
        errors=(CheckpointRejected,),
    )
    if len(set(told)) > 1:
        problem = f"{path}: expected the same on all ranks, got several: share a file system"
        raise_on_all(group, CheckpointRejected(problem))
    return found


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in directory ``path``, believed only as far as its own hash goes."""
    file_path = path / manifest.MANIFEST_FILE
    with _reading(file_path), files.opened(file_path) as file:
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


def verify(path: Path, share: int = 0, num_shares: int = 1) -> Manifest:
    """Check what :func:`measure` does, then the SHA-256 of every file and the headers of the tensor files.

    Of the hashes only every ``num_shares``-th, from ``share`` on, where other ranks look at the rest.

    Raises CheckpointRejected, which says which file is wrong and in what.
    """
    found = measure(path)
    for name in sorted(found.files)[share::num_shares]:
        _verify_hash(path / name, found.files[name])
    open_source(path, found)
    return found


def _measure_file(path: Path, record: FileRecord) -> None:
    with _reading(path), files.opened(path) as file:
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


def restore_found(
    found: Found, state: TrainingState, group: Group | None = None, source: Source | None = None
) -> None:
    """Give ``state`` the checkpoint that was ``found``, in place, from ``source``, by default its files.

    Collective over ``group``, the ranks that load together; by default ``state.group``.

    Raises:
        CheckpointRejected: on every rank, and nothing has changed: it is of another model or optimizer, a
            rank cannot read its part, or it does not have the hash that was saved.
    """

    def opened() -> Source:
        return source or open_source(found.path, found.manifest)

    group = group or state.group
    source = all_or_none(group, "the opening of a checkpoint", opened, errors=(CheckpointRejected,))
    options = found.manifest.extra.get("optimizer")
    try:
        sha256 = found.manifest.state_sha256 if state.is_all_of(options) else None
        restore(state, source, options, found.manifest.step, sha256, group)
    except CheckpointRejected as error:
        error.args = (f"{found.path}: {error}",)
        raise


def restore(
    state: TrainingState,
    source: Source,
    options: Json,
    step: int,
    sha256: str | None,
    group: Group | None = None,
) -> None:
    """Give ``state`` what is in ``source``, in place. Collective as above; raises as above."""
    group = group or state.group
    errors = (CheckpointRejected,)
    values = all_or_none(group, "the reading of a state", lambda: state.read(source, options), errors=errors)

    def check() -> None:
        if (
            sha256 is None and not source.frozen
        ):  # no hash to compare: the checkpoint has more than this state
            return
        digest, parts = SharedHash(state.group).digests(state.owned(values), step)
        other = [name for name, saved in source.frozen.items() if parts[name] != saved]
        if other:
            raise CheckpointRejected(
                f"it was saved without {len(source.frozen)} frozen weights, and {len(other)} of them have "
                f"other values in this model, {other[0]!r} first: build the base model that it was trained "
                "with"
            )
        if sha256 is not None and digest != sha256:
            raise CheckpointRejected(
                f"expected a state of hash {sha256[:12]}..., got {digest[:12]}... in what was read: "
                "altered; take another checkpoint"
            )

    all_or_none(group, "the hashing of a state", check, errors=errors)
    state.put(values, options)
    state.resume_at(step, options)


# A checkpoint's files as places of elements.


class FileReader:
    """One safetensors file; ``kind`` is what its names are called by in the state."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.contents: Contents = tensors.contents(path)  # which is sound, or this raises
        header = tensors.bounded_header(path)
        entries = parse_json(header, tensors.MAX_HEADER_BYTES)
        begin = 8 + len(header)
        self._starts = {name: begin + entries[name]["data_offsets"][0] for name in self.contents.layout}

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        """As ``stored.Reader``; CheckpointRejected if the file ends before."""
        bare = name.removeprefix(self.kind)
        target = out.view(-1).view(torch.uint8).numpy().data
        try:
            with files.opened(self.path) as file:
                at = self._starts[bare] + first * out.itemsize
                while target:
                    count = os.preadv(file.fileno(), [target], at)
                    if not count:
                        raise OSError(0, f"it ends within {bare}", str(self.path))
                    target, at = target[count:], at + count
        except OSError as error:
            raise CheckpointRejected(f"{self.path}: {error}: take another checkpoint") from error


def open_source(path: Path, found: Manifest) -> Source:
    """The state in checkpoint ``path``, whose manifest this is, to be read range by range.

    CheckpointRejected unless the files hold exactly what the manifest says. Only names and shapes are
    compared: ``verify`` first, or hash what was read.
    """
    names = [name for name in found.files if name.endswith(SUFFIX)]
    readers = {name: FileReader(path / name, _kind(name)) for name in names}
    if found.pieces is not None:
        stored, ties = stored_from_json(found.pieces)
        _require_files(path, stored, readers)
        return Source(stored, readers, ties, found.frozen)
    stored, ties = {}, {}
    for place, reader in readers.items():
        for name, (shape, dtype) in reader.contents.layout.items():
            numel = math.prod(shape)
            stored[reader.kind + name] = StoredTensor(shape, dtype, (Extent(0, numel, place),))
        if reader.kind == MODEL:
            ties |= reader.contents.ties
    return Source(stored, readers, ties, found.frozen)


def _kind(file: str) -> str:
    return next((kind for kind in KINDS if file.startswith(kind.removesuffix(":"))), MODEL)


def _require_files(path: Path, stored: Mapping[str, StoredTensor], readers: Mapping[str, FileReader]) -> None:
    """Each piece is in its file as its range says, and nothing else is in the files."""
    left = {
        (place, reader.kind + name) for place, reader in readers.items() for name in reader.contents.layout
    }
    for name, tensor in stored.items():
        for extent in tensor.extents:
            reader = readers.get(extent.place)
            bare = name.removeprefix(reader.kind) if reader else ""
            found = reader.contents.layout.get(bare) if reader else None
            held = held_shape(tensor.shape, extent.first, extent.last, extent.box)
            expected = held, tensor.dtype
            if found != expected:
                raise CheckpointRejected(
                    f"{path / extent.place[:80]}: {name[:80]}: expected {expected}, got "
                    f"{found or 'nothing'}: take another checkpoint"
                )
            left.discard((extent.place, name))
    if left:
        place, name = min(left)
        raise CheckpointRejected(
            f"{path / place}: expected what the manifest says, got also {name[:80]}: take another checkpoint"
        )
