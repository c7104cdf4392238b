"""A stage keeps as many activations as its schedule says, counted by the tensors that autograd saves."""

from __future__ import annotations

import weakref
from typing import Any

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


def most_outputs(mesh: Mesh) -> int:
    """How many outputs of the first of two linear layers, which do not save them, are there at a time."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    alive, peak = weakref.WeakSet[Any](), 0

    def made(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal peak
        alive.add(output)
        peak = max(peak, len(alive))

    net[0].register_forward_hook(made)
    model = instep.Pipeline(net, mesh, "gpipe", G)
    for _ in range(2):
        model.step(lambda output, _: output.sum(), lambda micro_batch: torch.ones(ROWS, WIDTH))
        model.zero_grad()
    model.close()
    return peak


@world(2, pp=2, dp=1)
def test_what_was_sent_is_not_kept_for_its_backward(mesh: Mesh) -> None:
    assert most_outputs(mesh) == (1 if mesh.along["pp"].rank == 0 else 0)


@world(2, pp=2, dp=1, backend="shm")
def test_what_lies_in_shared_memory_is_not_kept_a_second_time(mesh: Mesh) -> None:
    assert most_outputs(mesh) == (1 if mesh.along["pp"].rank == 0 else 0)
