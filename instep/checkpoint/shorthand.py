"""``instep.save`` and ``instep.load``: a module and its optimizer in one call, for a loop of your own.

A loop that can be stopped anywhere and started again:

    resumed = instep.load("checkpoints", model, optimizer)
    for step in range(resumed.step, 1000):
        ...
        instep.save("checkpoints", model, optimizer, step=step + 1)
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from instep.checkpoint import contract, files
from instep.checkpoint import save as saving
from instep.checkpoint.load import Found, newest, open_source, restore_found
from instep.checkpoint.manifest import Json, Manifest, Scalar, differences, parse
from instep.checkpoint.send import send_shards
from instep.checkpoint.state import TrainingState
from instep.errors import CheckpointRejected
from instep.net.agree import all_or_none, all_tell, raise_on_all
from instep.net.process_group import Group, alone
from instep.state.hash import SharedHash
from instep.state.replicas import ranks_listed
from instep.state.shards import Shard
from instep.state.stored import Source, assemble, shards_from_json, shards_to_json
from instep.step.optimizer_guard import require_between_steps

LOADING = "the loading of a checkpoint"
REASON_CHARACTERS = 1000  # of why a checkpoint was refused, as the other ranks are told


@dataclass(frozen=True)
class Resumed:
    """What ``instep.load`` has found.

    Attributes:
        step: what ``save`` was told; 0 where there is no checkpoint yet.
        data_cursor: the same.
        extra: the JSON that ``save`` was given besides, tuples as lists.
        path: the directory of the checkpoint; None where there is none yet.
        rejected: why newer checkpoints were passed over, the newest first.
        differences: in words, what of the numerical configuration is not as it was when it was saved.

    Example:
        >>> instep.load("checkpoints", model, optimizer)  # there is none yet
        Resumed(step=0, data_cursor=0, extra={}, path=None, rejected=(), differences=())
    """

    step: int = 0
    data_cursor: int = 0
    extra: Mapping[str, Json] = field(default_factory=dict)
    path: Path | None = None
    rejected: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()


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
    """Save model and optimizer as ``directory/step-00000100``, in safetensors and JSON: whole or not at all.

    Call it on every rank. Of a replicated model rank 0 writes, and the others return at once. Where weights
    or moments are sharded (``fully_shard``, ``ShardedOptimizer``) it is collective: every rank writes its
    part into one directory, which all have to see, and returns when the whole has been verified.

    Args:
        directory: of all checkpoints; made if it is not there.
        model: any module, wrapped, sharded or neither. Of a wrapper the number of declared steps so far,
            which key the random numbers, is kept too.
        optimizer: over parameters of ``model``; None saves the model alone.
        step, data_cursor: numbers of your own; ``step`` names the checkpoint.
        rank, world_size: of this process, where ``model`` is not wrapped and so does not know them.
        keep: the newest so many stay, at least 2.
        extra: JSON of your own: a scheduler's state, the loss. Tuples come back as lists.

    Returns:
        The directory of this checkpoint, on every rank.

    Raises:
        ValueError: ``extra`` is no JSON; the model keeps what is neither data nor a tensor; the optimizer has
            parameters that ``model`` has not; or there are several shard groups, and ``model`` is not the
            wrapper, which knows all of them.
        CheckpointRejected: what the ranks hold is not one whole state.
        FileExistsError: that step is there already, with another state.
        OSError: the directory cannot be written to.
        PeerLost: a rank did not come to write its part.

    Example:
        >>> path = instep.save("checkpoints", model, optimizer, step=100, loss=0.5)
        >>> path.name, instep.load("checkpoints", model, optimizer).extra
        ('step-00000100', {'loss': 0.5})
    """
    state = TrainingState(model, optimizer)
    state.require_all_replicas()
    rank = state.everyone.rank if rank is None else rank
    if rank and not state.is_divided:
        return Path(directory) / files.step_name(step)
    count = state.declared_steps
    draft = saving.draft(
        step=step,
        data_cursor=data_cursor,
        numerical=_numerical(state.module),
        world_size=state.everyone.size if state.is_divided else world_size or state.everyone.size,
        extra={"user": extra} if count is None else {"user": extra, "declared_steps": count},
    )
    return saving.save(Path(directory), state, draft, keep=keep, timeout_s=state.group.timeout_s)


def load(directory: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> Resumed:
    """Load the newest checkpoint that verifies, in place, on all ranks the same; begin anew if there is none.

    Any number of ranks loads what any other has saved, sharded or not. Collective over the ranks that
    ``model`` is wrapped or sharded for; without a wrapper this process loads for itself.

    Every rank looks into its own ``directory``, and nothing is changed before all have found the same. A rank
    that has no checkpoint at all is sent what the others have (of a replicated model only rank 0 writes).
    One that belongs neither to you nor to root nor to the owner of ``directory``, or that every user may
    write to, is passed over. Rank 0 warns of that, and where it has none and another rank has.

    Args:
        directory: as given to ``save``; it need not be there yet.
        model: as given to ``save``, wrapped or sharded in any other way, or not at all. A wrapper goes on
            counting declared steps, which key random numbers, where it was saved.
        optimizer: of the class that was saved; None loads the model alone.

    Returns:
        A ``Resumed``: ``step`` is where to go on, 0 and nothing touched where there is no checkpoint yet.

    Raises:
        CheckpointRejected: on all ranks; they have found different checkpoints, none verifies, it is of
            another model or optimizer, and nothing is changed; or these change what they are given.
        ValueError: the optimizer has parameters that ``model`` has not, or a declared step is open.
        PeerLost: a rank did not come.

    Example:
        >>> for step in range(instep.load("checkpoints", model, optimizer).step, 3):
        ...     optimizer.zero_grad()
        ...     loss_function(model(x), y).backward()
        ...     optimizer.step()
        ...     path = instep.save("checkpoints", model, optimizer, step=step + 1)
    """
    state = TrainingState(model, optimizer)
    require_between_steps(list(state.module.parameters()), "instep.load")
    everyone = state.everyone if state.everyone.pg is not None else alone()  # of a closed wrapper, too
    everyone.barrier(LOADING)  # no rank looks before the one that writes has returned from its save
    found, source, doubts = _agree(everyone, lambda: _Looked.into(Path(directory), state.group))
    if found is None:
        return Resumed()
    extra = found.manifest.extra
    restore_found(found, state, everyone, source)
    _, hashed = all_tell(
        everyone, LOADING, lambda: _require_hash(found, state), str.encode, errors=(CheckpointRejected,)
    )
    if all(hashed):
        state.settled()
    state.resume_at(extra.get("declared_steps", found.manifest.step))
    if everyone.rank == 0:
        for doubt in doubts:  # last of all: a filter may make it an error, on this rank alone
            warnings.warn(doubt, stacklevel=2)
    return Resumed(
        step=found.manifest.step,
        data_cursor=found.manifest.data_cursor,
        extra=extra["user"],
        path=found.path,
        rejected=tuple(reason for _, reason in found.rejected),
        differences=tuple(differences(found.manifest.numerical, _numerical(state.module))),
    )


@dataclass(frozen=True)
class _Looked:
    """What one rank has found in ``directory``: a checkpoint, nothing, or why it has none to trust."""

    directory: Path
    found: Found | None = None
    refusal: CheckpointRejected | None = None

    @staticmethod
    def into(directory: Path, group: Group) -> _Looked:
        """What there is for ``group``, whose ranks look together."""
        try:
            found = newest(directory, group, published=True)
            if found is not None:
                _require_shorthand(found.path, found.manifest)
            return _Looked(directory, found)
        except CheckpointRejected as error:
            return _Looked(directory, refusal=error)

    def to_json(self) -> Json:
        """What the other ranks are told: the hash of the manifest, if there is one, and all in words."""
        if self.refusal is not None:
            return {"hash": None, "refused": True, "words": str(self.refusal)[:REASON_CHARACTERS]}
        if self.found is None:
            return {"hash": None, "refused": False, "words": f"none in {self.directory}"}
        digest = hashlib.sha256(self.found.manifest.to_bytes()).hexdigest()
        where = f"step {self.found.manifest.step} in {self.found.path}"
        over = [[str(path), reason[:REASON_CHARACTERS]] for path, reason in self.found.rejected[:1]]
        words = f"{where}, manifest {digest[:12]}{''.join(f', passed over {reason}' for _, reason in over)}"
        return {"hash": digest, "refused": False, "words": words, "where": where, "over": over}


def _agree(group: Group, look: Callable[[], _Looked]) -> tuple[Found | None, Source | None, list[str]]:
    """What all ranks of ``group`` load, and where it comes from, unless that is the files that were found.

    And in words, why this may not be what the user means. Collective. CheckpointRejected on all ranks, with
    what each has found, unless all that have a checkpoint have the same.
    """
    mine, said = all_tell(group, LOADING, look, lambda its: json.dumps(its.to_json()).encode())
    told = [json.loads(data) for data in said]
    hashes = [its["hash"] for its in told]
    if any(its["refused"] for its in told) or len(set(hashes) - {None}) > 1:
        if len({its["words"] for its in told}) == 1 and mine.refusal is not None:
            raise_on_all(group, mine.refusal)
        each = "".join(f"\n  rank {r}: {its['words']}" for r, its in zip(group.ranks, told, strict=True))
        problem = (
            "expected one checkpoint for all ranks, got several; nothing was loaded: give all ranks one "
            f"directory, copy that of one rank to the others, or empty theirs, and they are sent it{each}"
        )
        raise_on_all(group, CheckpointRejected(problem))
    if None not in hashes or set(hashes) == {None}:
        return mine.found, None, _passed_over(group, told)
    root = hashes.index(next(filter(None, hashes)))
    return *_send(group, root, mine.found), _passed_over(group, told) + _empty_first(group, told, root)


def _passed_over(group: Group, told: Sequence[Json]) -> list[str]:
    """What to say where ranks do not load their newest checkpoint: a line for each that was refused."""
    refused: dict[str, tuple[str, list[int]]] = {}
    loaded = [(rank, its) for rank, its in zip(group.ranks, told, strict=True) if its["hash"] is not None]
    for rank, its in loaded:
        for path, reason in its["over"]:
            refused.setdefault(path, (reason, []))[1].append(rank)
    return [
        f"instep.load went back to {loaded[0][1]['where']}: the newest checkpoint of "
        f"{ranks_listed(tuple(ranks))} was refused, {reason}. The steps in between are trained again, and "
        "the refused one is renamed to *.rejected-* when its step is saved again. To keep those steps, stop, "
        "and restore it from a copy"
        for reason, ranks in refused.values()
    ]


def _empty_first(group: Group, told: Sequence[Json], root: int) -> list[str]:
    """What to say where rank 0, which writes, has no checkpoint, and another rank has."""
    if not root:
        return []
    other = f"rank {group.ranks[root]}"
    return [
        f"rank {group.ranks[0]} has {told[0]['words']}, so all ranks resume from what {other} has: "
        f"{told[root]['where']}. If that is left over from another run, stop, and remove it from the disk of "
        f"{other}"
    ]


def _send(group: Group, root: int, mine: Found | None) -> tuple[Found, Source]:
    """What group rank ``root`` has found, and its tensors in memory, for every rank. Collective."""

    def read() -> tuple[list[Shard], bytes]:
        if group.rank != root or mine is None:
            return [], b""
        source = open_source(mine.path, mine.manifest)
        shards = [Shard.whole(name, source.read_whole(name), order=None) for name in source.tensors]
        said = {
            "rows": shards_to_json(shards),
            "ties": dict(source.ties),
            "path": str(mine.path),
            "manifest": mine.manifest.to_bytes().decode(),
        }
        return shards, json.dumps(said).encode()

    shards, said = all_or_none(group, "the reading of a checkpoint", read, errors=(CheckpointRejected,))
    body, reader = send_shards(group, root, shards, said, "the sending of a checkpoint")
    found = mine or Found(Path(body["path"]), parse(body["manifest"].encode(), Path(body["path"])))
    return found, Source(assemble({"0": shards_from_json(body["rows"])}), {"0": reader}, body["ties"])


def _numerical(model: nn.Module) -> dict[str, Scalar]:
    first = next(model.parameters(), torch.empty(0, device="cpu"))
    return contract.describe(config={}, threads=torch.get_num_threads(), device=str(first.device))


def _require_shorthand(path: Path, manifest: Manifest) -> None:
    extra, count = manifest.extra, manifest.extra.get("declared_steps", 0)
    known = set(extra) - {"declared_steps"} == {"user", "optimizer"} and isinstance(extra["user"], dict)
    if not known or type(count) is not int or count < 0:
        raise CheckpointRejected(
            f"{path}: expected a checkpoint of instep.save, got one of another writer: resume with that, or "
            "read its tensors with instep.checkpoint.load.read_tensors"
        )


def _require_hash(found: Found, state: TrainingState) -> str:
    """The hash of ``state``, or raise unless it has become what was saved; "" of a part, which has none."""
    if (state.optimizer is None) != (found.manifest.extra["optimizer"] is None):
        return ""
    digest, _ = SharedHash(state.group).digests(state.owned(state.hashed()), found.manifest.step)
    if digest != found.manifest.state_sha256:
        raise CheckpointRejected(
            f"{found.path}: expected hash {found.manifest.state_sha256[:12]}..., got {digest[:12]}... "
            "after loading: the model or the optimizer changes what it is given; load into plain ones"
        )
    return digest
