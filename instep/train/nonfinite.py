"""Where a gradient stopped being finite: which rank, which micro-batch, which parameter.

The norm of the reduced gradient says that a number somewhere is nan, and costs nothing more than clipping
does. Where, is asked only when a run is about to end: every rank computes its micro-batches again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from instep.errors import Diverged
from instep.mesh.agree import all_or_none
from instep.mesh.process_group import Group
from instep.mesh.rank_process import as_told
from instep.ordered.hash import Entry
from instep.ordered.replicas import ranks_listed
from instep.run.health import Health
from instep.train.recompute import Compute

OPERATION = "the search for a number that is not finite"
UNSEEN = (
    "No micro-batch shows it when its rank computes it again: finite gradients have overflowed when they "
    "were added, or an exchange or the memory of a rank has changed them; set checks.leaves_every to watch "
    "the ranks"
)


@dataclass(frozen=True)
class NonFinite:
    """The first number that is not finite.

    ``leaf`` None: the weight ``first`` itself is not, on all of ``ranks``. Else it is in micro-batch
    ``leaf``, computed by ``ranks``, one rank: in its loss, its gradients, or both. Of the gradients,
    ``first`` is the first in registration order, ``last`` the last, which backward came to first; both ""
    if all gradients are finite.
    """

    leaf: int | None
    ranks: tuple[int, ...]
    first: str
    last: str
    loss: bool

    def __str__(self) -> str:
        who = ranks_listed(self.ranks)
        if self.leaf is None:
            return f"{self.first!r} itself is not finite on {who}"
        where = f"micro-batch {self.leaf}, which {who} computed"
        if not self.first:
            return f"the loss of {where}, is not finite, though all its gradients are"
        up_to = (
            f", and others up to {self.last!r}, where backward came first," if self.last != self.first else ""
        )
        what = "the loss and the gradient" if self.loss else "the gradient"
        return f"{what} of {self.first!r}{up_to} in {where}, {'are' if self.loss else 'is'} not finite"


def first_nonfinite(
    compute: Compute, leaves: Iterable[int], group: Group, weights: Iterable[Entry] = ()
) -> NonFinite | None:
    """The first of ``weights``, else of the lowest micro-batch, that is not finite; None if all are.

    Collective: every rank passes its own ``leaves`` of the step, and gets the same answer. Costs up to the
    step's forwards and backwards. It must come before the update, and before anything else that changes
    weights.

    Raises:
        an error of ``compute``: on every rank.
    """
    mine = all_or_none(group, OPERATION, lambda: _search(compute, leaves, weights))
    everyone = [json.loads(data) for data in group.all_gather_bytes(json.dumps(mine).encode(), OPERATION)]
    found = {rank: said for rank, said in zip(group.ranks, everyone, strict=True) if said is not None}
    if not found:
        return None
    lowest = min(found, key=lambda rank: (_place(found[rank]), rank))
    answer = found[lowest]
    same = [rank for rank, said in found.items() if answer["leaf"] is None and said == answer]
    return NonFinite(ranks=tuple(same or [lowest]), **answer)


def give_up(
    health: Health,
    reason: str,
    norm: float,
    *,
    step: int,
    compute: Compute,
    leaves: Iterable[int],
    group: Group,
    weights: Iterable[Entry] = (),
) -> NoReturn:
    """Raise ``Diverged`` on every rank, with the culprit if the norm is not finite. Collective.

    ``reason`` and ``norm`` are those of ``step``, with which ``health`` was exhausted; the rest is for
    ``first_nonfinite``.
    """
    count = health.in_a_row
    steps = "1 step was skipped" if count == 1 else f"{count} steps in a row were skipped"
    message = f"step {step}: {reason}; {steps}, and checks.max_skipped is {health.checks.max_skipped}. "
    found = None
    if math.isfinite(norm):
        message += "The norms have risen to stay: lower optim.lr, or raise checks.spike"
    elif (found := first_nonfinite(compute, leaves, group, weights)) is None:
        message += UNSEEN
    else:
        message += (
            f"First of all, {found}. Lower optim.lr, or resume from an earlier checkpoint with these steps "
            "in checks.skip_steps"
        )
    error = Diverged(message, ranks=found.ranks if found else (), parameter=found.first if found else "")
    raise as_told(error) if group.rank else error


def _search(compute: Compute, leaves: Iterable[int], weights: Iterable[Entry]) -> dict[str, object] | None:
    """What this rank finds first, as the fields of ``NonFinite`` without its ranks."""
    bad = _not_finite(dict(weights))
    if bad:
        return {"leaf": None, "first": bad[0], "last": bad[-1], "loss": False}
    for leaf in leaves:
        computed = compute(leaf)
        bad = _not_finite(computed.gradients)
        loss = not bool(torch.isfinite(computed.loss).all())
        if bad or loss:
            return {
                "leaf": leaf,
                "first": bad[0] if bad else "",
                "last": bad[-1] if bad else "",
                "loss": loss,
            }
    return None


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of those with a nan or an infinity."""
    dense = {name: x.to_dense() if x.is_sparse else x for name, x in tensors.items()}
    return [name for name, x in dense.items() if not bool(torch.isfinite(x.detach()).all())]


def _place(said: Mapping[str, object]) -> int:
    leaf = said["leaf"]
    return leaf if isinstance(leaf, int) else -1
