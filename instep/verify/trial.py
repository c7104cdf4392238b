"""``verify``: one distributed step on the user's own model and batch, compared with one process.

For the reference every rank runs the module without exchanges on the batches of all ranks, one after another,
each from the same buffers and with the random numbers of the rank that has the batch. Afterwards everything
is as before: weights, buffers, gradients, random generators and the wrapper's own state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from instep.memory import as_bytes
from instep.mesh.join import find_ranks
from instep.net.agree import all_or_none
from instep.net.device import generators
from instep.net.process_group import Group
from instep.rng.generators import seed_generator, state_of
from instep.rng.keys import derive
from instep.step.reduction import StepPlan
from instep.step.running_statistics import OverGlobalBatch
from instep.verify.batch import pack, unpack
from instep.verify.comparison import ERRORS, Part, compare
from instep.verify.gradient_report import Report
from instep.verify.subject import Loss, Subject, loss_of

T = TypeVar("T")
Packed = tuple[str, Tensor]


def verify(subject: Subject, process_group: Any, batch: Any, loss: Loss | None, rtol: float | None) -> Report:
    """Compare the gradient of ``subject`` with that of one process. Collective over ``process_group``."""
    backward = subject.backward
    if backward.declared.micro_batch is not None:
        raise ValueError("verify() inside micro_batches(): call it between two steps")
    backward.look_back()
    group, _ = find_ranks(process_group, backward.reducer.group.timeout_s, what="verify()")
    try:
        return Trial(subject, group, loss).run(batch, rtol)
    finally:
        group.close()


class Trial:
    """One call of ``verify``; ``group`` has the ranks of the subject's reducer, and no other user."""

    def __init__(self, subject: Subject, group: Group, loss: Loss | None) -> None:
        self.subject, self.group, self.loss = subject, group, loss
        self.backward, self.reducer = subject.backward, subject.backward.reducer
        parameters = self.reducer.parameters
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.generators = generators(self.device)

    def run(self, batch: Any, rtol: float | None) -> Report:
        """Compare; every rank returns the same report. Collective."""
        subject, reducer = self.subject, self.reducer
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            self.state = stack.enter_context(RestoreOnExit(subject, self.generators))
            packed = self._agreed("preparing the batch", lambda: self._prepared(batch, rtol))
            return compare(
                self.group,
                dict(zip(reducer.names, reducer.parameters, strict=True)),
                subject.copy,
                subject.pieces,
                subject.values,
                lambda: self._distributed(packed),
                self._reference(packed),
                rtol=rtol,
                floor=reducer.options.nodes.tolerance,
                strategy=subject.strategy,
                ordered=reducer.options.ordered,
            )

    def _agreed(self, operation: str, function: Callable[[], T]) -> T:
        """``function()`` of this rank, once it has worked on all. Collective."""
        return all_or_none(self.group, f"the outcome of {operation}", function, errors=ERRORS)

    def _prepared(self, batch: Any, rtol: float | None) -> Packed:
        if rtol is not None and not rtol > 0:
            raise ValueError(f"rtol: expected a positive number, got {rtol!r}")
        for name, module in self.backward.module.named_modules():
            if not isinstance(module, nn.SyncBatchNorm | OverGlobalBatch) or self.group.size == 1:
                continue
            if module.training:
                raise ValueError(
                    f"{name!r} is a {type(module).__name__}, which mixes the batches of all ranks: one "
                    "process cannot recompute a rank's gradient. Put it into eval() mode, or use GroupNorm"
                )
        return pack(batch)

    def _distributed(self, packed: Packed) -> None:
        """Forward and backward of one synchronised step."""
        self.backward.sync, self.reducer.compares = True, False  # the report says it
        forward = partial(self._forward, self.subject.model, packed, self.group.rank)
        loss = self._agreed("forward", forward)
        self._agreed("backward", lambda: self._backward(loss))

    def _backward(self, loss: Tensor) -> None:
        """``loss.backward()``; an error is reported to the ranks that wait for this one's gradients."""
        reducer, before = self.reducer, self.reducer.exchanges
        try:
            loss.backward()
            if reducer.exchanges == before:
                raise ValueError(
                    "backward brought no gradient to any parameter of the wrapped module: compute the loss "
                    "from its output"
                )
        except BaseException:
            if reducer.exchanges == before and reducer.plan is None:
                size = reducer.group.size
                reducer.begin(StepPlan(False, size, tuple(range(r, r + 1) for r in range(size))))
            reducer.leave()
            raise

    def _reference(self, packed: Packed) -> Iterator[Part]:
        """The gradient of every rank's batch, which is sent when its turn comes. Collective."""
        self.backward.sync = False
        what, (text, mine) = "the exchange of batches", packed
        everyone = self.group.all_gather_bytes(f"{mine.numel()} {text}".encode(), what)
        for place, rank in enumerate(self.group.ranks):
            size, _, text = everyone[place].decode().partition(" ")
            data = mine if place == self.group.rank else mine.new_empty(int(size))
            if data.numel():
                self.group.broadcast(data, what, root=place)
            yield f"rank {rank}'s batch", partial(self._alone, (text, data), place)

    def _alone(self, packed: Packed, place: int) -> tuple[int, list[Tensor | None]]:
        """The gradients of the batch of the group's rank ``place``, computed by this process."""
        alone = self.subject.alone
        with nullcontext(self.reducer.parameters) if alone is None else alone() as parameters:
            self._forward(self.backward.module, packed, place).backward()
            return 1, [p.grad for p in parameters]

    def _forward(self, model: nn.Module, packed: Packed, place: int) -> Tensor:
        """The loss of that batch, from the buffers and with the random numbers that its rank has."""
        self.state.begin()
        for generator in self.generators:
            seed_generator(generator, derive(self.subject.seed, "verify", place))
        try:
            return loss_of(model, unpack(*packed, self.device), self.loss)
        except BaseException:
            self.reducer.interrupted()
            raise


class RestoreOnExit:
    """A context between two steps that restores the model, gradients, random generators and counters.

    Values are written back only where bits differ: a graph from before may hold them, and autograd takes even
    a write of the same bits for a change. Gradients are taken off their parameters meanwhile: buckets never
    write over one that is still referenced. Of sharded gradients (``Subject.memory``) there is a copy.
    """

    def __init__(self, subject: Subject, generators: list[torch.Generator]) -> None:
        self.backward = subject.backward
        self.module = self.backward.module
        self.reducer = self.backward.reducer
        self._generators = [(generator, state_of(generator)) for generator in generators]
        self._modules = [(m, m.training, dict(m._buffers)) for m in self.module.modules()]
        values = (*(value.tensor for value in subject.values), *subject.memory)
        self._values = [(x, x.detach().clone()) for x in values]
        self._buffers = [(x, x.detach().clone()) for x in self.module.buffers()]
        self._gradients = [(p, p.grad) for p in (*self.module.parameters(), *self.reducer.parameters)]
        self._wrapper_state = [
            (x, {name: copy.copy(getattr(x, name)) for name in x.changes})
            for x in (self.reducer, self.backward)
        ]

    def __enter__(self) -> RestoreOnExit:
        self.reducer.disable_reporting()  # the report says it
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:  # all ranks raise, and what one of them has left, the others leave too
            self.reducer.interrupted()
        self.reducer.lane.drain()  # it may still write to buckets, or report that this rank failed
        self.backward.look_back()
        self.begin()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        _write_back(self._values)
        for generator, state in self._generators:
            generator.set_state(state)
        for module, training, _ in self._modules:
            module.training = training
        for x, before in self._wrapper_state:
            for name, value in before.items():
                setattr(x, name, value)

    def begin(self) -> None:
        """Buffers as they were, no gradients."""
        for module, _, buffers in self._modules:
            module._buffers.clear()  # forward may have put others in their place
            module._buffers.update(buffers)
        _write_back(self._buffers)
        for parameter, _ in self._gradients:
            parameter.grad = None


def _write_back(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for x, before in pairs:
            if not torch.equal(as_bytes(x), as_bytes(before)):
                x.copy_(before)
