"""A state from anywhere into a sharded module and optimizer: every rank reads the ranges that it holds.

Nothing is changed before all ranks have read what they need and, where its hash is known, have it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint import files, load, pieces, ranges, state, tensors
from instep.checkpoint.load import Found
from instep.checkpoint.manifest import Json, Manifest, canonical, parse_json
from instep.checkpoint.moments import split
from instep.checkpoint.owned import Holding, local, ties_of
from instep.checkpoint.pieces import MODEL, OPTIMIZER, Source
from instep.checkpoint.plan import digests, hash_order, state_hash, together
from instep.errors import CheckpointRejected
from instep.mesh.group import Group
from instep.ordered.parts import Part
from instep.shard import claims
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.parts import state_parts
from instep.shard.space import Held
from instep.shard.unit import Unit


@dataclass
class Read:
    """What one rank has read: by name, flat values from element ``first`` on."""

    values: dict[str, Part]

    def part(self, name: str, first: int, last: int) -> Part:
        """Elements ``first`` to ``last`` of entry ``name``, flat."""
        part = self.values[name]
        flat = part.tensor.reshape(-1)[first - part.first : last - part.first]
        return part._replace(first=first, last=last, tensor=flat)


def reload(
    source: Source,
    rest: Json,
    step: int,
    module: nn.Module,
    optimizer: Optimizer | None,
    division: Holding,
    sha256: str | None,
) -> None:
    """Give ``module`` and ``optimizer`` the state in ``source``, in place. Collective.

    Raises:
        CheckpointRejected: on every rank, and nothing has changed: it is of another model or optimizer, a
            rank cannot read its part, or it does not have the hash ``sha256``.
    """
    inner = state.unwrapped(module)

    def mine() -> tuple[Read, list[Part]]:
        _require_fit(source, rest, inner, optimizer)
        read = _read(source, inner, optimizer, division)
        return read, [] if sha256 is None else list(_own(read, source, inner, division))

    def said(made: tuple[Read, list[Part]]) -> bytes:
        rows = pieces.rows_to_json(map(pieces.row, made[1]))
        header = canonical(rows)
        return len(header).to_bytes(8, "little") + header + digests(made[1])

    (read, _), everyone = together(division.group, "the reading of a sharded state", mine, said)
    if sha256 is not None:
        _require_hash(everyone, inner, source, step, sha256)
    _put_model(read, source.ties, inner)
    if isinstance(optimizer, ShardedOptimizer):
        _put_optimizer(read, rest, inner, optimizer, division.held)
    else:
        division.group.barrier("the loading of weights")


def reload_found(found: Found, module: nn.Module, optimizer: Optimizer | None, division: Holding) -> None:
    """As ``reload``, the checkpoint that was ``found``. Collective."""

    def opened() -> Source:
        return ranges.source(found.path, found.manifest)

    source, _ = together(division.group, "the opening of a checkpoint", opened, lambda source: b"")
    manifest = found.manifest
    rest = manifest.extra.get("optimizer")
    sha256 = manifest.state_sha256 if optimizer is not None or rest is None else None  # it is of all
    try:
        reload(source, rest, manifest.step, module, optimizer, division, sha256)
    except CheckpointRejected as error:
        error.args = (f"{found.path}: {error}",)
        raise


def newest(directory: Path, group: Group) -> Found | None:
    """As ``load.newest``, the same for all ranks, who share the reading. Collective.

    Each rank compares every W-th file with its hash.
    """
    rejected: list[tuple[Path, str]] = []
    named = json.dumps([str(path) for _, path in files.step_directories(directory)]).encode()
    _, said = together(group, "the list of checkpoints", lambda: named, bytes)
    for path in map(Path, json.loads(said[0])):
        try:
            return Found(path, _verify(path, group), rejected)
        except CheckpointRejected as error:
            rejected.append((path, str(error)))
    if rejected:
        raise load.none_verifies(directory, rejected)
    return None


def _verify(path: Path, group: Group) -> Manifest:
    found, said = together(
        group,
        f"the verification of {path.name}",
        lambda: load.verify_share(path, group.rank, group.size),
        lambda found: found.to_bytes(),
    )
    if len(set(said)) > 1:
        raise CheckpointRejected(f"{path}: expected the same on all ranks, got several: share a file system")
    return found


def _require_hash(everyone: list[bytes], module: nn.Module, source: Source, step: int, sha256: str) -> None:
    ends = [8 + int.from_bytes(data[:8], "little") for data in everyone]
    rows = [
        pieces.rows_from_json(parse_json(data[8:end], len(data)))
        for data, end in zip(everyone, ends, strict=True)
    ]
    bodies = [data[end:] for data, end in zip(everyone, ends, strict=True)]
    found = state_hash(hash_order(module, source.entries), rows, bodies, step)
    if found != sha256:
        raise CheckpointRejected(
            f"expected a state of hash {sha256[:12]}..., got {found[:12]}...: take another checkpoint"
        )


def _require_fit(source: Source, rest: Json, module: nn.Module, optimizer: Optimizer | None) -> None:
    found = source.contents(MODEL).layout
    expected = {}
    ties = ties_of(module)
    for name, x in module.state_dict(keep_vars=True).items():
        if name not in ties and name not in source.ties:
            dtype = found[name][1] if name in found and not _is_resident(x) else x.dtype
            expected[name] = (tuple(x.shape), dtype)
    pieces.require_layout(source, MODEL, expected)
    if optimizer is None:
        return
    if rest is None:
        raise CheckpointRejected("expected the state of an optimizer, got none: load without an optimizer")
    state.require_fit(module, optimizer, rest, source.contents(OPTIMIZER).layout, local(optimizer))


def _is_resident(x: Tensor) -> bool:
    home = claims.home(x)
    return home is None or home.resident


def _read(source: Source, module: nn.Module, optimizer: Optimizer | None, division: Holding) -> Read:
    """The parts that this rank holds: of each entry a range."""
    ranges: dict[str, tuple[int, int]] = {}
    model = state_parts(module)
    of_model = {part.name for part in model} | {name for name, _ in module.named_parameters()}
    for name, entry in source.entries.items():
        if name.startswith(MODEL) and name.removeprefix(MODEL) not in of_model:
            ranges[name] = (0, entry.numel)
    for part in model:
        ranges[MODEL + part.name] = (part.first, part.last)
    for full, entry in source.entries.items():
        if optimizer is None or not full.startswith(OPTIMIZER):
            continue
        piece = division.held.get(split(full)[1])
        if piece is not None and entry.shape == tuple(piece.parameter.shape) and entry.shape:
            ranges[full] = (piece.first, piece.last)
        elif piece is not None or split(full)[0].startswith(f"{OPTIMIZER}param_groups."):
            ranges[full] = (0, entry.numel)
    return Read({name: _part(source, name, *ends) for name, ends in ranges.items()})


def _part(source: Source, name: str, first: int, last: int) -> Part:
    entry = source.entries[name]
    return Part(name, entry.shape, entry.dtype, first, last, source.read(name, first, last))


def _own(read: Read, source: Source, module: nn.Module, division: Holding) -> Iterator[Part]:
    """What this rank hashes: over all ranks each element once, as in ``owned``."""
    for name in hash_order(module, source.entries):
        entry = source.entries[name]
        of_parameter = name.removeprefix(MODEL) if name.startswith(MODEL) else split(name)[1]
        piece = division.held.get(of_parameter)
        if of_parameter not in division.divided:
            if division.group.rank == 0:
                yield read.part(name, 0, entry.numel)
        elif piece is not None:
            if entry.shape == tuple(piece.parameter.shape) and entry.shape:
                yield read.part(name, piece.first, piece.last)
            elif piece.first == 0:
                yield read.part(name, 0, entry.numel)


def _put_model(read: Read, source_ties: Mapping[str, str], module: nn.Module) -> None:
    """Weights and buffers, in the memory that they have."""
    homes = claims.homes(module.parameters())
    with torch.no_grad():
        if all(home.resident for home in homes):
            model = {
                name.removeprefix(MODEL): part.tensor.view(part.shape)
                for name, part in read.values.items()
                if name.startswith(MODEL)
            }
            ties = {**source_ties, **ties_of(module)}
            module.load_state_dict({name: model[ties.get(name, name)] for name in module.state_dict()})
            return
        for part in state_parts(module):
            part.tensor.copy_(read.values[MODEL + part.name].tensor.view(part.tensor.shape))
        for home in homes:
            home.share("weights that were loaded")
            if isinstance(home, Unit):
                home.materialised = True


def _put_optimizer(
    read: Read, rest: Json, module: nn.Module, optimizer: ShardedOptimizer, held: Mapping[str, Held]
) -> None:
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, Tensor] = {}
    for full, value in rest["scalars"].items():
        key, name = split(full)
        states.setdefault(name, {})[key] = value
    for full, part in read.values.items():
        if full.startswith(OPTIMIZER):
            bare = full.removeprefix(OPTIMIZER)
            key, name = split(bare)
            if key.startswith("param_groups."):
                options[bare] = part.tensor.view(part.shape)
            else:
                states.setdefault(name, {})[key] = _placed(part, held[name])
    names = {id(piece.parameter): name for name, piece in held.items()}
    loaded = [
        {
            "parameter": number,
            "first": piece.first,
            "last": piece.last,
            "state": states.get(names[id(piece.parameter)], {}),
        }
        for number, piece in optimizer.shards.held.items()
    ]
    optimizer.load_state_dict(
        {
            "sharded": {"rank": optimizer.group.rank, "world_size": optimizer.group.size},
            "pieces": loaded,
            "param_groups": list(state.saved_groups(optimizer, options, rest)),
        }
    )
    for name, piece in held.items():
        state.keep_dtypes(optimizer.local_state.get(piece.tensor, {}), states.get(name, {}))


def _placed(part: Part, piece: Held) -> Tensor:
    """A moment as the local optimizer has it."""
    if part.is_whole:
        whole = part.tensor.view(part.shape)
        return piece.part_of(whole) if part.shape == tuple(piece.parameter.shape) else whole
    return tensors.aligned(part.tensor)
