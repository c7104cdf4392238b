"""Hashes of what each rank has computed and of what the reduction has made of it.

When two runs part, equal leaves with unequal sums accuse the reduction, and an unequal leaf the rank that
computed it. Every leaf, the gradient of one micro-batch, is hashed when it is whole in its bucket, before it
is added to another; the reduced gradient when the step ends, before it is clipped. It costs a copy to the
CPU, and a SHA-256 of every gradient: for a search, not for every day.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from instep.ordered.buckets import Bundle
from instep.ordered.hash import Entry, entry_digests
from instep.ordered.placeholder import slices_of
from instep.replicate.server import ParameterServer
from instep.replicate.wrapper import DataParallel
from instep.step.reduction import Reduction


@dataclass
class GradientHashes:
    """One step's hashes on this rank: 16 hex digits a parameter, by its name, in registration order.

    ``leaves[i]`` of micro-batch i where the step was ``declared``, else of rank i of the group; ``reduced``
    of ``.grad`` when the step had ended, empty if it raised, where it is in slices, and on the workers of a
    parameter server. If it was reduced several times in the step, these are of the last time, and ``firsts``
    are the ``leaves`` of the first, which began at ``begun_ns``; 0: not at all.
    """

    leaves: dict[int, dict[str, str]] = field(default_factory=dict)
    reduced: dict[str, str] = field(default_factory=dict)
    declared: bool = False
    firsts: dict[int, dict[str, str]] = field(default_factory=dict)
    begun_ns: int = 0


@contextmanager
def observe_gradients(model: nn.Module | ParameterServer) -> Iterator[GradientHashes]:
    """Inside, one step of ``model``; afterwards the hashes of its gradients.

    Raises:
        TypeError: ``model`` does not reduce in buckets that can be observed: ``ThreadedReplicas`` has its
        leaves in threads.
    """
    if not isinstance(model, DataParallel | ParameterServer):
        raise TypeError(
            f"expected a DataParallel or a ParameterServer, got {type(model).__name__}: to see the leaves of "
            "other strategies, train the same step with DataParallel, whose bits are the same"
        )
    with observe_reduction(model._reducer) as hashes:
        yield hashes


@contextmanager
def observe_reduction(reduction: Reduction) -> Iterator[GradientHashes]:
    """As ``observe_gradients``, of any wrapper, ``fully_shard`` too, by its ``reduction``."""
    hashes = GradientHashes()
    found: dict[int, dict[int, str]] = {}  # by leaf and position
    first: dict[int, dict[int, str]] = {}

    def observe(leaf: int, bucket: Bundle, values: Tensor) -> None:
        hashes.declared = reduction.plan is not None and reduction.plan.declared
        hashes.begun_ns = hashes.begun_ns or time.monotonic_ns()
        digests = dict(_leaf_digests(reduction, bucket, values))
        found.setdefault(leaf, {}).update(digests)
        first[leaf] = {**digests, **first.get(leaf, {})}

    reduction.observer = observe
    try:
        yield hashes
        names = reduction.names
        for told, its in ((hashes.leaves, found), (hashes.firsts, first)):
            told |= {leaf: {names[i]: its[leaf][i] for i in sorted(its[leaf])} for leaf in sorted(its)}
        hashes.reduced = entry_digests(_gradients(reduction))
    finally:
        reduction.observer = None


def joined(models: Mapping[str, GradientHashes]) -> GradientHashes:
    """Those of several models as one; a parameter's name begins with its model's, if there are several."""
    if len(models) == 1:
        return next(iter(models.values()))
    found = GradientHashes()
    for model, hashes in models.items():
        for leaf, digests in hashes.leaves.items():
            found.leaves.setdefault(leaf, {}).update({f"{model}.{name}": x for name, x in digests.items()})
        found.reduced |= {f"{model}.{name}": x for name, x in hashes.reduced.items()}
    return found


def _leaf_digests(reduction: Reduction, bucket: Bundle, values: Tensor) -> Iterator[tuple[int, str]]:
    for slot, view in zip(bucket.slots, bucket.views(values), strict=True):
        (digest,) = entry_digests([(reduction.names[slot.position], view)]).values()
        yield slot.position, digest


def _gradients(reduction: Reduction) -> Iterator[Entry]:
    for name, p in zip(reduction.names, reduction.parameters, strict=True):
        if p.grad is not None and slices_of(p.grad) is None:
            yield name, _dense(p.grad)


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.is_sparse else x
