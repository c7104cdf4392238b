"""This rank's parts of the state of a module and its optimizer, sharded or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.ordered.hash import Entry, persistent_buffers, state_entries
from instep.ordered.parts import Part
from instep.shard import claims
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.space import Held


def state_parts(module: nn.Module, optimizer: Optimizer | None = None) -> list[Part]:
    """Parameters, persistent buffers and moments, by name, in the order of the manifest; no communication.

    Of what is sharded, a rank has its pieces and nothing of the rest. What is one number for a parameter
    (a count of steps) is with every piece of it.

    Raises:
        ValueError: a sharded parameter is not contiguous, so that a piece of its memory is none of its
            elements in order.
    """
    parameters, buffers = dict(module.named_parameters()), persistent_buffers(module)
    homes = _homes(parameters.values())
    if not homes and not isinstance(optimizer, ShardedOptimizer):
        return [Part.whole(name, x) for name, x in state_entries(module, optimizer)]
    parts: list[Part] = []
    for place, (name, p) in enumerate(parameters.items()):
        if id(p) not in homes:
            parts.append(Part.whole(name, p, (place, "")))
        elif (piece := homes[id(p)]) is not None:
            parts.append(_part(name, piece, piece.tensor.detach(), (place, "")))
    first = len(parameters)
    parts += [Part.whole(name, b, (first + i, "")) for i, (name, b) in enumerate(buffers)]
    first += len(buffers)
    moments = _moments(optimizer) if isinstance(optimizer, ShardedOptimizer) else {}
    for place, (name, p) in enumerate(parameters.items(), start=first):
        if (kept := moments.get(id(p))) is not None:
            parts += _kept(name, *kept, place)
    return parts


def replicated_entries(module: nn.Module) -> list[Entry]:
    """Those of its parameters and persistent buffers that every rank has all of."""
    homes = _homes(module.parameters())
    return [(name, x) for name, x in state_entries(module) if id(x) not in homes]


def _homes(parameters: Iterable[Tensor]) -> dict[int, Held | None]:
    """By the identity of a parameter that no rank has all of: this rank's piece of it, if it has one."""
    homes = {id(p): home for p in parameters if (home := claims.home(p)) is not None and not home.resident}
    spaces = {id(home): home for home in homes.values()}
    pieces = {id(x.parameter): x for space in spaces.values() for x in space.held}
    return {each: pieces.get(each) for each in homes}


def _moments(optimizer: ShardedOptimizer) -> dict[int, tuple[Held, Mapping[str, Any]]]:
    """By the identity of a parameter: this rank's piece of it, and what is kept for that."""
    state = optimizer.local_state
    return {id(x.parameter): (x, state.get(x.tensor, {})) for x in optimizer.shards.held.values()}


def _kept(name: str, piece: Held, state: Mapping[str, Any], place: int) -> Iterator[Part]:
    for key in sorted(state):
        full, value, order = f"{key}/{name}", state[key], (place, key)
        if isinstance(value, Tensor):
            moment = value.shape == piece.tensor.shape
            yield _part(full, piece, value, order) if moment else Part.whole(full, value, order)


def _part(name: str, piece: Held, value: Tensor, order: tuple[int, str]) -> Part:
    """``value``, which has the shape of ``piece``, as that part of an entry."""
    shape = tuple(piece.parameter.shape)
    if not piece.is_whole:
        strides = piece.strides or piece.parameter.stride()
        if not torch.empty_strided(shape, strides, device="meta").is_contiguous():
            raise ValueError(
                f"{name!r} is cut, and not contiguous: make the parameter with .contiguous() before sharding"
            )
    return Part(name, shape, value.dtype, piece.first, piece.last, value, order)
