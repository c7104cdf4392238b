"""What ``verify`` has to know of a sharded module: which pieces of gradients and weights this rank has."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from instep.shard.slices import Slices
from instep.shard.stage3 import Stage3
from instep.step.backward import Backward
from instep.verify.subject import Piece, Subject, Value


def subject_of(
    backward: Backward, reducer: Slices, stage3: Stage3 | None, *, strategy: str, seed: int
) -> Subject:
    """The module of ``backward``, whose weights are in slices too if there is a ``stage3``."""
    position = {id(p): i for i, p in enumerate(reducer.parameters)}
    held = [x for space in reducer.spaces for x in space.held]
    return Subject(
        model=backward.module,
        backward=backward,
        strategy=strategy,
        seed=seed,
        copy=reducer.ranks.replica,
        pieces=[Piece(position[id(x.parameter)], x.part_of, partial(reducer.gradient_of, x)) for x in held],
        values=_values(backward, stage3),
        memory=[bucket.reduced for bucket in reducer.buckets],
        apart=nullcontext if stage3 is None else stage3.apart,
    )


def _values(backward: Backward, stage3: Stage3 | None) -> list[Value]:
    """Masters of what is in slices, which parameters do not show; all of the others."""
    units = [] if stage3 is None else stage3.units
    names = {id(p): name for unit in units for p, name in zip(unit.parameters, unit.names, strict=True)}
    return [
        *(Value(names[id(x.parameter)], x.first, x.tensor) for unit in units for x in unit.held),
        *(Value(name, 0, p) for name, p in backward.module.named_parameters() if id(p) not in names),
    ]
