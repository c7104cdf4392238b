"""Save a checkpoint: each rank writes what it owns, the first one publishes it whole, and only then older
ones go.

    .step-00001234.tmp-<token>/             made by the first rank, which holds its lock
        model-00000-of-00002.safetensors    optimizer-00000-of-00002.safetensors     by rank 0
        model-00001-of-00002.safetensors    optimizer-00001-of-00002.safetensors     by rank 1, then
        rank-00001.digests                  rank-00001.json                          that it has, last
            |  the first rank: hash of the whole from all digests, manifest, rename
    step-00001234/

A state that one rank has all of is the case of one writer: ``model.safetensors`` and
``optimizer.safetensors``, files that any other program reads.

The ranks compare what they have in one message, before anything is written (``plan``), so that a hole or an
overlap is an error on every rank now, and not on the rank that loads the files later. Then they meet in the
directory that they write to, and nowhere else: so this can go on in the background while their group does
other work, and a rank that has died is noticed because its file does not appear. They need a file system that
all of them see.

The order is the point. A run is never without a checkpoint that verifies: what exists is not touched until
the new one has been read back from the disk, and then only what is older than the newest ``keep``.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from instep.checkpoint import files, load, tensors
from instep.checkpoint.manifest import (
    MANIFEST_FILE,
    FileRecord,
    Json,
    Manifest,
    Scalar,
    canonical,
    parse_json,
)
from instep.checkpoint.owner import require_own
from instep.checkpoint.state import merged
from instep.errors import CheckpointRejected
from instep.net.agree import all_or_none, all_tell, on_first_rank
from instep.net.process_group import Group
from instep.state.hash import HashTable, own_digests
from instep.state.shards import KINDS, MODEL, OBJECT, Shard, State, without_ties
from instep.state.stored import StoredTensor, assemble, shards_from_json, shards_to_json, stored_to_json

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
LEAST_KEPT = 2
NOT_YET = "0" * 64  # in a draft: the hash of a state that is still to be hashed
PAUSE_S = 0.005
MESSAGE_BYTES = 1 << 26  # of what a rank tells of its part
SAID_BYTES = 1 << 20


def save(
    directory: Path,
    state: State,
    draft: Manifest,
    *,
    keep: int = 3,
    frozen: bool = True,
    timeout_s: float = 300.0,
) -> Path:
    """Write ``directory/step-<step>`` and return its path once it has been verified on the disk.

    ``draft`` says all that is not in ``state``; it needs no hash and no files. Without ``frozen`` only the
    hashes of frozen parameters are written. Collective over ``state.group``.

    Nothing is ever overwritten. If the step is there already, the same state counts as saved, another state
    is a FileExistsError, and what does not verify is first renamed to ``step-<step>.rejected-<random>``. An
    OSError (disk full, read-only) names the path and leaves the checkpoints as they were.
    """
    require_keep(keep)
    made = plan(state, Path(directory) / files.step_name(draft.step), frozen)
    draft = made.completed(draft)
    if made.exists and already_saved(directory, draft, made, keep, state.group):
        return Path(directory) / files.step_name(draft.step)
    wait = Wait(timeout_s, threading.Event())
    return all_or_none(
        state.group,
        "the end of a save",
        lambda: write(directory, draft, made, keep, wait),
        errors=(CheckpointRejected,),
    )


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
    numerical: Mapping[str, Scalar],
    world_size: int,
    extra: Mapping[str, Json] | None = None,
) -> Manifest:
    """The manifest of a checkpoint that has no files yet; ValueError names a field that cannot be written."""
    return Manifest(
        step=step,
        data_cursor=data_cursor,
        state_sha256=NOT_YET,
        world_size=world_size,
        numerical=dict(numerical),
        versions=_versions(),
        files={},
        extra=dict(extra or {}),
    )


@dataclass(frozen=True)
class Plan:
    """What ranks write together: the same on every rank, but for ``rank`` and its ``shards``."""

    rank: int
    by_rank: tuple[tuple[Shard, ...], ...]
    shards: tuple[Shard, ...]
    table: HashTable
    of_cut: bytes  # the digests of the blocks that shards cut
    options: Json
    ties: dict[str, str]
    left_out: tuple[str, ...]  # frozen parameters, of which only the hashes are written
    token: str  # drawn by the first rank
    exists: bool  # whether the first rank sees a checkpoint of that step already

    @property
    def num_ranks(self) -> int:
        return len(self.by_rank)

    @property
    def is_plain(self) -> bool:
        """Whether one rank writes everything, so that no manifest has to say where it is."""
        return self.num_ranks == 1

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Where each tensor will be, by the names of files."""
        return assemble(
            {
                file_of(kind, rank, self.num_ranks): [
                    x for x in self.written(shards) if x.name.startswith(kind)
                ]
                for rank, shards in enumerate(self.by_rank)
                for kind in KINDS
            }
        )

    def written(self, shards: Iterable[Shard]) -> list[Shard]:
        """Those of ``shards`` that are in files."""
        left_out = {MODEL + name for name in self.left_out}
        return [x for x in without_ties(shards, self.ties) if x.name not in left_out]

    @property
    def written_ties(self) -> dict[str, str]:
        return {name: first for name, first in self.ties.items() if first not in self.left_out}

    def hashed_draft(self, draft: Manifest, told: Sequence[bytes]) -> Manifest:
        """``draft`` with the hash of the state, and of what is left out, by the digests of all ranks."""
        sha256, parts = self.table.digests(told, draft.step)
        frozen = {"frozen": {name: parts[name] for name in self.left_out}} if self.left_out else {}
        return replace(draft, state_sha256=sha256, extra={**draft.extra, **frozen})

    def completed(self, draft: Manifest) -> Manifest:
        """``draft`` with what of the optimizer is no tensor."""
        return replace(draft, extra={**draft.extra, "optimizer": self.options})

    def digests(self, beat: Callable[[], None]) -> bytes:
        """Those of the blocks that this rank hashes."""
        known, table = {x.name: x for x in self.shards}, self.table
        own = (known[x.name] for x in table.hashed[self.rank] if x.name not in table.cut)
        return own_digests(own, beat) + self.of_cut


def file_of(kind: str, rank: int, num_ranks: int) -> str:
    """``model-00001-of-00004.safetensors``; ``model.safetensors`` where there is one."""
    name = kind.removesuffix(":")
    return f"{name}.safetensors" if num_ranks == 1 else f"{name}-{rank:05d}-of-{num_ranks:05d}.safetensors"


def plan(state: State, path: Path, frozen: bool = True, beat: Callable[[], None] = lambda: None) -> Plan:
    """Compare what the ranks have, which is to become ``path``. Collective over ``state.group``.

    Without ``frozen``, parameters that are frozen on all of them are left out.

    Raises:
        CheckpointRejected: what they have is not one whole state, or one of them raised.
        TypeError, ValueError: this rank has something that a file cannot hold.
        OSError: on the first rank, which cannot write there.
    """
    group, token = state.group, secrets.token_hex(8)

    def mine() -> tuple[list[Shard], bytes]:
        exists = group.rank == 0 and _prepare(path)
        own = state.owned()
        tensors.require_writable({x.name: x.tensor for x in own})
        said = {"rows": shards_to_json(own), "options": state.options(), "token": token, "exists": exists}
        return own, json.dumps({**said, "frozen": [] if frozen else state.frozen()}).encode()

    (own, _), everyone = all_tell(
        group,
        "the plan of a checkpoint",
        mine,
        lambda made: made[1],
        errors=(CheckpointRejected,),
        limit=MESSAGE_BYTES,
    )
    bodies = [parse_json(data, MESSAGE_BYTES) for data in everyone]
    by_rank = tuple(tuple(shards_from_json(body["rows"])) for body in bodies)
    table = HashTable(by_rank)
    everywhere = set[str].intersection(*(set(body["frozen"]) for body in bodies))
    made = Plan(
        rank=group.rank,
        by_rank=by_rank,
        shards=tuple(own),
        table=table,
        of_cut=own_digests((x for x in table.complete(group, own) if x.name in table.cut), beat),
        options=merged([body["options"] for body in bodies]),
        ties=dict(state.ties()),
        left_out=tuple(x for x in bodies[0]["frozen"] if x in everywhere),
        token=bodies[0]["token"],
        exists=bodies[0]["exists"],
    )
    _ = made.tensors  # or it raises, on every rank alike
    return made


def _prepare(path: Path) -> bool:
    """Whether ``path`` is there already; if not, it can be made: found out while all ranks listen."""
    files.make_directory(path.parent)
    if os.path.lexists(path):
        return True
    if not os.access(path.parent, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(path.parent).f_flag & os.ST_RDONLY
        code = errno.EROFS if is_read_only else errno.EACCES
        raise OSError(code, os.strerror(code), str(path.parent))
    return False


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": version("safetensors"),
    }


class GivenUp(Exception):
    """No rank waits for this checkpoint any more."""


class Wait:
    """For another rank, through the file system, until it is given up; ``beat`` is called meanwhile, and
    while this rank does its own part."""

    def __init__(
        self, timeout_s: float, given_up: threading.Event, beat: Callable[[], None] = lambda: None
    ) -> None:
        self.timeout_s, self.given_up, self.beat = timeout_s, given_up, beat

    def until(self, there: Callable[[], bool], expected: str) -> None:
        """Return when it is ``there``; TimeoutError, or GivenUp, which say what was ``expected``."""
        end = time.monotonic() + self.timeout_s
        while not there():
            self.beat()
            if self.given_up.wait(PAUSE_S) and not there():
                raise GivenUp(expected)
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{expected} within {self.timeout_s:g} s: do all ranks see this directory?"
                )


def write(directory: Path, draft: Manifest, plan: Plan, keep: int, wait: Wait) -> Path:
    """This rank's part of writing ``directory/step-<step>``; its path, on the first rank once it is verified.

    Raises:
        OSError: the system refuses, or another rank has said that it cannot write.
        TimeoutError, GivenUp: another rank has not come, as ``wait`` says.
    """
    path = directory / files.step_name(draft.step)
    if plan.rank:
        temporary = files.temporary(path, plan.token)
        wait.until(temporary.is_dir, f"{temporary}: expected rank 0 to make it")
        _write_and_say(temporary, plan, wait)
        return path
    made: list[Manifest] = []
    try:
        # No directory is made here: one that was removed since the plan was made must not come back.
        files.publish(
            directory,
            path.name,
            lambda new: made.append(_write_first(new, draft, plan, wait)),
            token=plan.token,
        )
    except FileExistsError:
        # A save of this step that was begun before the ranks met anew may have ended since the plan was made.
        if not made or not is_saved(path, made[0]):
            raise
    load.verify(path)
    _clean_up(path, keep)
    return path


def already_saved(
    directory: Path,
    draft: Manifest,
    plan: Plan,
    keep: int,
    group: Group,
    beat: Callable[[], None] = lambda: None,
) -> bool:
    """Whether the checkpoint is there: this very state, or FileExistsError. Collective.

    One that does not verify is renamed. Older ones are deleted, as after a save.
    """
    path = Path(directory) / files.step_name(draft.step)
    _, everyone = all_tell(
        group,
        "the hash of what was saved before",
        lambda: plan.digests(beat),
        bytes,
        errors=(CheckpointRejected,),
        limit=MESSAGE_BYTES,
    )

    def look() -> bool:
        found = is_saved(path, plan.hashed_draft(draft, everyone))
        if found:
            _clean_up(path, keep)
        else:
            files.refuse_existing(path)
        return found

    return on_first_rank(group, "what was saved before", look, errors=(CheckpointRejected,))


def _write_first(path: Path, draft: Manifest, plan: Plan, wait: Wait) -> Manifest:
    records, own = _write(path, plan, wait)
    everyone = [own]
    for rank in range(1, plan.num_ranks):
        said, data = path / _said(rank), path / _digests(rank)
        wait.until(said.is_file, f"{said}: expected what rank {rank} has written")
        records |= _heard(said, rank)
        everyone.append(_read(data))
        said.unlink()
        data.unlink()
    whole = replace(
        plan.hashed_draft(draft, everyone),
        pieces=None if plan.is_plain else stored_to_json(plan.tensors, plan.written_ties),
        files=records,
    )
    files.write_file(path / MANIFEST_FILE, whole.to_bytes())
    return whole


def _write(path: Path, plan: Plan, wait: Wait) -> tuple[dict[str, FileRecord], bytes]:
    """This rank's files; their records, and the digests of its blocks."""
    records = {}
    for kind in KINDS:
        named = {
            x.name.removeprefix(kind): x.tensor for x in plan.written(plan.shards) if x.name.startswith(kind)
        }
        if plan.is_plain and kind == MODEL:  # a file that stands for itself says its ties itself
            named |= {name: named[first] for name, first in plan.written_ties.items()}
        if named or (plan.is_plain and kind != OBJECT):
            file = path / file_of(kind, plan.rank, plan.num_ranks)
            tensors.write(file, named)
            records[file.name] = FileRecord(file.stat().st_size, files.sha256(file))
    return records, plan.digests(wait.beat)


def _write_and_say(path: Path, plan: Plan, wait: Wait) -> None:
    """As ``_write``, for the first rank to read; also what keeps this rank from it."""
    said: dict[str, Json] = {"files": {}, "problem": "it was interrupted"}
    try:
        records, own = _write(path, plan, wait)
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
    with files.opened(path) as file:
        said = parse_json(file.read(SAID_BYTES), SAID_BYTES)
    if said["problem"]:
        raise OSError(0, f"rank {rank} cannot write: {said['problem']}", str(path.parent))
    return {name: FileRecord(**record) for name, record in said["files"].items()}


def _read(path: Path) -> bytes:
    with files.opened(path) as file:
        data = file.read(MESSAGE_BYTES + 1)
    if len(data) > MESSAGE_BYTES:
        raise CheckpointRejected(f"{path}: expected at most {MESSAGE_BYTES} bytes: take more ranks")
    return data


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
        files.sync(path.parent, follow_links=True)  # the rank that published it may have died before
    return same


def _without_placement(manifest: Manifest) -> bytes:
    return replace(manifest, files={}, versions={}, world_size=1, pieces=None).to_bytes()


def _clean_up(path: Path, keep: int) -> None:
    """Delete what is no longer needed beside ``path``, which has just been verified."""
    prune(path, keep)
    files.remove_stale(path.parent)


def prune(path: Path, keep: int) -> list[Path]:
    """Delete the checkpoints older than ``path``, which has just been verified, once ``keep`` are whole.

    Whole means that the sizes are right, and for the first one besides ``path`` the hashes too, so that two
    good ones stay whatever happens. The newest of those that are the best so far stays, too. Directories
    without a manifest of ours are never touched.
    """
    whole, deleted, best = 0, [], False
    for step, other in files.step_directories(path.parent):
        if step > (files.step_of(path.name) or 0):
            continue
        manifest = _manifest(other)
        is_best = not best and manifest is not None and manifest.is_best
        best |= is_best
        if whole >= keep and manifest is not None and not is_best:
            files.remove(other)
            deleted.append(other)
        elif whole < keep:
            whole += other == path or _is_whole(other, hashes=whole < LEAST_KEPT)
    return deleted


def _is_whole(path: Path, *, hashes: bool) -> bool:
    try:
        require_own(path)  # one that no run goes on from is no reason to delete an older one
        load.verify(path) if hashes else load.measure(path)
    except CheckpointRejected:
        return False
    return True


def _manifest(path: Path) -> Manifest | None:
    """That of a checkpoint of ours; None for any other directory."""
    try:
        return load.read_manifest(path)
    except CheckpointRejected:
        return None
