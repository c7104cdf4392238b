"""What a rank keeps of a sharded state: over all ranks, every element of every entry exactly once.

weights     the elements whose moments this rank has; it was the one that updated them. So writing is shared
            out evenly even where every rank has all weights
moments     its pieces; what is one number for a parameter, with the piece that begins the parameter
the rest    frozen parameters, buffers, hyper-parameters that are tensors: the group's first rank

Where the pieces exist several times (mesh axes ``dp`` x ``shard``), those of the first replica count, and the
others keep nothing; all of them read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint import moments, state, tensors
from instep.checkpoint.manifest import Json
from instep.checkpoint.pieces import MODEL, OPTIMIZER
from instep.mesh.group import Group
from instep.ordered.parts import Part
from instep.replicate.wrapper import DataParallel
from instep.shard import claims
from instep.shard.fully import shardings
from instep.shard.optimizer import ShardedOptimizer
from instep.shard.parts import state_parts
from instep.shard.space import Held


@dataclass(frozen=True)
class Owned:
    """``parts`` with names as in ``pieces``; ``rest`` is what of the optimizer is no tensor."""

    parts: list[Part]
    rest: Json


@dataclass(frozen=True)
class Holding:
    """A module, and its optimizer if there is one, divided among the ranks of ``group``.

    ``held`` are this rank's pieces of the parameters by name. ``divided`` are the names of all whose pieces
    are kept where they are held; none on a rank that is no ``keeper``, whose pieces are another's too.
    """

    group: Group
    held: dict[str, Held]
    divided: frozenset[str]
    keeper: bool = True


def local(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps this rank's pieces; itself, if it is not sharded."""
    return optimizer._inner if isinstance(optimizer, ShardedOptimizer) else optimizer


def holding(module: nn.Module, optimizer: Optimizer | None, everyone: Group | None = None) -> Holding | None:
    """How they are divided; None where every rank has all of both.

    ``everyone`` are the ranks that train together, of which each row may have all of the state; by default
    those that ``module`` is wrapped for.
    """
    parameters = dict(state.unwrapped(module).named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    homes = claims.homes(parameters.values())
    held = [x for home in homes for x in home.held]
    divided = [p for home in homes for p in home.parameters]
    groups = [home.group for home in homes]
    if isinstance(optimizer, ShardedOptimizer):
        held += optimizer.shards.held.values()
        divided += optimizer.shards.owned
        groups.insert(0, optimizer.group)
    if not groups:
        return None
    row, whole = groups[0], everyone or _wrapped_for(module)
    if whole is None or whole.size <= row.size:
        whole = row
    keeper = whole.ranks[0] in row.ranks  # of the first replica
    return Holding(
        group=whole,
        held={names[id(x.parameter)]: x for x in held if id(x.parameter) in names},
        divided=frozenset(names[id(p)] for p in divided if id(p) in names and keeper),
        keeper=keeper,
    )


def require_all_rows(division: Holding, optimizer: Optimizer | None) -> None:
    """Raise ``ValueError`` where only the ranks of one of several rows are known, which all would write."""
    if not isinstance(optimizer, ShardedOptimizer) or optimizer.num_rows == 1:
        return
    row = optimizer.group.size
    if division.group.size == row:
        raise ValueError(
            f"{optimizer.num_rows} rows of {row} ranks have the optimizer's state, and the module does not "
            "know that the others exist: pass the DataParallel that wraps it"
        )


def _wrapped_for(module: nn.Module) -> Group | None:
    """The ranks that ``module``, or what is sharded in it, is trained by, if it knows."""
    if isinstance(module, DataParallel):
        return module.group
    found = [x.ranks.whole for x in shardings(module)]
    return max(found, key=lambda group: group.size, default=None)


def owned(module: nn.Module, optimizer: Optimizer | None, division: Holding) -> Owned:
    """What this rank writes: live tensors, without communication.

    Raises:
        ValueError: as :func:`instep.shard.parts.state_parts`, or a parameter of the optimizer is not one of
            ``module``.
    """
    inner = state.unwrapped(module)
    of_model = {name for name, _ in (*inner.named_parameters(), *inner.named_buffers())}
    first_rank = division.group.rank == 0
    parts = list(_beside(inner)) if first_rank else []
    for part in state_parts(inner, optimizer):
        if part.name not in of_model:
            piece = division.held.get(moments.split(part.name)[1])
            if division.keeper and piece is not None and (not part.is_whole or piece.first == 0):
                parts.append(part._replace(name=OPTIMIZER + part.name))
        elif part.name not in division.divided:
            if first_rank:
                parts.append(part._replace(name=MODEL + part.name))
        elif (piece := division.held.get(part.name)) is not None:
            parts.append(narrow(part, piece)._replace(name=MODEL + part.name))
    if not isinstance(optimizer, ShardedOptimizer):
        return Owned(parts, None)
    if first_rank:
        parts += _options(optimizer.param_groups)
    return Owned(parts, _rest(inner, optimizer, division))


def _beside(module: nn.Module) -> Iterator[Part]:
    """What a state dict has that is neither parameter nor buffer."""
    seen = {id(x) for x in (*module.parameters(), *module.buffers())}
    for name, x in module.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor) and id(x) not in seen:
            yield Part.whole(MODEL + name, x)


def _rest(module: nn.Module, optimizer: ShardedOptimizer, division: Holding) -> Json:
    return {
        "class": type(local(optimizer)).__name__,
        "groups": state.optimizer_groups(module, optimizer),
        "scalars": {
            f"{key}/{name}": value
            for name, piece in division.held.items()
            for key, value in optimizer.local_state.get(piece.tensor, {}).items()
            if not isinstance(value, Tensor)
        },
    }


def narrow(part: Part, piece: Held) -> Part:
    """``part``, or of a whole one what belongs to ``piece``."""
    if not part.is_whole or piece.is_whole:
        return part
    if not part.tensor.is_contiguous():
        raise ValueError(
            f"{part.name!r} is cut, and not contiguous: make the parameter with .contiguous() before sharding"
        )
    flat = part.tensor.view(-1)[piece.first : piece.last]
    return part._replace(first=piece.first, last=piece.last, tensor=flat)


def _options(groups: Sequence[dict[str, object]]) -> Iterator[Part]:
    for index, group in enumerate(groups):
        for key, value in group.items():
            if isinstance(value, Tensor):
                yield Part.whole(f"{OPTIMIZER}param_groups.{index}/{key}", value)


def ties_of(module: nn.Module) -> dict[str, str]:
    """The further names of parameters and buffers in the state dict, each with the first one."""
    found = dict(state.unwrapped(module).state_dict(keep_vars=True))
    if all(home.resident for home in claims.homes(found.values())):
        return tensors.split_ties(found)[1]
    firsts: dict[int, str] = {}  # weights that are not here have no address
    return {name: firsts[id(x)] for name, x in found.items() if firsts.setdefault(id(x), name) != name}


def merged(rests: Sequence[Json]) -> Json:
    """What of the optimizer is no tensor, from what each rank says; None without one."""
    if rests[0] is None:
        return None
    scalars = {name: value for rest in rests for name, value in rest["scalars"].items()}
    return {**rests[0], "scalars": {name: scalars[name] for name in sorted(scalars)}}
