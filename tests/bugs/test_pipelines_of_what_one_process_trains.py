"""A pipeline had other bits than one process, or refused, or waited for ever: it mattered where a cut is.

Tensors came to the next stage contiguous, whatever they were before: transposed, or in channels_last, they
have other last bits there, and so had the gradients that went back.

A layer that changes its input in place was refused behind a cut: there the input was a leaf of the graph. The
norm over the parameters of one stage alone is asked for on all ranks, but the rank that has all of these
gradients took no part, and the others waited. Losses in float64 came as float32 to ranks with other stages.
What was wrong with a loss, or with what a layer gives the next stage, ended in an AttributeError of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.step.micro_batches import MicroBatch
from tests.world import world

G = 4


def rows(micro_batch: MicroBatch) -> Tensor:
    return torch.linspace(-1, 1, G * 3 * 4, dtype=torch.float64).sin().view(G, 3, 4)[micro_batch.index]


def layers(*others: nn.Module) -> nn.Sequential:
    """Linear layers around ``others``, with values that are no random ones."""
    net = nn.Sequential(nn.Linear(4, 4), *others, nn.Linear(4, 4)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).cos().view(p.shape))
    return net


def of_one_process(net: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and losses."""
    alone = instep.DataParallel(net)
    losses = []
    for micro_batch in alone.micro_batches(G):
        losses.append(alone(rows(micro_batch)).square().mean())
        losses[-1].backward()
    alone.close()
    return [p.grad for p in net.parameters() if p.grad is not None], losses


def assert_equal(
    model: instep.Pipeline, losses: list[Tensor], expected: tuple[list[Tensor], list[Tensor]]
) -> None:
    """This rank's gradients, and all losses."""
    for p, gradient in zip(model.parameters(), expected[0], strict=True):
        assert model.home is not None
        assert not model.home.holds(p) or torch.equal(p.grad, gradient)
    assert [(x.dtype, x.item()) for x in losses] == [(x.dtype, x.item()) for x in expected[1]]


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_a_layer_behind_a_cut_may_change_its_input_in_place(mesh: Mesh, schedule: str) -> None:
    def net() -> nn.Sequential:
        return layers(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True))

    cuts = [1, 2, 3] if schedule == "zb-v" else [1]
    model = instep.Pipeline(net(), mesh, schedule, cuts=cuts)
    losses = model.step(lambda output, _: output.square().mean(), rows, data=G)
    assert_equal(model, losses, of_one_process(net()))
    model.close()


@world(2, pp=2, dp=1)
def test_the_norm_over_one_stage_is_the_same_on_all_ranks(mesh: Mesh) -> None:
    expected, _ = of_one_process(layers())
    model = instep.Pipeline(layers(), mesh)
    model.step(lambda output, _: output.square().mean(), rows, data=G)
    first, last = list(model.parameters())[:2], list(model.parameters())[2:]
    for chosen, gradients in ((first, expected[:2]), (last, expected[2:])):
        norm = instep.clip_grad_norm_(chosen, 1e-3)
        torch.testing.assert_close(norm, torch.cat([x.flatten() for x in gradients]).norm())
    torch.testing.assert_close(
        instep.clip_grad_norm_(model.parameters(), 1.0).item(), 2**0.5 * 1e-3, rtol=1e-2, atol=0
    )
    model.close()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (lambda output, _: output.square().mean(1), r"micro-batch 0: expected a scalar tensor, got \(3,\)"),
        (lambda output, _: output.sum().item(), r"expected a scalar tensor, got a float"),
        (lambda output, _: None, r"expected a scalar tensor, got a NoneType"),
        (lambda output, _: output.detach().sum(), r"has no gradient: compute it from the output"),
    ],
)
def test_a_loss_that_cannot_be_is_refused_in_words(
    mesh: Mesh, loss: Callable[[Any, MicroBatch], Any], error: str
) -> None:
    last = mesh.along["pp"].rank == 1
    model = instep.Pipeline(layers(), mesh)
    with pytest.raises(
        (TypeError, ValueError) if last else Desync, match=error if last else f"rank 1: .*Error: .*{error}"
    ):
        model.step(loss, rows, data=G)
    model.close()


class Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 3)


class Watched(nn.Module):
    """Notes the strides of what comes to it, on both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, tuple[int, ...]]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(("forward", x.stride()))
        out = x * 2
        out.register_hook(lambda gradient: self.seen.add(("backward", gradient.stride())))
        return out


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("cut", [1, 3])
def test_what_goes_between_stages_keeps_its_strides(mesh: Mesh, cut: int, schedule: str) -> None:
    def net() -> nn.Sequential:
        found = nn.Sequential(nn.Conv2d(3, 4, 3), Watched(), Turn(), Watched(), nn.Linear(4, 4))
        return found.to(memory_format=torch.channels_last)

    def inputs(micro_batch: MicroBatch) -> Tensor:
        return torch.ones(2, 3, 8, 6).to(memory_format=torch.channels_last)

    alone, here = net(), net()
    alone(inputs(MicroBatch(0, G))).square().mean().backward()
    model = instep.Pipeline(here, mesh, schedule, cuts=[cut])
    model.step(lambda output, _: output.square().mean(), inputs, data=G)
    watched = [(one.seen, other.seen) for one, other in zip(here, alone, strict=True) if type(one) is Watched]
    seen = [pair for pair in watched if pair[0]]
    assert len(seen) == sum((i < cut) == (mesh.along["pp"].rank == 0) for i in (1, 3))
    assert all(one == other for one, other in seen)
    model.close()


@world(2, pp=2, dp=1)
def test_layers_whose_values_went_with_another_pipeline_are_refused(mesh: Mesh) -> None:
    net = layers()
    instep.Pipeline(net, mesh).close()
    with pytest.raises(ValueError, match=r"has no values here, as another pipeline had it on another rank"):
        instep.Pipeline(net, mesh)
