"""Which parameters belong to a sharded optimizer, and in which space a parameter lives already.

Two sharded optimizers would move each other's memory away, so each claims its parameters. Whoever has sharded
a module settles its parameters in the spaces that it made, and an optimizer takes them from there.

Weak on both sides: a claim ends with the optimizer, or when it is closed; a home with the space.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from instep.shard.space import Space

_claims: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> reference to its optimizer
_homes: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> reference to its space


def require_free(parameters: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` if another sharded optimizer, which is not closed, has one of ``parameters``."""
    if any(map(_owner, parameters)):
        gc.collect()  # one that is part of a cycle, with its scheduler for instance, is gone only then
    for i, parameter in enumerate(parameters):
        if _owner(parameter) is not None:
            raise ValueError(
                f"trainable parameter {i}, shape {tuple(parameter.shape)}, belongs to another "
                "ShardedOptimizer: give each parameter to one, or close() the other first"
            )


def claim(parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
    """``parameters`` belong to ``optimizer`` until it is released or collected."""
    for parameter in parameters:
        _claims[parameter] = weakref.ref(optimizer)


def release(parameters: Sequence[Tensor]) -> None:
    """``parameters`` belong to nobody."""
    for parameter in parameters:
        _claims.pop(parameter, None)


def claimed(parameter: Tensor) -> bool:
    """Whether a sharded optimizer, which is not closed, has ``parameter``."""
    return _owner(parameter) is not None


def settle(space: Space) -> None:
    """The parameters of ``space`` live there, until it is collected or they are settled elsewhere."""
    for parameter in space.parameters:
        _homes[parameter] = weakref.ref(space)


def leave(space: Space) -> None:
    """The parameters of ``space`` live there no longer."""
    for parameter in space.parameters:
        if home(parameter) is space:
            del _homes[parameter]


def home(parameter: Tensor) -> Space | None:
    """The space that ``parameter`` was settled in, if it still is there."""
    known = _homes.get(parameter)
    space: Space | None = None if known is None else known()
    return space


def homes(tensors: Iterable[Tensor]) -> list[Space]:
    """The spaces that some of ``tensors`` live in, each once."""
    found = [space for x in tensors if (space := home(x)) is not None]
    return list({id(space): space for space in found}.values())


def _owner(parameter: Tensor) -> Optimizer | None:
    known = _claims.get(parameter)
    owner: Optimizer | None = None if known is None else known()
    return owner
