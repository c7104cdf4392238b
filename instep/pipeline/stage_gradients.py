"""The gradients of all stages together: their norm is over all, and no other code may change some of them.

A rank has the gradients of its stage alone. So torch's own clipping would take each stage's norm for that of
the model, and a ``GradScaler`` would skip a step on one rank and not on another: both write to gradients
between ``step()`` and the optimizer's step, which refuses them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from instep.events import PIPELINE, Recorder
from instep.memory import bytes_of
from instep.pipeline.home import PipelineHome
from instep.reduce.norm import gather_sums
from instep.reduce.owners import GradientPeers, entry
from instep.state.boxes import BoxGradients

Sample: TypeAlias = tuple[Tensor, bytes]  # the parameter that has the smallest gradient, and that
CHANGED = (
    "has a gradient that was written to since the pipeline's step(): a rank has the gradients of its own "
    "stage alone, which torch's clipping and a GradScaler do not know. Clip with instep.clip_grad_norm_("
    "model.parameters(), max_norm), scale the loss, and train with bfloat16, which needs no GradScaler"
)


class StageGradients(GradientPeers):
    """The gradients of the parameters of ``home``. ``recorder`` records the wait for the norm, which for a
    rank that has computed all is the drain of the pipeline."""

    def __init__(self, home: PipelineHome, recorder: Recorder) -> None:
        self._home, self._recorder = home, recorder
        mine = [x.parameter for x in home.held if x.parameter.requires_grad]
        self._mine = sorted(mine, key=Tensor.numel) if home.group.size > 1 else []
        self._versions: list[tuple[int, int]] = []
        self._sample: Sample | None = None  # a GradScaler writes past torch's count of writes
        self._of_boxes: dict[int, StagesOfBoxes] = {}  # by the identity of the peers in them
        if home.group.size > 1:
            for p in home.parameters:
                peers = None if home.boxes is None else home.boxes.gradients_of(p)
                both = peers and self._of_boxes.setdefault(id(peers), StagesOfBoxes(self, peers))
                entry(p).peers = weakref.ref(both or self)

    def changed(self) -> None:
        """Gradients have been reduced, or clipped: nothing else may write to them."""
        self._versions = [(id(p.grad), -1 if p.grad is None else p.grad._version) for p in self._mine]
        smallest = next((p for p in self._mine if p.grad is not None), None)
        self._sample = None if smallest is None else (smallest, _bytes_of(smallest))

    def square_sums(self, own: Sequence[float]) -> list[float]:
        """Those of all ranks, whose part is ``own`` here. Collective: 8 bytes per block."""
        with self._recorder.span(PIPELINE, lane="host"):
            return gather_sums(own, self._home.group)

    def refusal(self, optimizer: Optimizer) -> str | None:
        """Why ``optimizer`` must not use them, or None."""
        if not self._mine:
            return None
        is_same = getattr(optimizer, "found_inf", None) is None  # else a fused one unscales by itself
        for p, known in zip(self._mine, self._versions, strict=False):
            is_same &= p.grad is None or (id(p.grad), p.grad._version) == known
        sample, self._sample = self._sample, None
        if sample is not None and sample[0].grad is not None:
            is_same &= _bytes_of(sample[0]) == sample[1]
        return None if is_same else CHANGED


class StagesOfBoxes(GradientPeers):
    """The gradients of all ``stages`` of parameters that are in boxes, which ``boxes`` are the peers of."""

    cut = True

    def __init__(self, stages: StageGradients, boxes: BoxGradients) -> None:
        self._stages, self._boxes = weakref.ref(stages), boxes

    def pieces(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._boxes.pieces(gradients)

    def square_sums(self, own: Sequence[float]) -> list[float]:
        stages = self._stages()
        assert stages is not None
        return stages.square_sums(self._boxes.square_sums(own))

    def changed(self) -> None:
        if (stages := self._stages()) is not None:
            stages.changed()


def _bytes_of(p: Tensor) -> bytes:
    assert p.grad is not None
    return bytes_of(p.grad)
