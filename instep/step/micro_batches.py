"""The declared step: a global batch of G micro-batches, on whichever ranks they are computed.

for micro_batch in model.micro_batches(G):
    loss = f(model(x[micro_batch.index]))
    loss.backward()
optimizer.step()

In the place of G stands a ``DataSource`` that knows it, and gives each micro-batch its data.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import index, itemgetter
from typing import Any, Protocol, SupportsIndex
from weakref import WeakSet

import torch
from torch import Tensor, nn

from instep.mesh import deterministic
from instep.mesh.join import warn_of_default_threads
from instep.reduce.gradient_shard import GradientShard
from instep.rng.keys import LeafKeys
from instep.step.loss_scale import LossScale, is_compiled
from instep.step.parameter_registry import ParameterRegistry
from instep.step.reduction import Reduction, StepPlan
from instep.step.running_statistics import OverGlobalBatch, RunningStatistics


@dataclass
class MicroBatch:
    """One micro-batch of a declared step, as the loop over ``micro_batches`` yields it.

    Attributes:
        index: which one of the step's, from 0 to ``num_micro_batches`` - 1. Take its data by this number and
            the step, whichever rank you are on: then any number of ranks computes the same step.
        num_micro_batches: G, how many there are in the step, on all ranks together.
        weight: set it before backward if the loss is a *sum* over that many items (tokens, samples): the sum
            of all losses' gradients is divided by the sum of all weights. An int, 0 is allowed. Left at 1,
            the loss is a *mean*, and micro-batches count alike.
        data: what the ``instep.Loader`` that the step was declared with has read for it; else None. A tuple
            or a list can be taken apart in the loop: ``for x, y in model.micro_batches(loader)``.

    Example:
        >>> model = instep.DataParallel(model)
        >>> for micro_batch in model.micro_batches(8):
        ...     rows = range(micro_batch.index * 4, micro_batch.index * 4 + 4)
        ...     micro_batch.weight = y[rows].numel()
        ...     ((model(x[rows]) - y[rows]) ** 2).sum().backward()
        >>> micro_batch.checked_weight()
        4
    """

    index: int
    num_micro_batches: int
    weight: int = 1
    data: Any = None

    def __iter__(self) -> Iterator[Any]:
        if not isinstance(self.data, tuple | list):
            raise TypeError(
                "expected a tuple or a list in micro_batch.data to take apart, got "
                f"{type(self.data).__name__}: read micro_batch.data as it is; without an instep.Loader, read "
                "your data by micro_batch.index"
            )
        return iter(self.data)

    def checked_weight(self) -> int:
        """``weight``.

        Raises:
            ValueError: it is no int, or negative.
        """
        if type(self.weight) is not int or not 0 <= self.weight < 1 << 53:
            raise ValueError(
                f"weight of micro-batch {self.index}: expected a non-negative int below 2**53 (a number of "
                f"items), got {self.weight!r}; integers keep the sum of weights exact"
            )
        return self.weight


class DataSource(Protocol):
    """Where declared steps get their data from: an ``instep.Loader``, which stands before the next step.

    ``position``, ``identity`` and ``digest`` have to be the same on all ranks, and headers carry them.
    """

    num_micro_batches: int  # of each step
    identity: int  # digest of what decides which samples come next
    digest: int  # of the first sample, in the first step of this rank; else 0

    @property
    def position(self) -> int:
        """Samples of the steps so far."""

    def read(self, own: Sequence[int]) -> Iterator[tuple[Any, int]]:
        """Data and weight of each of the micro-batches ``own`` of the next step, in this order."""

    def advance(self) -> None:
        """The step has been made."""


def count_and_source(micro_batches: int | DataSource) -> tuple[int, DataSource | None]:
    """G, and where the data comes from, if that is not the caller's business."""
    if isinstance(micro_batches, SupportsIndex):
        if index(micro_batches) < 1:
            raise ValueError(f"micro_batches({micro_batches}): expected at least one micro-batch")
        return index(micro_batches), None
    if not hasattr(micro_batches, "num_micro_batches"):
        raise TypeError(
            f"micro_batches(): expected the number of micro-batches of the step, or an instep.Loader, got "
            f"{type(micro_batches).__name__}: instep.Loader(dataset, batch_size, micro_batch_size) deals out "
            "the samples of a dataset, so that each micro-batch has the same ones on any number of ranks"
        )
    return micro_batches.num_micro_batches, micro_batches


class DeclaredStep:
    """Runs the micro-batches of this rank, one step at a time.

    In a step: per micro-batch, the random generators are keyed, gradients gathered, and the rules checked
    that placement independence rests on; after the last one, gradients are reduced and set, and running
    statistics applied. ``micro_batch`` is the open one.
    """

    def __init__(
        self, module: nn.Module, reducer: Reduction, keys: LeafKeys, registry: ParameterRegistry
    ) -> None:
        self.module = module
        self.reducer = reducer
        self.keys = keys
        self.registry = registry
        self.statistics = RunningStatistics()
        self.inputs = reducer.inputs
        self._steps = 0
        self.micro_batch: MicroBatch | None = None
        self._buffers: list[tuple[str, nn.Module, str, Tensor | None, int, Tensor | None]] = []
        self._open: StepPlan | None = None  # of the step that is under way
        self.weight_taken: int | None = None  # of the open one, when its first gradient came
        self.iterators: WeakSet[Generator[MicroBatch, None, bool]] = WeakSet()  # of ``run``, that are kept

    def gradient_came(self) -> None:
        """A gradient of the open micro-batch has come: its weight counts from now on."""
        if self.micro_batch is not None and self.weight_taken is None:
            self.weight_taken = self.micro_batch.checked_weight()
            self.reducer.weight += self.weight_taken

    def abandon(self) -> None:
        """Give up the step that is under way, if one is, and tell no rank.

        Where its iterator was kept it ends here, and now: else it would when it is collected, and put
        generators back in the middle of another step.
        """
        self.reducer.abandon()  # first, else the end of an iterator would tell the others
        for iterator in list(self.iterators):
            iterator.close()

    def run(self, micro_batches: int | DataSource, step: int) -> Generator[MicroBatch, None, bool]:
        """Yield this rank's micro-batches of step ``step``, then set every ``.grad``; return True.

        Raises:
            ValueError: a rule of declared steps is broken; the message names it and the ways out.
            Desync: another rank left the step, or is in another one.
        """
        num_micro_batches, source = count_and_source(micro_batches)
        plan = self.plan(num_micro_batches, source, step)
        with self.begun(plan, source) as own:
            data = None if source is None else source.read(own)
            for leaf in own:
                micro_batch = MicroBatch(leaf, num_micro_batches)
                if data is not None:
                    with self.reducer.recorder.span("data", lane="data", leaf=leaf):
                        micro_batch.data, micro_batch.weight = next(data)
                with self.visit(micro_batch, gradients=True, last=leaf == own[-1]), self._watched(leaf, plan):
                    yield micro_batch
        return True

    def _watched(self, leaf: int, plan: StepPlan) -> AbstractContextManager[Any]:
        """Around the first micro-batch of all, on one rank."""
        first = self._steps == 1 and leaf == 0 and plan.num_leaves > 2  # halves are common in losses
        return (
            LossScale(plan.num_leaves) if first and not is_compiled(self.module.modules()) else nullcontext()
        )

    def plan(self, num_micro_batches: int, source: DataSource | None, step: int) -> StepPlan:
        """Who computes what of step ``step``, with data from ``source``."""
        plan = replace(self.reducer.assign(num_micro_batches), step=step)
        if source is None:
            return plan
        return replace(plan, data_position=source.position, data_identity=source.identity, data=source)

    @contextmanager
    def begun(self, plan: StepPlan, source: DataSource | None = None) -> Iterator[Sequence[int]]:
        """Around the visits of this rank's micro-batches, whose numbers it gives; then gradients are reduced.

        Left by an error, the step is given up, and the other ranks are told.
        """
        reducer, span = self.reducer, self.reducer.recorder.span
        with span("prepare", lane="host"):
            zeroed = self._check_start(plan.num_leaves)
            self.statistics.begin(map(itemgetter(1), self.registry.named_modules))
            reducer.begin(plan)
            own = plan.leaves[reducer.group.rank]
            if own and not reducer.sharded:
                reducer.has_zeros(zeroed)
            self.inputs.begin(plan.leaves, declared=True, source=plan.data)
            if self.statistics.norms:
                reducer.statistics = self.statistics
        self._step, self._open = plan.step, plan
        ended = False
        try:
            with self.keys.step(self.registry.named_modules):
                yield own
            with span("finish", lane="host"):
                self._check_buffers()
                reducer.finish()
                self.statistics.apply()
                self.inputs.compare(reducer.exchange.input_digests, reducer.group.ranks, reducer.group.rank)
                if source is not None:
                    source.advance()
            self._open, ended = None, True
        finally:
            if not ended and self._open is plan:  # not if another step has begun since
                self.micro_batch = self._open = None
                reducer.leave()

    @contextmanager
    def visit(self, micro_batch: MicroBatch, *, gradients: bool, last: bool = False) -> Iterator[None]:
        """Inside, forward or backward or both are of ``micro_batch``; ``gradients``: its parameters' come.

        ``last``: no other micro-batch's come after these.
        """
        leaf = micro_batch.index
        self.micro_batch = micro_batch
        with self.reducer.recorder.span("micro-batch", lane="host", leaf=leaf):
            self.weight_taken = None
            if gradients:
                self.reducer.open_leaf(leaf, last=last)
            self.inputs.opened()
            with self.keys.leaf(self._step, leaf), self.statistics.leaf(leaf):
                yield
            self._check(micro_batch, gradients=gradients)
            self._check_weights(leaf)
            if gradients:
                self.reducer.close_leaf()
        self.micro_batch = None

    def _check_start(self, num_micro_batches: int) -> set[int]:
        """The positions of the parameters whose gradients are zeros."""
        if self._open is not None:
            self.micro_batch = self._open = None
            self.reducer.leave()
            raise ValueError(
                "a declared step began while another one was open, within it, or after a loop over "
                "micro_batches() that was left by keeping its iterator: run one to its end, or close() the "
                "iterator, before the next one begins"
            )
        # One micro-batch is one rank's in every placement.
        if self._steps == 0 and num_micro_batches > 1 and self.reducer.group.rank == 0:
            if any(parameter.device.type == "cpu" for parameter in self.reducer.parameters):
                warn_of_default_threads()
            if any(parameter.is_cuda for parameter in self.reducer.parameters):
                deterministic.warn_if_missing()
        self._steps += 1
        self.registry.check()
        zeroed = require_no_gradients(self.reducer.names, self.reducer.optimizer_parameters)
        weights = [*self.registry.trainable, *self.registry.frozen]
        self._weights = [(name, p) for name, p in weights if not p.is_inference()]
        self._versions = [p._version for _, p in self._weights]
        self._written: dict[str, Tensor] = {}  # what the last micro-batch that wrote has left
        self._buffers = []
        for name, module in self.registry.named_modules:
            for key, x in module._buffers.items():
                # The kernel of batch norm writes its statistics without counting a version.
                before = x.detach().clone() if x is not None and x.is_floating_point() else None
                version = -1 if x is None else x._version
                self._buffers.append((f"{name}.{key}".lstrip("."), module, key, x, version, before))
            if isinstance(module, nn.SyncBatchNorm):
                raise ValueError(
                    f"{name!r} is a SyncBatchNorm, which mixes the micro-batches of several ranks: a "
                    "declared step would depend on the placement. Use instep.nn.BatchNorm in a global_step, "
                    "torch's BatchNorm, which normalises each micro-batch by itself, GroupNorm, or plain "
                    "backward outside of micro_batches()"
                )
            if isinstance(module, OverGlobalBatch) and module.training and module.settling is None:
                raise ValueError(
                    f"{name!r} is an instep.nn.BatchNorm, which needs all micro-batches of the step: call "
                    "instep.nn.global_step(model, embed, loss, data) instead of the loop, or use GroupNorm"
                )
        return zeroed

    def _check(self, micro_batch: MicroBatch, *, gradients: bool) -> None:
        index = micro_batch.index
        if micro_batch is not self.micro_batch:
            raise ValueError(f"the step of micro-batch {index} was given up when another one began")
        if gradients and self.weight_taken is None and micro_batch.weight != 0:
            raise ValueError(
                f"micro-batch {index} ended without a gradient: its loss has to depend on trained weights; "
                "in a loop over micro_batches() call backward() inside, once per micro-batch (a loss over "
                "several cannot be declared). Or set micro_batch.weight = 0"
            )
        if self.weight_taken is not None and micro_batch.weight != self.weight_taken:
            raise ValueError(
                f"the weight of micro-batch {index} was {self.weight_taken} in backward and is "
                f"{micro_batch.weight} now: set micro_batch.weight before backward"
            )

    def _check_weights(self, index: int) -> None:
        """What follows a write to a weight depends on which rank has which micro-batch.

        What is put back in the same micro-batch (weights moved aside for a second forward), and what is the
        same after each (weights that forward clamps), does not.
        """
        before, self._versions = self._versions, [p._version for _, p in self._weights]
        for (name, p), old, now in zip(self._weights, before, self._versions, strict=True):
            if old == now:
                continue
            if name in self._written and not torch.equal(self._written[name], p):
                raise ValueError(
                    f"parameter {name!r} was written to in micro-batch {index}: what other micro-batches "
                    "find would depend on which rank has them. Write to weights between steps, or put back "
                    "what was there before the micro-batch ends"
                )
            self._written[name] = p.detach().clone()

    def _check_buffers(self) -> None:
        for name, owner, key, buffer, version, before in self._buffers:
            now = owner._buffers[key]
            same = now is buffer and (buffer is None or buffer._version == version)
            if not same or (now is not None and before is not None and not torch.equal(now, before)):
                raise changed_buffer(name)


def require_no_gradients(names: Sequence[str], parameters: Sequence[Tensor]) -> set[int]:
    """Raise ``ValueError`` if a parameter has a gradient when a declared step begins.

    Zeros, as ``zero_grad(set_to_none=False)`` leaves them, are removed; returns the positions of these.
    """
    zeroed = set()
    for i, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        if parameter.grad is not None and _is_zero(parameter.grad):
            parameter.grad = None
            zeroed.add(i)
        if parameter.grad is not None:
            raise ValueError(
                f"parameter {name!r} already has a gradient when model.micro_batches() begins: call "
                "optimizer.zero_grad() before it; the step is the sum of its own micro-batches alone"
            )
    return zeroed


def _is_zero(gradient: Tensor) -> bool:
    if isinstance(gradient, GradientShard):  # the values of one rank's part may be zeros by chance
        return gradient.instep_is_zeroed
    values = gradient._values() if gradient.is_sparse else gradient
    return not bool(values.any())


def changed_buffer(name: str) -> ValueError:
    """What to raise when forward has changed buffer ``name``."""
    return ValueError(
        f"forward changed buffer {name!r} in a declared step: its values would depend on which rank had "
        "which micro-batch. Only the running statistics of torch's own norms, not compiled, may change: keep "
        "the layer in eval() mode, use GroupNorm or LayerNorm, or train with plain backward outside of "
        "micro_batches()"
    )
