"""A sharded checkpoint: every rank writes what it holds, and the first one publishes when all of it is there.

    .step-00001234.tmp-<token>/             made by the first rank, who holds its lock
        model-00000-of-00002.safetensors    optimizer-00000-of-00002.safetensors     by rank 0
        model-00001-of-00002.safetensors    optimizer-00001-of-00002.safetensors     by rank 1, then
        rank-00001.digests                  rank-00001.json                          that it has, last
            |  the first rank: hash of the whole from all digests, manifest, rename
    step-00001234/

The ranks meet in the directory that they write to, and nowhere else: so this can go on in the background
while their group does other work, and a rank that has died is one whose word does not come. They need a file
system that all of them see.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from instep.checkpoint import files, load, pieces, save, tensors
from instep.checkpoint.manifest import MANIFEST_FILE, FileRecord, Json, Manifest, canonical, parse_json
from instep.checkpoint.pieces import MODEL, OPTIMIZER
from instep.checkpoint.plan import MESSAGE_BYTES, Plan, digests, file_of, state_hash, together
from instep.errors import CheckpointRejected
from instep.mesh.group import Group

PAUSE_S = 0.005
SAID_BYTES = 1 << 20


class GivenUp(Exception):
    """Nobody waits for this checkpoint any more."""


def write(directory: Path, draft: Manifest, plan: Plan, keep: int, wait: Wait) -> Path:
    """This rank's part of writing ``directory/step-<step>``; its path, on the first rank once it is verified.

    Raises:
        OSError: as ``save.write``, or another rank has said that it cannot write.
        TimeoutError, GivenUp: another rank has not come, as ``wait`` says.
    """
    path = directory / files.step_name(draft.step)
    if plan.rank:
        temporary = files.temporary(path, plan.token)
        wait.until(temporary.is_dir, f"{temporary}: expected rank 0 to make it")
        _write_and_say(temporary, plan)
        return path
    files.make_directory(directory)
    files.publish(directory, path.name, lambda new: _write_first(new, draft, plan, wait), token=plan.token)
    load.verify(path)
    save.prune(path, keep)
    files.remove_stale(directory)
    return path


def already_saved(directory: Path, draft: Manifest, plan: Plan, group: Group) -> bool:
    """Whether the checkpoint is there: this very state, or FileExistsError. Collective.

    One that does not verify is renamed.
    """
    path = directory / files.step_name(draft.step)
    hashed = [part for part in plan.parts if part.name in plan.order]
    _, everyone = together(group, "the hash of what was saved before", lambda: digests(hashed), bytes)
    sha256 = state_hash(plan.order, plan.by_rank, everyone, draft.step)

    def look() -> bool:
        found = group.rank == 0 and save.is_saved(path, replace(draft, state_sha256=sha256))
        if group.rank == 0 and not found:
            files.refuse_existing(path)
        return found

    _, said = together(group, "what was saved before", look, lambda found: bytes([found]))
    return said[0] == b"\x01"


def _write_first(path: Path, draft: Manifest, plan: Plan, wait: Wait) -> None:
    records, own = _write(path, plan)
    everyone = [own]
    for rank in range(1, plan.num_ranks):
        said, data = path / _said(rank), path / _digests(rank)
        wait.until(said.is_file, f"{said}: expected what rank {rank} has written")
        records |= _heard(said, rank)
        everyone.append(_read(data))
        said.unlink()
        data.unlink()
    whole = replace(
        draft,
        state_sha256=state_hash(plan.order, plan.by_rank, everyone, draft.step),
        pieces=pieces.to_json(plan.entries, plan.ties),
        files=records,
    )
    files.write_file(path / MANIFEST_FILE, whole.to_bytes())


def _write(path: Path, plan: Plan) -> tuple[dict[str, FileRecord], bytes]:
    """This rank's files; their records, and the digests of its blocks."""
    records = {}
    for kind in (MODEL, OPTIMIZER):
        named = {x.name.removeprefix(kind): x.tensor for x in plan.parts if x.name.startswith(kind)}
        if named:
            file = path / file_of(kind, plan.rank, plan.num_ranks)
            tensors.write(file, named)
            records[file.name] = FileRecord(file.stat().st_size, files.sha256(file))
    return records, digests(part for part in plan.parts if part.name in plan.order)


def _write_and_say(path: Path, plan: Plan) -> None:
    """As ``_write``, for the first rank to read; also what keeps this rank from it."""
    said: dict[str, Json] = {"files": {}, "problem": "it was interrupted"}
    try:
        records, own = _write(path, plan)
        for name in records:
            files.sync(path / name)
        files.write_file(path / _digests(plan.rank), own)
        said = {"files": {name: asdict(record) for name, record in records.items()}, "problem": ""}
    except Exception as error:
        said["problem"] = str(error)[:2000] or type(error).__name__
        raise
    finally:
        new = path / f"{_said(plan.rank)}.new"
        files.write_file(new, canonical(said))
        os.rename(new, path / _said(plan.rank))  # it is there whole, or not at all


def _said(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _digests(rank: int) -> str:
    return f"rank-{rank:05d}.digests"


def _heard(path: Path, rank: int) -> Mapping[str, FileRecord]:
    with files.open_regular(path) as file:
        said = parse_json(file.read(SAID_BYTES), SAID_BYTES)
    if said["problem"]:
        raise OSError(0, f"rank {rank} cannot write: {said['problem']}", str(path.parent))
    return {name: FileRecord(**record) for name, record in said["files"].items()}


def _read(path: Path) -> bytes:
    with files.open_regular(path) as file:
        data = file.read(MESSAGE_BYTES + 1)
    if len(data) > MESSAGE_BYTES:
        raise CheckpointRejected(f"{path}: expected at most {MESSAGE_BYTES} bytes: take more ranks")
    return data


class Wait:
    """For another rank, through the file system, until it is given up."""

    def __init__(self, timeout_s: float, given_up: threading.Event) -> None:
        self.timeout_s, self.given_up = timeout_s, given_up

    def until(self, there: Callable[[], bool], expected: str) -> None:
        """Return when it is ``there``; TimeoutError, or GivenUp, which say what was ``expected``."""
        end = time.monotonic() + self.timeout_s
        while not there():
            if self.given_up.wait(PAUSE_S) and not there():
                raise GivenUp(expected)
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{expected} within {self.timeout_s:g} s: do all ranks see this directory?"
                )
