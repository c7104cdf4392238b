"""A declared step with a loss, or with batch norm, of the whole global batch: passes that settle what is
global, then gradients.

A loss that compares all samples needs the embeddings of all micro-batches before one of them has a gradient.
So micro-batches are computed more than once, and one at a time is in memory:

    pass 1     forward of each micro-batch, without gradients: embeddings
               gathered in the order of micro-batches; every rank computes the loss and d loss / d embedding
    pass 2     forward and backward of each micro-batch, from the gradients of its embeddings

The random numbers of a micro-batch are the same in each pass. The input of a ``BatchNorm`` is known once the
one before it has its statistics, and in backward the other way round. With K calls of norms, and several
micro-batches on a rank:

    K passes   forward of each to call 0, 1, ... K - 1, whose statistics are then exchanged
    1 pass     forward to the embeddings; then the loss
    K passes   forward, and backward to call K - 1, ... 0, whose sums of gradients are then exchanged
    1 pass     forward and backward: gradients

A rank with one micro-batch waits for an exchange in the middle of forward or backward: three passes, with the
same exchanges and bits.

Source: L. Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
arXiv 2101.06983 (gradient caching).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import Desync
from instep.events import BATCH_NORM, GLOBAL_LOSS
from instep.memory import as_bytes, bytes_of, tensor_of
from instep.nn.batch_norm import BatchNorm, folded, merged, moments_of
from instep.reduce.header import GLOBAL_BATCH, OPERATIONS
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import FullySharded
from instep.shard.gather import Gathers
from instep.step.backward import StepSession, is_in_backward
from instep.step.micro_batches import DataSource, DeclaredStep, MicroBatch, count_and_source
from instep.step.reduction import StepPlan

OPERATION = OPERATIONS[GLOBAL_BATCH]
LIMIT_BYTES = 1 << 32  # of one rank's statistics
EMBEDDED = "embeddings "  # then their dtypes, dims and devices
MAX_DIFFERENCE = 0.01  # between passes, relative to the largest element: kernels may round differently
ALIKE = "all have to call the same BatchNorms in the same order, and to give tensors of the same kinds"
DTYPES = {str(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
Embedded = tuple[Tensor, ...]
Gradients = Mapping[int, Sequence[Tensor | None]]  # of embeddings, by micro-batch


def global_step(
    model: nn.Module,
    embed: Callable[[MicroBatch], Tensor | Embedded],
    loss: Callable[..., Tensor],
    data: int | DataSource,
    *,
    step: int | None = None,
) -> Tensor:
    """Make a declared step of ``model`` with a loss over the global batch, which sets ``.grad``. Collective.

    The bits do not depend on the number of ranks, nor on which rank computes how many of the micro-batches.
    They agree with one process and the whole batch up to rounding. It costs two forwards and one backward,
    memory for one micro-batch, and on every rank the loss of the whole batch. K calls of a ``BatchNorm`` add
    the time of a forward and a backward if a rank has one micro-batch, else of about 2 K forwards.

    Args:
        model: a ``DataParallel``, or a module that was given to ``fully_shard``.
        embed: ``embed(micro_batch)`` is what ``model`` gives for it: a tensor (samples, ...), or a tuple of
            them, such as the embeddings of images and texts. Tensors that need no gradient, such as
            labels, are gathered as well. It is called once per pass, and has to give the same each time.
        loss: ``loss(*tensors)`` of the global batch, each concatenated in the order of micro-batches: a
            scalar, which is not divided by anything. Its trained parameters have to belong to ``model``.
        data: G, the number of micro-batches in the global batch, or an ``instep.Loader``. Weights of
            micro-batches have no meaning: the loss sees all samples.
        step: what the random numbers are keyed by; by default the declared steps so far.

    Returns:
        The loss, (), the same bits on every rank, without a graph.

    Raises:
        TypeError: ``model`` has no declared steps, or ``embed`` or ``loss`` returns something else.
        ValueError: a rule of declared steps is broken, micro-batches do not fit together, the loss trains
            something else than ``model``, or ``embed`` gives something else in another pass.
        RuntimeError: the wrapper is closed.
        Desync: another rank left the step, or is in another one.
        PeerLost: a rank did not come.

    Example:
        >>> model = instep.DataParallel(model)
        >>> def embed(micro_batch):
        ...     rows = slice(micro_batch.index * 4, micro_batch.index * 4 + 4)
        ...     return model(x[rows]), y[rows]
        >>> loss = instep.nn.global_step(model, embed, instep.nn.InfoNCE(), 8)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """
    session, counter, gathers = _session_of(model)
    count, source = count_and_source(data)
    session.backward.step_mode = "declared"
    step = counter.next_step if step is None else step
    plan = session.declared.plan(count, source, step)
    passes = Passes(session.declared, embed, plan, gathers)
    with passes.settling(), session.declared.begun(plan, source) as own:
        if source is not None:
            passes.read(source.read(own))
        embedded = passes.settle_forward()
        value, gradients, of_loss = passes.differentiate(loss, embedded)
        passes.settle_backward(gradients)
        passes.backward(embedded, gradients, of_loss)
    for call in passes.calls:
        call.norm.update(call.moments)
    counter.next_step = step + 1
    return value


def _session_of(model: nn.Module) -> tuple[StepSession, Any, Gathers | None]:
    """The steps of ``model``, what counts them, and what gathers its weights."""
    if isinstance(model, DataParallel):
        return model._declaring(), model, None
    if not isinstance(model, FullySharded):
        raise TypeError(
            f"expected a DataParallel or a module of fully_shard, got a {type(model).__name__}: wrap it first"
        )
    return model.sharding.session, model.sharding, model.sharding.gathers


class Stopped(BaseException):  # no ``except Exception`` of a model is to catch it
    """A forward has come to a batch norm whose statistics are not known yet."""


@dataclass
class Call:
    """One of ``norm`` in a forward: the ``moments`` of its input, then the ``means`` of its gradients."""

    norm: BatchNorm
    moments: Tensor  # (1 + 2C,)
    means: Tensor | None = None  # (2, C)


class Passes:
    """The passes of one step over ``own``, this rank's micro-batches.

    ``settling`` around the step; then ``settle_forward``, ``differentiate``, ``settle_backward``, and
    ``backward``. ``calls`` are those of batch norms in a forward, as far as their statistics are known;
    ``gathers`` is of a sharded module.
    """

    def __init__(
        self, declared: DeclaredStep, embed: Callable[..., Any], plan: StepPlan, gathers: Gathers | None
    ) -> None:
        self.declared, self.embed, self.plan, self.gathers = declared, embed, plan, gathers
        self.reducer, self.recorder = declared.reducer, declared.reducer.recorder
        self.device = self.reducer.parameters[0].device
        self.norms = {m: name for name, m in declared.registry.named_modules if isinstance(m, BatchNorm)}
        # One loss, and not one for each micro-batch: it counts with the first.
        leaves = plan.leaves[self.reducer.group.rank]
        self.own = [MicroBatch(leaf, plan.num_leaves, weight=int(leaf == 0)) for leaf in leaves]
        self.calls: list[Call] = []
        self._waits = len(self.own) == 1  # for an exchange, instead of making a pass for each call
        self._open: MicroBatch | None = None
        self._num_called = 0  # in this forward
        self._stopped_at = "", b""
        self._inputs: list[Tensor] = []  # of the calls of this forward
        self._wanted = -1  # the call whose sums this backward is for
        self._sums = torch.empty(0)
        self._kinds: list[Any] = []  # of the tensors that embed gives: dtype, dims, device
        self._rows: list[list[int]] = []  # of each of them, by micro-batch

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Inside, this step normalises."""
        for norm in self.norms:
            norm.settling = self
        try:
            yield
        finally:
            for norm in self.norms:
                norm.settling = None

    def read(self, data: Iterator[tuple[Any, int]]) -> None:
        """Take the data of all micro-batches, which stay for all passes."""
        for micro_batch in self.own:
            with self.recorder.span("data", lane="data", leaf=micro_batch.index):
                micro_batch.data, _ = next(data)

    def settle_forward(self) -> dict[int, Embedded]:
        """The embeddings of this rank's micro-batches, once the statistics of all calls are known."""
        embedded: dict[int, Embedded] = {}
        while not self._kinds:
            found = {}
            for micro_batch in self.own:
                leaf = micro_batch.index
                span = self.recorder.span("forward", lane="compute", leaf=leaf)
                with self._visit(micro_batch), torch.no_grad(), span:
                    try:
                        embedded[leaf] = its = self._embedded(micro_batch)
                        kinds = [[str(x.dtype), x.shape[1:], x.device.type] for x in its]
                        rows = json.dumps([*map(len, its)])
                        found[leaf] = EMBEDDED + json.dumps(kinds), rows.encode()
                    except Stopped:
                        found[leaf] = self._stopped_at
            if self.gathers is not None:  # ranks with more micro-batches still gather
                self.gathers.follow()
                self.gathers.settle()
            self._settle(found)
        return embedded

    def differentiate(
        self, loss: Callable[..., Tensor], embedded: Mapping[int, Embedded]
    ) -> tuple[Tensor, Gradients, list[tuple[Tensor, Tensor]]]:
        """The loss, its gradients with respect to this rank's embeddings and to parameters of its own."""
        with self.recorder.span(GLOBAL_LOSS, lane="host"):
            numbers = range(len(self._kinds))
            parts = [self._gathered(i, [its[i] for its in embedded.values()]) for i in numbers]
        every = [x for its in parts for x in its]
        trained = [x.requires_grad_() for x in every if x.is_floating_point() or x.is_complex()]
        # As a micro-batch after the last: its random numbers are keyed, and hooks do not take it for a step.
        visit = self.declared.visit(MicroBatch(self.plan.num_leaves, self.plan.num_leaves), gradients=False)
        with visit, self.recorder.span("loss", lane="compute"):
            self.declared.inputs.waits = False
            value = loss(*map(torch.cat, parts))
            parameters = self._parameters_of(value, trained)
            wanted = [*trained, *parameters]
            found = torch.autograd.grad(value, wanted, allow_unused=True)
        self._require_same(value)
        by_id = {id(x): g for x, g in zip(wanted, found, strict=True) if g is not None}
        gradients = {leaf: [by_id.get(id(its[leaf])) for its in parts] for leaf in embedded}
        return (
            value.detach().reshape(()),
            gradients,
            [(p, by_id[id(p)]) for p in parameters if id(p) in by_id],
        )

    def settle_backward(self, gradients: Gradients) -> None:
        """Find the means of the gradients of all calls, the last first."""
        for k in reversed(range(len(self.calls))):
            if self.calls[k].means is None:
                sums = {m.index: self._backward_to(m, gradients, k) for m in self.own}
                if self.calls[k].means is None:  # or this rank has waited for them
                    self._settle_sums(k, sums)

    def backward(
        self,
        embedded: Mapping[int, Embedded],
        gradients: Gradients,
        of_loss: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """Forward and backward of each micro-batch. Parameters of the loss get ``of_loss`` in the first, and
        zeros in the others."""
        for micro_batch in self.own:
            leaf = micro_batch.index
            with self._visit(micro_batch, gradients=True):
                self.declared.gradient_came()  # also where none will: its weight counts
                now = self._embedded(micro_batch)
                _require_equal(leaf, embedded[leaf], now)
                outputs, theirs = _roots(now, gradients[leaf])
                outputs += [p for p, _ in of_loss]
                theirs += [g if leaf == 0 else torch.zeros_like(g) for _, g in of_loss]
                if not outputs:
                    raise ValueError(
                        f"what embed returns for micro-batch {leaf} needs no gradient: compute it by the "
                        "model, not under torch.no_grad()"
                    )
                torch.autograd.backward(outputs, theirs)

    def normalise(self, norm: BatchNorm, x: Tensor) -> Tensor:
        """``norm`` is called with ``x``."""
        name, k = self.norms[norm], self._num_called
        if self._open is None or is_in_backward() or self.gathers is not None:
            raise ValueError(
                f"{name!r}, an instep.nn.BatchNorm, was called by the loss, in a checkpointed block, or in a "
                "module of fully_shard, where its passes cannot stop: use GroupNorm or LayerNorm there"
            )
        if k == len(self.calls) and not self._kinds:
            self._stopped_at = name, bytes_of(moments_of(x))
            if not self._waits:
                raise Stopped
            self._settle({self._open.index: self._stopped_at})
        if k >= len(self.calls) or self.calls[k].norm is not norm:
            raise ValueError(f"micro-batch {self._open.index} calls {name!r} in one pass alone: {ALIKE}")
        self._num_called += 1
        if torch.is_grad_enabled():
            x = x.view_as(x)  # of this call alone
            self._inputs.append(x)
        return norm.normalised(x, self.calls[k].moments, partial(self._means, k))

    @contextmanager
    def _visit(self, micro_batch: MicroBatch, *, gradients: bool = False) -> Iterator[None]:
        with self.declared.visit(micro_batch, gradients=gradients, last=micro_batch is self.own[-1]):
            self._open = micro_batch
            try:
                yield
            finally:
                self._open = None
        if not gradients:  # the running statistics of other norms follow the last pass alone
            self.declared.statistics.measured.pop(micro_batch.index, None)

    def _embedded(self, micro_batch: MicroBatch) -> Embedded:
        self._num_called, self._inputs = 0, []
        found = self.embed(micro_batch)
        tensors = found if isinstance(found, tuple) else (found,)
        for x in tensors:
            if not isinstance(x, Tensor) or x.dim() == 0:
                raise TypeError(
                    f"embed: expected a tensor (samples, ...) or a tuple of them, got {found!r:.60}"
                )
        return tensors

    def _settle(self, own: Mapping[int, tuple[str, bytes]]) -> None:
        """All micro-batches have come to the same call, or to their embeddings."""
        kind, found = self._round(own)
        if kind.startswith(EMBEDDED):
            self._kinds, self._rows = json.loads(kind[len(EMBEDDED) :]), [*map(json.loads, found)]
            return
        norm = next(m for m, name in self.norms.items() if name == kind)
        moments = merged([tensor_of(x, torch.float64) for x in found])
        self.calls.append(Call(norm, moments.to(self.device)))

    def _settle_sums(self, k: int, own: Mapping[int, Tensor]) -> None:
        """All micro-batches have their sums of call ``k``."""
        rows = {leaf: (f"the gradients of call {k}", bytes_of(sums)) for leaf, sums in own.items()}
        found = [tensor_of(x, torch.float64) for x in self._round(rows)[1]]
        self.calls[k].means = folded(found).view(2, -1).to(self.device) / self.calls[k].moments[0]

    def _round(self, own: Mapping[int, tuple[str, bytes]]) -> tuple[str, list[bytes]]:
        """Exchange kind and data of micro-batches: the common kind, and the data of all, in their order."""
        head = json.dumps([[leaf, kind, len(data)] for leaf, (kind, data) in own.items()]).encode()
        message = b"\n".join([head, b"".join(data for _, data in own.values())])
        is_last = any(kind.startswith(EMBEDDED) for kind, _ in own.values())
        cause = GLOBAL_LOSS if is_last or not self.norms else BATCH_NORM
        with self.recorder.span(cause, lane="host"):
            everyone = self.reducer.exchange_bytes(GLOBAL_BATCH, OPERATION, message, LIMIT_BYTES)
        found: dict[int, tuple[str, bytes]] = {}
        for data in everyone:
            head, _, body = data.partition(b"\n")
            for leaf, kind, size in json.loads(head):
                found[leaf], body = (kind, body[:size]), body[size:]
        first = found[0][0]
        for leaf, (kind, _) in sorted(found.items()):
            if kind != first:
                raise ValueError(f"micro-batch 0 is at {first!r}, micro-batch {leaf} at {kind!r}: {ALIKE}")
        return first, [found[leaf][1] for leaf in range(self.plan.num_leaves)]

    def _gathered(self, i: int, own: Sequence[Tensor]) -> list[Tensor]:
        """Tensor number ``i`` of all micro-batches, of which this rank has ``own``."""
        kind, dims, where = self._kinds[i]
        by_rank = [[self._rows[leaf][i] for leaf in leaves] for leaves in self.plan.leaves]
        device = "cpu" if where == "cpu" else self.device
        row = torch.zeros(max(map(sum, by_rank)), *dims, dtype=DTYPES[kind], device=device)
        if own:
            row[: sum(map(len, own))] = torch.cat([*own])
        rows, stream = row.new_empty(len(by_rank), *row.shape), self.reducer.stream
        run = partial(self.reducer.group.all_gather, as_bytes(rows), as_bytes(row), OPERATION)
        run = partial(stream.run_after, stream.computed(), run)
        if rows.numel():
            self.reducer.lane.run(OPERATION, run).wait()
        parts: dict[int, Tensor] = {}
        for x, leaves, counts in zip(rows, self.plan.leaves, by_rank, strict=True):
            parts |= zip(leaves, x[: sum(counts)].split(counts), strict=True)
        return [parts[leaf] for leaf in range(self.plan.num_leaves)]

    def _parameters_of(self, value: Any, trained: Sequence[Tensor]) -> list[Tensor]:
        """The trained parameters that the loss ``value`` depends on, beside the embeddings ``trained``."""
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(f"loss(*embeddings): expected a scalar tensor, got {got}: return a mean or a sum")
        if not value.requires_grad:
            raise ValueError("loss(*embeddings) has no gradient: compute it from the embeddings")
        given = {*map(id, trained)}
        parameters = [x for x in _leaves_under(value) if id(x) not in given]
        known = set() if self.gathers else {*map(id, self.reducer.parameters)}
        for p in parameters:
            if id(p) not in known:
                raise ValueError(
                    f"the loss trains a parameter of shape {tuple(p.shape)} that no rank would reduce: make "
                    "the loss a part of the module that DataParallel wraps, or, with fully_shard, freeze it"
                )
        return parameters

    def _require_same(self, value: Tensor) -> None:
        with self.recorder.span(GLOBAL_LOSS, lane="host"):
            found = self.reducer.exchange_bytes(GLOBAL_BATCH, OPERATION, bytes_of(value.double()))
        if len(set(found)) > 1:
            values = [tensor_of(x, torch.float64).item() for x in found]
            raise Desync(
                f"the loss is {values} by rank: it has to be a function of the embeddings alone; let embed "
                "return what else it needs, such as labels"
            )

    def _backward_to(self, micro_batch: MicroBatch, gradients: Gradients, k: int) -> Tensor:
        """The sums of call ``k`` in ``micro_batch``; zeros if backward does not come to it."""
        self._wanted = k
        self._sums = torch.zeros(2, self.calls[k].norm.num_features, dtype=torch.float64, device="cpu")
        with self._visit(micro_batch):
            outputs, theirs = _roots(self._embedded(micro_batch), gradients[micro_batch.index])
            inputs = [x for x in self._inputs[0 if self._waits else k : k + 1] if x.requires_grad]
            if outputs and inputs:
                torch.autograd.grad(outputs, inputs, theirs, allow_unused=True)
        self._inputs = []
        return self._sums

    def _means(self, k: int, sums: Tensor) -> Tensor:
        """Backward has come to call ``k``, with its ``sums`` in this micro-batch; the means over all."""
        call = self.calls[k]
        if call.means is None:
            assert self._open is not None
            if self._waits and None not in [later.means for later in self.calls[k + 1 :]]:
                self._settle_sums(k, {self._open.index: sums})
            elif k == self._wanted:
                self._sums = sums
        return torch.zeros_like(sums) if call.means is None else call.means


def _roots(outputs: Embedded, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """Where a backward begins, and the gradients there."""
    pairs = zip(outputs, gradients, strict=True)
    kept = [(x, g) for x, g in pairs if x.requires_grad and g is not None]
    return [x for x, _ in kept], [g for _, g in kept]


def _leaves_under(value: Tensor) -> list[Tensor]:
    """All tensors that a backward from ``value`` accumulates gradients in."""
    found, seen, waiting = list[Tensor](), set[Any](), [value.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


def _require_equal(leaf: int, before: Embedded, now: Embedded) -> None:
    """Raise ``ValueError`` if ``embed`` has given something else in another pass."""
    for x, y in zip(before, now, strict=True):
        inexact = x.numel() > 0 and (x.is_floating_point() or x.is_complex())
        if x.shape != y.shape or (inexact and (x - y).abs().max() > MAX_DIFFERENCE * x.abs().max()):
            raise ValueError(
                f"embed gives something else for micro-batch {leaf} in another pass: it has to be a function "
                "of the micro-batch. Read data by micro_batch.index or from micro_batch.data, and draw "
                "random numbers from the generators of torch, Python or numpy"
            )
