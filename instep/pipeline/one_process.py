"""One step of a pipeline, whose gradients are compared with those of one process.

    rank 0    its stages' part of the schedule -> gradients     all layers, micro-batch after micro-batch: r
    rank 1    its stages' part of the schedule -> gradients     all layers, micro-batch after micro-batch: r

For the reference every rank has all layers for a while, with weights that the others have sent, in parameters
of their own, on which no hook sits. Micro-batches have the random numbers of a step. Afterwards everything is
as before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instep.memory import as_bytes
from instep.net.device import generators
from instep.net.process_group import Group
from instep.pipeline.home import PipelineHome
from instep.pipeline.layers import Layer, Layers, numbered_blocks, replaced
from instep.pipeline.runtime import StepTask
from instep.pipeline.stage import Stage
from instep.rng.keys import LeafKeys
from instep.verify.comparison import Part, compare
from instep.verify.gradient_report import Report
from instep.verify.subject import GradientPiece, Value


@dataclass(frozen=True)
class PipelineTrial:
    """One call of ``Pipeline.verify``, over the ranks of ``group``.

    ``layers`` are those of ``module``, and ``stages`` this rank's, whose parameters are in ``home``; it has a
    part of copy number ``copy`` of the gradient. ``seed`` keys random numbers; ``rtol`` and ``floor`` as for
    ``compare``.
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
        named = dict(zip(self.home.names, self.home.parameters, strict=True))
        trained = {name: p for name, p in named.items() if p.requires_grad}
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_restored(self.module.buffers()))
            for stage in self.stages.values():
                stack.enter_context(stage.on_trial()).begin()
            parts = stack.enter_context(closing(self._reference(task, [*trained.values()])))
            return compare(
                self.group,
                trained,
                self.copy,
                [GradientPiece.whole(i, p) for i, p in enumerate(trained.values()) if self.home.holds(p)],
                map(self._placed, (value for stage in self.stages.values() for value in stage.values)),
                execute,
                parts,
                rtol=self.rtol,
                floor=self.floor,
                strategy=strategy,
                ordered=True,
            )

    def _placed(self, value: Value) -> Value:
        """``value``, of which a box is compared with the same box on other ranks."""
        boxes = self.home.boxes
        if boxes is None or boxes.cut_of(value.tensor) is None:
            return value
        return value._replace(first=boxes.units(value.tensor).start)

    def _reference(self, task: StepTask, parameters: Sequence[Tensor]) -> Generator[Part]:
        """The gradients of ``parameters``, of all layers, micro-batch by micro-batch. Collective."""
        instead: dict[int, nn.Parameter] = {}  # with values, by the identity of what they stand for
        for p in self.home.parameters:
            own = self.home.empty_like(p).copy_(self.home.fetch_own(p))
            instead[id(p)] = nn.Parameter(own, p.requires_grad)
        layers = Layers(self.layers)
        with replaced(layers.places(instead)), ExitStack() as stack:
            device = next((p.device for p in layers.parameters()), torch.device("cpu"))
            blocks = numbered_blocks(self.module, self.layers)
            keys = LeafKeys(layers, self.seed, generators(device), blocks)
            for handle in keys.hooks:
                stack.callback(handle.remove)
            stack.enter_context(keys.step())
            mine = [instead[id(p)] for p in parameters]
            for leaf in task.own:
                yield f"micro-batch {leaf}", partial(_gradients, layers, task, leaf, keys, device, mine)


def _gradients(
    layers: Layers,
    task: StepTask,
    leaf: int,
    keys: LeafKeys,
    device: torch.device,
    parameters: Sequence[Tensor],
) -> tuple[int, list[Tensor | None]]:
    """The weight of micro-batch ``leaf``, the next one, and its gradients of ``parameters``."""
    micro_batch = next(task.read)
    with keys.leaf(task.step, leaf):
        given = task.inputs(micro_batch)
        loss = task.loss(layers(*given) if isinstance(given, tuple) else layers(given), micro_batch)
        if loss.requires_grad:
            with torch.autocast(device.type, enabled=False):
                loss.backward()
    found = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
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
