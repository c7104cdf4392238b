"""One step of a pipeline, whose gradients are compared with those of one process.

    rank 0    its stages' part of the schedule -> gradients     all layers, micro-batch after micro-batch: r
    rank 1    its stages' part of the schedule -> gradients     compare theirs with r, one after the other

For the reference the first rank has all layers for a while, with weights that the others have sent, in
parameters of their own, on which no hook sits. Micro-batches have the random numbers that they have in a
step. Afterwards all is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import InstepError
from instep.memory import as_bytes
from instep.net.agree import all_or_none
from instep.net.device import generators
from instep.net.process_group import Group
from instep.pipeline.home import PipelineHome
from instep.pipeline.layers import Layer, Layers, numbered_blocks, replaced
from instep.pipeline.runtime import StepTask
from instep.pipeline.stage import Stage
from instep.rng.keys import LeafKeys
from instep.state.homes import with_strides
from instep.verify.comparison import GradientComparison, Mean
from instep.verify.gradient_report import Report, make_report
from instep.verify.subject import GradientPiece, Value
from instep.verify.trial import differing_values


@dataclass(frozen=True)
class PipelineTrial:
    """One call of ``Pipeline.verify``, over the ranks of ``group``.

    ``layers`` are those of ``module``, and ``stages`` this rank's, whose parameters are in ``home``; it has a
    part of copy number ``copy`` of the gradient. ``seed`` keys random numbers; ``rtol`` and ``floor`` as of a
    ``GradientComparison``.
    """

    module: nn.Module
    layers: Sequence[Layer]
    stages: Mapping[int, Stage]
    home: PipelineHome
    group: Group
    copy: int
    seed: int
    rtol: float | None
    floor: float

    def run(self, execute: Callable[[], Any], task: StepTask, strategy: str) -> Report:
        """Compare what ``execute()`` makes, which is ``task`` in stages; all ranks return the same report.

        Collective.
        """
        values = [value for stage in self.stages.values() for value in stage.values]
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_restored(self.module.buffers()))
            for stage in self.stages.values():
                stack.enter_context(stage.on_trial()).begin()
            odd = differing_values(values, self.group)
            buffers = [Value(name, 0, x) for name, x in self.module.named_buffers()]
            odd_buffers = differing_values(buffers, self.group)
            execute()
            comparison = self._comparison()
            ours = [
                (GradientPiece.whole(i, p), p.grad)
                for i, p in enumerate(comparison.parameters)
                if self.home.holds(p)
            ]
            references, copies = comparison.of(ours, self._means(task, comparison.parameters))
        return make_report(
            references,
            copies,
            self.group.size,
            strategy=strategy,
            ordered=True,
            differing=odd,
            differing_buffers=odd_buffers,
        )

    def _comparison(self) -> GradientComparison:
        named = zip(self.home.names, self.home.parameters, strict=True)
        trained = {name: p for name, p in named if p.requires_grad}
        return GradientComparison(
            self.group, self.copy, [*trained], [*trained.values()], self.rtol, self.floor
        )

    def _means(self, task: StepTask, parameters: Sequence[Tensor]) -> list[Mean]:
        """The gradients of ``parameters``, of all layers, on the first rank. Collective."""
        means = [Mean() for _ in parameters]
        errors = (ValueError, TypeError, RuntimeError, InstepError)
        weight = 0
        with self._whole() as whole, ExitStack() as stack:
            blocks = numbered_blocks(self.module, self.layers)
            keys = LeafKeys(whole.layers, self.seed, generators(whole.device), blocks)
            for handle in keys.hooks:
                stack.callback(handle.remove)
            stack.enter_context(keys.step())
            for leaf in task.own:
                # All come here for each: all of them may take longer than a wait may last.
                compute = partial(whole.gradients, task, leaf, keys) if self.group.rank == 0 else _nothing
                what = f"computing the gradient of micro-batch {leaf} again"
                its_weight, gradients = all_or_none(self.group, what, compute, errors=errors)
                weight += its_weight
                for mean, p in zip(means, parameters, strict=True):
                    mean.add(gradients.get(id(p)))
        for mean in means:
            mean.divide(weight or 1)
        return means

    @contextmanager
    def _whole(self) -> Iterator[WholeModel]:
        """All layers, with values on the first rank. Collective."""
        instead: dict[int, nn.Parameter] = {}
        for p in self.home.parameters:
            values = self.home.fetch(p)
            if self.group.rank == 0:
                own = with_strides(values, self.home.strides_of(p))
                instead[id(p)] = nn.Parameter(own, p.requires_grad)
        layers = Layers(self.layers)
        with replaced(layers.places(instead)):
            yield WholeModel(layers, instead)


@dataclass
class WholeModel:
    """``layers``, in which others stand ``instead`` of parameters, by their identity."""

    layers: Layers
    instead: dict[int, nn.Parameter]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next((p.device for p in self.layers.parameters()), torch.device("cpu"))

    def gradients(self, task: StepTask, leaf: int, keys: LeafKeys) -> tuple[int, dict[int, Tensor | None]]:
        """The weight of micro-batch ``leaf``, the next one, and its gradients, by parameter."""
        micro_batch = next(task.read)
        with keys.leaf(task.step, leaf):
            given = task.inputs(micro_batch)
            output = self.layers(*given) if isinstance(given, tuple) else self.layers(given)
            loss = task.loss(output, micro_batch)
            if loss.requires_grad:
                with torch.autocast(self.device.type, enabled=False):
                    loss.backward()
        found = {key: other.grad for key, other in self.instead.items()}
        for other in self.instead.values():
            other.grad = None
        return micro_batch.checked_weight(), found


@contextmanager
def _restored(buffers: Iterator[Tensor]) -> Iterator[None]:
    """Afterwards they have the values that they have now."""
    before = [(x, x.detach().clone()) for x in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for x, values in before:
                if not torch.equal(as_bytes(x), as_bytes(values)):
                    x.copy_(values)


def _nothing() -> tuple[int, dict[int, Tensor | None]]:
    """A rank's part where only the first one has one."""
    return 0, {}
