"""``instep.save`` and ``instep.load``: all that training carries, by name, in one call.

A loop that can be stopped anywhere and started again:

    resumed = instep.load("checkpoints", model=model, optimizer=optimizer)
    for step in range(resumed.step, 1000):
        ...
        instep.save("checkpoints", step=step + 1, model=model, optimizer=optimizer)

They read and write what a run does.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from instep.checkpoint import contract, files
from instep.checkpoint import save as saving
from instep.checkpoint.image import send
from instep.checkpoint.load import Found, newest, open_source, restore_found
from instep.checkpoint.manifest import Json, Scalar, differences, parse
from instep.checkpoint.registered import Registered, TrainingState
from instep.errors import CheckpointRejected, warn
from instep.net.agree import all_or_none, all_tell, raise_on_all
from instep.net.process_group import Group, alone
from instep.state.hash import SharedHash
from instep.state.replicas import ranks_listed
from instep.state.shards import Shard
from instep.state.stored import Source, assemble, shards_to_json
from instep.step.optimizer_guard import require_between_steps

LOADING = "the loading of a checkpoint"
REASON_CHARACTERS = 1000  # of why a checkpoint was refused, as the other ranks are told


@dataclass(frozen=True)
class Resumed:
    """What ``instep.load`` has found.

    Attributes:
        step: what ``save`` was told; 0 where there is no checkpoint yet.
        path: the directory of the checkpoint; None where there is none yet.
        rejected: why newer checkpoints were passed over, the newest first.
        differences: in words, what of the numerical configuration is not as it was when it was saved.

    Example:
        >>> instep.load("checkpoints", model=model, optimizer=optimizer)  # there is none yet
        Resumed(step=0, path=None, rejected=(), differences=())
    """

    step: int = 0
    path: Path | None = None
    rejected: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()


def save(
    directory: str | os.PathLike[str], /, *, step: int, keep: int = 3, frozen: bool = True, **objects: Any
) -> Path:
    """Save ``objects`` as ``directory/step-00000100``, in safetensors and JSON: whole or not at all.

    Call it on every rank. Of replicated models rank 0 writes, and the others return at once. Where weights or
    moments are sharded (``fully_shard``, ``ShardedOptimizer``) it is collective: every rank writes its part
    into one directory, which all have to see, and returns when the whole has been verified. A module without
    a wrapper is saved by the process that calls.

    Args:
        directory: of all checkpoints; made if it is not there.
        step: a number of your own, which names the checkpoint.
        keep: the newest so many stay, at least 2.
        frozen: False leaves frozen parameters out, as those of a base model beside adapters. Their hashes are
            saved, and ``load`` expects a model that was built with the same values.
        objects: by name: models, wrapped, sharded or neither; their optimizers; whatever else has
            ``state_dict()`` and ``load_state_dict()``, such as a scheduler or an ``instep.Loader``; None is
            left out. Of a wrapper the number of declared steps so far, which keys random numbers, is kept.

    Returns:
        The directory of this checkpoint, on every rank.

    Raises:
        ValueError: an object that cannot be saved, by its name; an optimizer of parameters that are in no
            model; several shard groups, and a model that is not the wrapper, which knows all of them.
        CheckpointRejected: what the ranks hold is not one whole state.
        FileExistsError: that step is there already, with another state.
        OSError: the directory cannot be written to.
        PeerLost: a rank did not come to write its part.

    Example:
        >>> path = instep.save("checkpoints", step=100, model=model, optimizer=optimizer)
        >>> path.name, instep.load("checkpoints", model=model, optimizer=optimizer).step
        ('step-00000100', 100)
    """
    registered = _registered(objects)
    state = registered.state()
    state.require_all_replicas()
    if state.everyone.rank and not state.is_divided:
        return Path(directory) / files.step_name(step)
    draft = saving.draft(
        step=step,
        data_cursor=registered.cursor(0),
        numerical=_numerical(state.module),
        world_size=state.everyone.size,
        extra={"models": [*registered.models]},
    )
    timeout_s = state.group.timeout_s
    return saving.save(Path(directory), state, draft, keep=keep, frozen=frozen, timeout_s=timeout_s)


def load(
    directory: str | os.PathLike[str], /, *, which: Literal["newest", "best"] = "newest", **objects: Any
) -> Resumed:
    """Load the newest checkpoint that verifies, in place, on all ranks the same; begin anew if there is none.

    Any number of ranks loads what any other has saved, sharded or not, by ``save`` or by a run
    (``runs/a/checkpoints``). Collective over the ranks that the models are wrapped or sharded for; without a
    wrapper this process loads for itself.

    Every rank looks into its own ``directory``, and nothing is changed before all have found the same. A rank
    that has no checkpoint at all is sent what the others have (of a replicated model only rank 0 writes).
    One that belongs neither to you nor to root nor to the owner of ``directory``, or that every user may
    write to, is passed over. Rank 0 warns of that, and where it has none and another rank has.

    Args:
        directory: as given to ``save``; it need not be there yet.
        which: "best" takes the one that a run has kept as its best, by ``checkpoint={"best": "val_loss"}``.
        objects: as given to ``save``, by the same names, wrapped or sharded in any other way, or not at all;
            or models alone, to use them. A wrapper goes on counting declared steps, which key random numbers,
            where it was saved.

    Returns:
        A ``Resumed``: ``step`` is where to go on, 0 and nothing touched where there is no checkpoint yet.

    Raises:
        CheckpointRejected: on all ranks; they have found different checkpoints, none verifies, it is of
            other objects, and nothing is changed; or these change what they are given.
        ValueError: as for ``save``, or a declared step is open; or a module is given, with an optimizer,
            that a wrapper trains.
        PeerLost: a rank did not come.

    Example:
        >>> for step in range(instep.load("checkpoints", model=model, optimizer=optimizer).step, 3):
        ...     optimizer.zero_grad()
        ...     loss_function(model(x), y).backward()
        ...     optimizer.step()
        ...     path = instep.save("checkpoints", step=step + 1, model=model, optimizer=optimizer)
    """
    if which not in ("newest", "best"):
        raise ValueError(f"which={which!r}: expected 'newest' or 'best'")
    registered = _registered(objects)
    registered.require_wrappers()
    state = registered.state()
    state.is_for_use = not (registered.optimizers or registered.others)
    require_between_steps(list(state.module.parameters()), "instep.load")
    everyone = state.everyone if state.everyone.pg is not None else alone()  # of a closed wrapper, too
    everyone.barrier(LOADING)  # no rank looks before the one that writes has returned from its save
    found, source, doubts = _agree(
        everyone, lambda: _Looked.into(Path(directory), state.group, which == "best")
    )
    if found is None and which == "best":
        raise CheckpointRejected(
            f"{directory}: expected a checkpoint that a run has kept as its best, got none: name the "
            'checkpoints/ folder of a run with Run(checkpoint={"best": "val_loss"}), or load the newest'
        )
    if found is None:
        if state.is_for_use and everyone.rank == 0:
            warn(
                f"no checkpoint in {directory}: the models keep the values that they have (those of a run "
                "are in its checkpoints/)",
            )
        return Resumed()
    restore_found(found, state, everyone, source)
    _, hashed = all_tell(
        everyone, LOADING, lambda: _require_hash(found, state), str.encode, errors=(CheckpointRejected,)
    )
    if all(hashed):
        state.settled()
    if everyone.rank == 0:
        for doubt in doubts:  # last of all: a filter may make it an error, on this rank alone
            warn(doubt)
    now = _numerical(state.module)
    saved = {name: value for name, value in found.manifest.numerical.items() if name in now}
    return Resumed(
        step=found.manifest.step,
        path=found.path,
        rejected=tuple(reason for _, reason in found.rejected),
        differences=tuple(differences(saved, now)),
    )


def _registered(objects: Mapping[str, Any]) -> Registered:
    if not any(isinstance(x, nn.Module) or hasattr(type(x), "__instep_state__") for x in objects.values()):
        given = ", ".join(f"{name}={type(x).__name__}" for name, x in objects.items()) or "nothing"
        raise ValueError(
            f"no model to save or load in {given}: pass objects by name, model=model, optimizer=optimizer"
        )
    return Registered({name: x for name, x in objects.items() if x is not None})


@dataclass(frozen=True)
class _Looked:
    """What one rank has found in ``directory``: a checkpoint, nothing, or why it has none to trust."""

    directory: Path
    found: Found | None = None
    refusal: CheckpointRejected | None = None

    @staticmethod
    def into(directory: Path, group: Group, best: bool) -> _Looked:
        """What there is for ``group``, whose ranks look together."""
        try:
            return _Looked(directory, newest(directory, group, published=True, best=best))
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
    image = send(group, root, shards, said, "the sending of a checkpoint")
    path = Path(image.body["path"])
    found = mine or Found(path, parse(image.body["manifest"].encode(), path))
    stored = assemble({"0": image.shards.values()})
    return found, Source(stored, {"0": image}, image.body["ties"], found.manifest.frozen)


def _numerical(model: nn.Module) -> dict[str, Scalar]:
    first = next(model.parameters(), torch.empty(0, device="cpu"))
    return contract.describe(config={}, threads=torch.get_num_threads(), device=str(first.device))


def _require_hash(found: Found, state: TrainingState) -> str:
    """The hash of ``state``, or raise unless it has become what was saved; "" of a part, which has none."""
    if not state.is_all_of(found.manifest.extra["optimizer"]):
        return ""
    digest, _ = SharedHash(state.group).digests(state.owned(state.hashed()), found.manifest.step)
    if digest != found.manifest.state_sha256:
        raise CheckpointRejected(
            f"{found.path}: expected hash {found.manifest.state_sha256[:12]}..., got {digest[:12]}... "
            "after loading: the model or the optimizer changes what it is given; load into plain ones"
        )
    return digest
