"""A description of a wrapper that is kept follows the buckets, which the first step re-orders.

A ``TrainingState`` keeps one. A pipeline held the buckets themselves: those of before the first step stayed
in memory, as large as the gradients, and were reported in the place of the live ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.mesh.mesh import Mesh
from instep.state.homes import offered
from tests.world import world

WIDTH = 16


class Backwards(nn.Module):
    """Layers that are registered in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def replicated(mesh: Mesh) -> tuple[Any, Callable[[], object]]:
    model = instep.DataParallel(Backwards(), process_group=mesh)
    return model, lambda: model(torch.ones(2, WIDTH)).sum().backward()


def pipeline(mesh: Mesh) -> tuple[Any, Callable[[], object]]:
    model = instep.Pipeline([Backwards()], mesh)
    return model, lambda: model.step(lambda output, _: output.sum(), lambda _: torch.ones(2, WIDTH), data=2)


@pytest.mark.parametrize("kind", [replicated, pipeline])
@world(2)
def test_what_is_kept_is_the_live_memory(mesh: Mesh, kind: Callable[[Mesh], Any]) -> None:
    model, backward = kind(mesh)
    kept = offered(model)
    for _ in range(2):
        backward()
        model.zero_grad()
    live = [x.data_ptr() for x in offered(model).gradients()]
    assert [x.data_ptr() for x in kept.gradients()] == live
    model.close()
