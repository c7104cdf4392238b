"""Who is responsible for a parameter on this rank: one table for the process, which every thread sees.

    home         divides its memory among ranks                        ``state/homes.py``
    optimizer    is the ``ShardedOptimizer`` that steps it             ``shard/checks.py``
    reducer      reduces its gradient                                  ``step/optimizer_guard.py``
    peers        know the ranks that have more of the gradient         ``reduce/norm.py``

References are weak on both sides: an entry ends with its parameter, a role with whoever has it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor


class GradientPeers:
    """Ranks that have other gradients than this one of the parameters that they own, or other parts."""

    cut = False  # ``.grad`` of a parameter is this rank's part of its gradient, a ``GradientShard``

    def pieces(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """``gradients``, of parameters of these peers, as the tensors whose blocks are summed."""
        return gradients

    def square_sums(self, own: Sequence[float]) -> list[float]:
        """Sums of squares of the blocks on all ranks, of which ``own`` are this rank's. Collective."""
        raise NotImplementedError

    def all_found_inf(self, found_inf: Tensor) -> None:
        """``found_inf`` is 1 on all ranks if it is on one. Collective."""
        raise NotImplementedError

    def changed(self) -> None:
        """The gradients on this rank have been clipped."""


def nobody() -> None:
    """A role that no object has."""


class Owner:
    """The roles of one ``parameter``, each a weak reference.

    Its reducer calls it ``name``, and number ``position``; None if the parameter was frozen when it was
    wrapped. ``release`` ends the reducer's wrapper.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter, partial(_drop, id(parameter)))
        self.home: Callable[[], Any] = nobody
        self.optimizer: Callable[[], Any] = nobody
        self.reducer: Callable[[], Any] = nobody
        self.peers: Callable[[], GradientPeers | None] = nobody
        self.name = ""
        self.position: int | None = None
        self.release: Callable[[], object] = nobody
        self.reductions_used = 0  # by the last optimizer step
        # A gradient that is the same on all ranks, and its version: any number of steps may use it.
        self.accepted: tuple[weakref.ref[Tensor], int] | None = None

    @property
    def reduces(self) -> bool:
        """Whether the wrapper still reduces."""
        return self.reducer() is not None and bool(getattr(self.release, "alive", True))


owners: dict[int, Owner] = {}  # by the identity of a parameter


def owner_of(parameter: Tensor) -> Owner | None:
    """The entry of ``parameter``."""
    owner = owners.get(id(parameter))
    return owner if owner is not None and owner.parameter() is parameter else None


def entry(parameter: Tensor) -> Owner:
    """The entry of ``parameter``, which is made if there is none."""
    owner = owner_of(parameter)
    if owner is None:
        owner = owners[id(parameter)] = Owner(parameter)
    return owner


def peers_of(parameter: Tensor) -> GradientPeers | None:
    """Who knows the ranks that have more of the gradient of ``parameter``; None if this rank has all."""
    owner = owner_of(parameter)
    return None if owner is None else owner.peers()


def _drop(key: int, reference: weakref.ref[Tensor]) -> None:
    """The parameter is gone, and its identity may be another's by now."""
    if (owner := owners.get(key)) is not None and owner.parameter is reference:
        del owners[key]
