"""Where a gradient stopped being finite: which rank, which micro-batch, which parameter.

    steps skipped in a row        1    2    ...   max_skipped   one more
    each gradient is looked at    no   no   ...   no            as it comes: if one is bad, the run ends here

The norm of the reduced gradient says that a number somewhere is nan, and no more. Where, is asked only when a
run is about to end; a script's step cannot be computed again for it, because what it reads may have moved on.
So the step with which the run may end is watched from its beginning: a hook on every parameter sees each
gradient as backward brings it, in whatever wrapper. It costs a look at every gradient of every micro-batch,
in no other step, and the bits are the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from instep.errors import Diverged
from instep.launch.rank_exit import mark_secondary
from instep.run.script_training import ScriptTraining
from instep.state.homes import Wrapped, autograd_leaf, offered
from instep.state.replicas import ranks_listed

OPERATION = "the search for a number that is not finite"
UNSEEN = (
    "The gradients of all micro-batches were finite as they were computed{}: they have overflowed when they "
    "were added, or the script, an exchange or the memory of a rank has changed them; set "
    "checks.replay_every to watch the ranks"
)
RISEN = "The norms have risen to stay: lower the learning rate, or raise spike"
FIX = "Lower the learning rate, or go on from an earlier checkpoint with skip_steps {}, counted from 0"


@dataclass(frozen=True)
class Culprit:
    """The first number that is not finite.

    ``is_weight``: the weight ``first`` itself is not, on all of ``ranks``. Else it is in the gradients that
    ``ranks``, one rank, computed, of ``micro_batch`` where the step was declared: ``first`` is the first in
    registration order, ``last`` the last, which backward came to first.
    """

    ranks: tuple[int, ...]
    first: str
    last: str
    micro_batch: int | None = None
    is_weight: bool = False

    def __str__(self) -> str:
        who = ranks_listed(self.ranks)
        if self.is_weight:
            return f"the weight {self.first!r} itself is not finite on {who}"
        whose = f"that {who} computed"
        if self.micro_batch is not None:
            whose = f"of micro-batch {self.micro_batch}, which {who} computed,"
        if self.last == self.first:
            return f"the gradient of {self.first!r} {whose} is not finite"
        return (
            f"gradients {whose} are not finite: that of {self.first!r}, and others up to that of "
            f"{self.last!r}, where backward came first"
        )


class NonFiniteSearch:
    """Looks for what is not finite in the steps of ``training``.

    In a step: ``watched`` around it; ``look_at`` the gradients that were judged; ``give_up`` at its end,
    where ``training.health`` is exhausted.
    """

    def __init__(self, training: ScriptTraining) -> None:
        self.training = training
        self._seen: list[tuple[int | None, int, Tensor]] = []  # micro-batch, parameter, is it finite
        self._in_sum = ""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, gradients are looked at as they come, if the run may end with this step."""
        self._seen, self._in_sum = [], ""
        if not self.training.health.at_the_limit:
            yield
            return
        asked: dict[int, Callable[[], int | None]] = {}  # by the identity of the parameter
        for model in self.training.registered.models.values():
            if isinstance(said := offered(model), Wrapped):
                asked |= {id(p): said.micro_batch for p in said.module.parameters()}
        handles = [
            autograd_leaf(p).register_hook(partial(self._look, i, asked.get(id(p), lambda: None)))
            for i, (_, p) in enumerate(self.training.module.named_parameters())
            if p.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def look_at(self, module: nn.Module) -> None:
        """The gradients of ``module``, of which all or some are about to be dropped, were judged."""
        self._in_sum = next(_not_finite(module), "")

    def give_up(self, reason: str, norm: float) -> NoReturn:
        """Raise ``Diverged`` on every rank, with the culprit if the ``norm`` is not finite. Collective then.

        ``reason`` and ``norm`` are those of the step, with which health was exhausted.
        """
        training, health = self.training, self.training.health
        count = health.in_a_row
        steps = "1 step was skipped" if count == 1 else f"{count} steps in a row were skipped"
        message = f"step {training.steps_done}: {reason}; {steps}, and max_skipped is "
        message += f"{health.checks.max_skipped}. "
        found, in_sum = (None, "") if math.isfinite(norm) else self._gather()
        if math.isfinite(norm):
            message += RISEN
        elif found is not None:
            skipped = range(training.steps_done - count + 1, training.steps_done + 1)
            message += f"First of all, {found}. {FIX.format(', '.join(map(str, skipped)))}"
        else:
            message += UNSEEN.format(f", and that of {in_sum!r} is not any more" if in_sum else "")
        first = in_sum if found is None else found.first
        error = Diverged(message, ranks=found.ranks if found else (), parameter=first)
        # What the step was left with has said no more than the reason.
        raise (mark_secondary(error) if training.group.rank else error) from None

    def _gather(self) -> tuple[Culprit | None, str]:
        """What all ranks have found together, and the parameter whose reduced gradient one has found."""
        training, mine = self.training, json.dumps(self._own()).encode()
        group = training.group
        told = [json.loads(said) for said in group.all_gather_bytes(mine, OPERATION)]
        everyone: dict[int, Any] = dict(zip(group.ranks, told, strict=True))
        names = [name for name, _ in training.module.named_parameters()]
        in_sum = next((said["sum"] for said in told if said["sum"]), "")
        weights = {rank: said["weight"] for rank, said in everyone.items() if said["weight"] is not None}
        if weights:
            first = min(weights.values())
            ranks = tuple(rank for rank, its in weights.items() if its == first)
            return Culprit(ranks, names[first], names[first], is_weight=True), in_sum
        gradients = {rank: said["gradient"] for rank, said in everyone.items() if said["gradient"]}
        if not gradients:
            return None, in_sum
        rank = min(gradients, key=lambda rank: (_place(gradients[rank][0]), rank))
        micro_batch, lowest, highest = gradients[rank]
        return Culprit((rank,), names[lowest], names[highest], micro_batch), in_sum

    def _own(self) -> dict[str, Any]:
        """What this rank has found, parameters by their number."""
        numbers = {
            name: i for i, (name, p) in enumerate(self.training.module.named_parameters()) if p.requires_grad
        }
        held = [(numbers[name], x) for name, x in self.training.entries() if name in numbers]
        weight = min((i for i, x in held if not bool(_is_finite(x))), default=None)
        bad: dict[int | None, list[int]] = {}
        for micro_batch, i, flag in self._seen:
            if not bool(flag):
                bad.setdefault(micro_batch, []).append(i)
        gradient = None
        if bad:
            at = min(bad, key=_place)
            gradient = [at, min(bad[at]), max(bad[at])]
        return {"weight": weight, "gradient": gradient, "sum": self._in_sum}

    def _look(self, i: int, micro_batch: Callable[[], int | None], gradient: Tensor | None) -> None:
        if gradient is not None:  # else a function has passed None on
            self._seen.append((micro_batch(), i, _is_finite(gradient)))  # a GPU is not waited for


def _not_finite(module: nn.Module) -> Iterator[str]:
    """The parameters whose ``.grad`` is not finite, as far as it is here."""
    for name, p in module.named_parameters():
        if p.grad is not None and not bool(_is_finite(p.grad)):
            yield name


def _place(micro_batch: int | None) -> int:
    """None is that of an undeclared step: each rank has one."""
    return -1 if micro_batch is None else micro_batch


def _is_finite(x: Tensor) -> Tensor:
    x = x.detach()
    return torch.isfinite(x.coalesce().values() if x.is_sparse else x).all()
