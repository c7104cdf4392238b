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
from typing import Any

from torch import Tensor, nn

from instep.reduce.buckets import Bundle
from instep.state.hash import SHORT, tensor_digest
from instep.state.homes import Wrapped, offered
from instep.step.reduction import Reduction


@dataclass
class GradientHashes:
    """One step's hashes on this rank: 16 hex digits a parameter, by its name, in registration order.

    ``leaves[i]`` of micro-batch i where the step was ``declared``, else of rank i of the group; ``reduced``
    of ``.grad`` when the step had ended, empty if it raised, or where it is in slices. If it was reduced
    several times in the step, these are of the last time, and ``firsts`` are the ``leaves`` of the first,
    which began at ``begun_ns``; 0: not at all.
    """

    leaves: dict[int, dict[str, str]] = field(default_factory=dict)
    reduced: dict[str, str] = field(default_factory=dict)
    declared: bool = False
    firsts: dict[int, dict[str, str]] = field(default_factory=dict)
    begun_ns: int = 0


@contextmanager
def observe_reduction(reduction: Reduction) -> Iterator[GradientHashes]:
    """Inside, one step; afterwards the hashes of its gradients."""
    hashes = GradientHashes()
    found: dict[int, dict[int, str]] = {}  # by leaf and position
    first: dict[int, dict[int, str]] = {}

    def observe(leaf: int, bucket: Bundle, values: Tensor) -> None:
        hashes.declared = reduction.plan is not None and reduction.plan.declared
        hashes.begun_ns = hashes.begun_ns or time.monotonic_ns()
        views = zip(bucket.slots, bucket.views(values), strict=True)
        digests = {slot.position: tensor_digest(view).hex()[:SHORT] for slot, view in views}
        found.setdefault(leaf, {}).update(digests)
        first[leaf] = {**digests, **first.get(leaf, {})}

    reduction.observer = observe
    try:
        yield hashes
        names = reduction.names
        for told, its in ((hashes.leaves, found), (hashes.firsts, first)):
            told |= {leaf: {names[i]: its[leaf][i] for i in sorted(its[leaf])} for leaf in sorted(its)}
        reduced = [(name, p.grad) for name, p in zip(names, reduction.parameters, strict=True)]
        hashes.reduced = {name: tensor_digest(x).hex()[:SHORT] for name, x in reduced if x is not None}
    finally:
        reduction.observer = None


def reductions_of(models: Mapping[str, Any]) -> Iterator[tuple[str, Reduction]]:
    """What reduces gradients that can be hashed, one micro-batch after the other, by ``key``: the name of its
    model, and of its part of the model."""
    for name, model in models.items():
        # Of a model that is wrapped in parts, each part.
        for path, inner in model.named_modules() if isinstance(model, nn.Module) else [("", model)]:
            if isinstance(said := offered(inner), Wrapped):
                for part, reduction in said.reductions.items():
                    yield key(f"{name}.{path}".rstrip("."), part), reduction


def key(model: str, part: str) -> str:
    """Of a reduction of ``part`` of ``model``, the same on all ranks that have that part."""
    return f"{model}/{part}" if part else model


def model_of(key: str) -> str:
    """The model of a ``key``."""
    return key.partition("/")[0]


def joined(parts: Mapping[str, GradientHashes]) -> GradientHashes:
    """Those of several reductions, by ``key``, as one; a parameter's name begins with its model's, if there
    are several models."""
    found = GradientHashes()
    is_one = len(set(map(model_of, parts))) == 1
    for part, hashes in parts.items():
        begin = "" if is_one else f"{model_of(part)}."
        for leaf, digests in hashes.leaves.items():
            found.leaves.setdefault(leaf, {}).update({begin + name: x for name, x in digests.items()})
        found.reduced |= {begin + name: x for name, x in hashes.reduced.items()}
    return found
