"""A stage: a run of layers on one rank, trained like a model of its own by the ranks that have the same one.

To data parallelism a stage is a module like any other: its parameters have buckets, and the strategy sends
them as soon as the last backward has filled them, while other stages still compute. Of a micro-batch it sees
a visit for the forward, and later one for the backward, with visits of other micro-batches in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import setitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.optim import Optimizer

from instep.events import Recorder
from instep.net.clocks import measure
from instep.net.device import generators
from instep.net.process_group import Group
from instep.pipeline.actions import BACKWARD, FORWARD, INPUT_GRADIENT, SPANS, WEIGHT_GRADIENT
from instep.pipeline.layers import Layers, replaced
from instep.pipeline.split_backward import Later, gradients_at_once, input_gradients, leaves_under, num_uses
from instep.pipeline.tied import TiedParameters
from instep.replicate.reducer import Reducer
from instep.state.alignment import align
from instep.step.backward import StepSession
from instep.step.micro_batches import MicroBatch
from instep.step.parameter_registry import ParameterRegistry
from instep.step.reduction import ReductionOptions, StepPlan
from instep.verify.subject import Subject, Value
from instep.verify.trial import RestoreOnExit

Values = tuple[Any, ...]  # what goes from layer to layer
Gradients = Sequence[Tensor | None]  # of what went there, None of what was not used


class Alive(NamedTuple):
    """What is kept of a micro-batch from its forward to its backward: of the outputs the graph alone.

    So what was sent goes with the message, unless a layer has saved it. None: nothing is trained up to there.
    """

    inputs: list[Tensor]
    came: list[Tensor | None]  # their gradients; ``.grad`` would have the strides of the inputs
    outputs: list[GradientEdge | None]


class Given(torch.autograd.Function):
    """An input as the layers of a stage see it: no leaf, so that they may change it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


class StageReducer(Reducer):
    """Reduces the gradients of a stage; ``refuse`` says why an optimizer must not use them."""

    refuse: Callable[[Optimizer], str | None]

    def refusal(self, optimizer: Optimizer) -> str | None:
        return super().refusal(optimizer) or self.refuse(optimizer)


class Stage:
    """Stage ``number`` of a pipeline: ``layers``, and the ranks of ``group``, which reduce its gradients.

    A step is within ``begun``: ``forward`` of each micro-batch, then ``backward``, or ``input_gradients`` and
    later ``weight_gradients``.
    """

    def __init__(
        self,
        number: int,
        layers: Layers,
        group: Group,
        recorder: Recorder,
        options: ReductionOptions,
        *,
        seed: int,
        blocks: Mapping[nn.Module, int],
        tied: TiedParameters,
        refusal: Callable[[Optimizer], str | None],
    ) -> None:
        self.number, self.layers, self.group, self.recorder = number, layers, group, recorder
        self.tied, copied = tied, tied.copied(number)
        self._places = layers.places(copied)
        others = [x for _, _, own, copy in self._places for x in (own, copy)]
        registry = ParameterRegistry(layers, but=others)
        names, parameters = [name for name, _ in registry.trainable], [p for _, p in registry.trainable]
        align([*parameters, *(p for _, p in registry.frozen), *layers.buffers()])
        offsets_ns = measure(group).offsets_ns  # first, as a rank may be lost: a reducer has a thread
        self.reducer = StageReducer(names, parameters, group, recorder, options)
        self.reducer.refuse = refusal
        self.reducer.exchange.offsets_ns = offsets_ns
        self._device = next((p.device for p in layers.parameters()), torch.device("cpu"))
        self._session = StepSession(
            self, layers, self.reducer, registry, self._device, seed=seed, blocks=blocks, records=False
        )
        self.declared = self._session.declared
        self._alive: dict[int, Alive] = {}  # by micro-batch
        self._kept: dict[int, Later] = {}  # by micro-batch
        # Parameters that the first micro-batch has used, and that are in none of the layers.
        self.outside: list[nn.Parameter] | None = None
        self._recomputes: bool | None = None  # whether layers are called in backward; None: not known yet

    @contextmanager
    def begun(self, plan: StepPlan) -> Iterator[None]:
        """Around a step; at its end gradients are reduced. Collective over ``group``."""
        self._alive.clear()
        self._kept.clear()
        with self.declared.begun(plan):
            yield

    def forward(
        self, micro_batch: MicroBatch, values: Values, loss: Callable[[Any], Tensor] | None = None
    ) -> Values:
        """What the stage gives for ``values``, which require gradients where they did in the stage before; of
        the last one, the ``loss`` of that."""
        inputs = [x for x in values if is_differentiable(x)] if self.number else []
        with self._visit(micro_batch, gradients=False), self._span(FORWARD, micro_batch):
            found = self.layers(
                *(Given.apply(x) if self.number and is_differentiable(x) else x for x in values)
            )
            if loss is not None:
                is_trained = any(x.requires_grad for x in inputs)
                found = self._checked_loss(loss(found), micro_batch, is_trained=is_trained)
        outputs = found if isinstance(found, tuple) else (found,)
        came: list[Tensor | None] = [None] * len(inputs)
        for i, x in enumerate(inputs):
            if x.requires_grad:
                x.register_hook(partial(setitem, came, i))
        edges = [_edge(x) for x in outputs if is_differentiable(x)]
        self._alive[micro_batch.index] = Alive(inputs, came, edges)
        if self.outside is None:
            differentiable = [x for x in edges if x is not None]
            self.outside = self._outside(differentiable, inputs)
            self._require_one_use(differentiable)
        return outputs

    def _require_one_use(self, outputs: Sequence[GradientEdge]) -> None:
        for p, leaf in self.tied.shared(self.number):
            if leaf.requires_grad and (times := num_uses(outputs, leaf)) > 1:
                name = next(name for name, own in self.layers.named_parameters() if own is p)
                raise ValueError(
                    f"stage {self.number} uses parameter {name!r} {times} times, and a later stage uses it, "
                    "too: their gradients would be added in another order than on one rank; cut the layers "
                    "so that all its uses are in one stage (cuts=[...])"
                )

    def _outside(self, outputs: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> list[nn.Parameter]:
        known = set(map(id, self.layers.parameters()))
        known -= {id(own) for _, _, own, _ in self._places}
        known |= {id(copy) for _, _, _, copy in self._places}
        found = [x for x in leaves_under(outputs, inputs) if id(x) not in known]
        return [x for x in found if isinstance(x, nn.Parameter)]

    def _checked_loss(self, found: Any, micro_batch: MicroBatch, *, is_trained: bool) -> Tensor:
        """``found``, what a user's loss has returned; ``is_trained``: there are stages before this one."""
        if not isinstance(found, Tensor) or found.numel() != 1:
            got = tuple(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise TypeError(
                f"loss(output, micro_batch) of micro-batch {micro_batch.index}: expected a scalar tensor, "
                f"got {got}: return a mean, or a sum over micro_batch.weight items"
            )
        if not found.requires_grad and (is_trained or self.reducer.names) and micro_batch.weight != 0:
            raise ValueError(
                f"loss(output, micro_batch) of micro-batch {micro_batch.index} has no gradient: compute it "
                "from the output, not under torch.no_grad(), or set micro_batch.weight = 0"
            )
        return found

    def backward(
        self, micro_batch: MicroBatch, gradients: Gradients | None, *, last: bool
    ) -> list[Tensor | None]:
        """The gradients of the inputs, from those of the outputs; None: of a loss.

        An output without a gradient, which no later stage has used, is no root of the backward, so that an
        input, or a weight, that led to it alone has none either. ``last``: no other micro-batch of this step
        comes after it.
        """
        _, came, outputs = self._alive.pop(micro_batch.index)
        with self._backwards(micro_batch, BACKWARD, last=last):
            _run_backward(*_roots(outputs, gradients))
        return came

    def input_gradients(self, micro_batch: MicroBatch, gradients: Gradients | None) -> list[Tensor | None]:
        """As ``backward``, but for the gradients of weights, which ``weight_gradients`` computes later."""
        inputs, came, outputs = self._alive.pop(micro_batch.index)
        roots, its = _roots(outputs, gradients)
        trained = [i for i, x in enumerate(inputs) if x.requires_grad]
        if not (roots and trained):  # no stage waits for anything
            self._kept[micro_batch.index] = partial(_run_backward, roots, its)
            return came
        visit = self._visit(micro_batch, gradients=False)
        with visit, self._span(INPUT_GRADIENT, micro_batch), self._without_autocast():
            compute = self._learn if self._recomputes is None else self._input_gradients
            found, self._kept[micro_batch.index] = compute(roots, its, [inputs[i] for i in trained])
        for i, gradient in zip(trained, found, strict=True):
            came[i] = gradient
        return came

    def _input_gradients(
        self, outputs: list[GradientEdge], gradients: list[Tensor] | None, inputs: list[Tensor]
    ) -> tuple[list[Tensor | None], Later]:
        compute = input_gradients if self._recomputes is False else gradients_at_once
        return compute(outputs, gradients, inputs)

    def _learn(self, *given: Any) -> tuple[list[Tensor | None], Later]:
        """Of the first micro-batch: are layers called in backward, because activations are checkpointed?"""
        calls: list[nn.Module] = []
        handles = [
            m.register_forward_pre_hook(lambda module, _: calls.append(module)) for m in self.layers.modules()
        ]
        try:
            return self._input_gradients(*given)
        finally:
            self._recomputes = bool(calls)
            for handle in handles:
                handle.remove()

    def weight_gradients(self, micro_batch: MicroBatch, *, last: bool) -> None:
        """What ``input_gradients`` has left; ``last`` as of ``backward``."""
        compute = self._kept.pop(micro_batch.index)
        with self._backwards(micro_batch, WEIGHT_GRADIENT, last=last):
            compute()

    def evaluate(self, values: Values) -> Values:
        """What the stage gives for ``values``, outside of a step."""
        with torch.no_grad(), replaced(self._places):
            found = self.layers(*values)
        return found if isinstance(found, tuple) else (found,)

    @property
    def values(self) -> list[Value]:
        """Its weights, but those that belong to another stage."""
        registry = self.declared.registry
        return [Value(name, 0, p) for name, p in (*registry.trainable, *registry.frozen)]

    def on_trial(self) -> RestoreOnExit:
        """A context between two steps, for one whose gradients are compared."""
        backward = self._session.backward
        backward.look_back()
        subject = Subject(self.layers, backward, "", self.declared.keys.seed, 0, (), self.values)
        return RestoreOnExit(subject, generators(self._device))

    def take_back(self) -> None:
        """The step that has ended here was given up by another stage: no rank has its gradients."""
        self.reducer.gradients.drop()
        self.reducer.given_up = True

    def abandon(self) -> None:
        """Give up the step that is under way, and tell no rank."""
        self._session.abandon()

    def close(self) -> None:
        """Remove the hooks, end the lane, give back the group."""
        self._session.close()

    def _span(self, kind: str, micro_batch: MicroBatch) -> Any:
        return self.recorder.span(SPANS[kind], lane="compute", leaf=micro_batch.index, stage=self.number)

    def _visit(
        self, micro_batch: MicroBatch, *, gradients: bool, last: bool = False
    ) -> AbstractContextManager[object]:
        visit = self.declared.visit(micro_batch, gradients=gradients, last=last)
        return self._with_copies(visit) if self._places else visit

    @contextmanager
    def _with_copies(self, visit: AbstractContextManager[object]) -> Iterator[None]:
        with visit, replaced(self._places):
            yield

    @contextmanager
    def _backwards(self, micro_batch: MicroBatch, kind: str, *, last: bool) -> Iterator[None]:
        """Around what computes gradients of weights."""
        visit = self._visit(micro_batch, gradients=bool(self.reducer.names), last=last)
        with visit, self._span(kind, micro_batch), self._without_autocast():
            self.declared.gradient_came()  # to the model: here perhaps none does, and its weight counts
            self.tied.begin_backward(self.number, micro_batch.index)
            yield
            self.tied.end_backward(self.number, micro_batch.index)

    def _without_autocast(self) -> AbstractContextManager[object]:
        """A step may be within ``torch.autocast``, which is meant for forwards alone."""
        kind = self._device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def is_differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _edge(x: Tensor) -> GradientEdge | None:
    return get_gradient_edge(x) if x.requires_grad else None


def _roots(
    outputs: Sequence[GradientEdge | None], gradients: Gradients | None
) -> tuple[list[GradientEdge], list[Tensor] | None]:
    """Where a backward begins, and the gradients there; ``gradients`` None: of a loss."""
    if gradients is None:
        return [x for x in outputs if x is not None], None
    pairs = zip(outputs, gradients, strict=True)
    kept = [(x, g) for x, g in pairs if x is not None and g is not None]
    return [x for x, _ in kept], [g for _, g in kept]


def _run_backward(roots: Sequence[GradientEdge], gradients: Sequence[Tensor] | None) -> None:
    if roots:  # else nothing is trained up to here
        torch.autograd.backward(roots, gradients)
