"""A stage keeps as many activations as its schedule says, counted by the tensors that autograd saves."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.mesh.mesh import Mesh
from instep.pipeline.check import peak_activations
from instep.pipeline.schedules import generate
from tests.world import world

WIDTH, ROWS, G = 8, 3, 8


class Box:
    """A saved tensor, as long as autograd keeps it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class SavedTensors:
    """How many activations, of ``ROWS`` rows, are saved at a time; ``peak`` since it was made."""

    def __init__(self) -> None:
        self.now = self.peak = self.all = 0

    def pack(self, x: Tensor) -> Box:
        box = Box(x.detach())  # an output that is saved would keep itself
        if x.shape[0] == ROWS:
            self.now, self.all = self.now + 1, self.all + 1
            self.peak = max(self.peak, self.now)
            weakref.finalize(box, self._gone)
        return box

    def _gone(self) -> None:
        self.now -= 1


def layers(count: int) -> nn.Sequential:
    """Each saves its input for the weights, and its output for the nonlinearity, of every micro-batch."""
    made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    with torch.no_grad():
        for p in (p for layer in made for p in layer.parameters()):
            p.copy_(torch.linspace(-1.0, 1.0, p.numel()).view(p.shape))
    return nn.Sequential(*made)


def peak_of(mesh: Mesh, schedule: str, chunks: int) -> float:
    """The most that this rank keeps in a step, in stages times micro-batches."""
    model = instep.Pipeline(layers(mesh.along["pp"].size * chunks), mesh, schedule, G, chunks=chunks)
    saved = SavedTensors()
    for _ in range(2):  # the first step learns how messages look
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda box: box.x):
            model.step(lambda output, _: output.sum(), lambda micro_batch: torch.ones(ROWS, WIDTH))
        model.zero_grad()
    assert saved.now == 0
    model.close()
    return saved.peak * (2 * G * chunks) / saved.all


def said(schedule: str, ranks: int, chunks: int, rank: int) -> float:
    """What ``check.py`` says that ``rank`` keeps at most.

    Of what a stage saves a half is for gradients of its inputs alone, and goes when those are there: but for
    the first stage, which computes none.
    """
    made = generate(schedule, ranks, G, chunks)
    whole, halved = peak_activations(made)[rank], peak_activations(made, kept=0.5)[rank]
    return whole if rank == 0 else halved


@world(3, pp=3, dp=1)
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1)],
)
def test_each_rank_keeps_what_the_schedule_says(mesh: Mesh, schedule: str, chunks: int) -> None:
    rank = mesh.along["pp"].rank
    expected = said(schedule, 3, chunks, rank)
    assert peak_of(mesh, schedule, chunks) == expected
    if schedule in ("gpipe", "1f1b"):
        assert expected == (G if schedule == "gpipe" else 3 - rank)
