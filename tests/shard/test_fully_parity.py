"""Gradients that come in several parts: they are whole when a sharded module sends them, or it says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.step.micro_batches import MicroBatch
from tests.kinds import STAGES, Program, assert_same_state, on_every_kind, replicated_alone
from tests.parity import LeafStep
from tests.replicate.nets import WIDTH, Dense, Segments, data, requires_input, two_backwards

LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}


def program(module: Callable[[], nn.Module], leaf_step: LeafStep, num_leaves: int) -> Program:
    return Program(
        "replicated", module, leaf_step=leaf_step, optimizer=SGD, options=LOOP, num_leaves=num_leaves
    )


SEVERAL = program(Dense, two_backwards, 5)


def assert_bits(mesh: Mesh, kind: str, one: Program, **wrap: Any) -> None:
    assert_same_state(replace(one, kind=kind, wrap=wrap).trained(mesh), replicated_alone(one))


@on_every_kind(2, STAGES)
def test_several_backwards_in_a_micro_batch_need_to_be_told_and_say_so(mesh: Mesh, kind: str) -> None:
    with pytest.raises(Desync, match=r"received gradient number 2 of this backward.*pass overlap=False"):
        replace(SEVERAL, kind=kind).trained(mesh)
    assert_bits(mesh, kind, SEVERAL, overlap=False)


@on_every_kind(2, STAGES)
def test_a_reentrant_checkpoint_used_several_times_is_whole_when_it_is_sent(mesh: Mesh, kind: str) -> None:
    again = program(lambda: Segments(reentrant=True), requires_input, 5)
    assert_bits(mesh, kind, again)


class Recomputed(nn.Module):
    """Two units, of which one is in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers[1](checkpoint(self.layers[0], x, use_reentrant=True).tanh())
        return found


def penalised(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    loss = model(data(micro_batch, step).requires_grad_()).square().mean()
    (loss + sum(p.square().sum() for p in model.parameters())).backward()  # autograd begins with the last


@on_every_kind(2, STAGES)
def test_a_weight_that_is_used_in_a_reentrant_checkpoint_and_outside_is_not_sent_half(
    mesh: Mesh, kind: str
) -> None:
    """One gradient comes from outside, and ends the wait for its unit; that of the checkpoint comes later."""
    both = program(Recomputed, penalised, 2)
    with pytest.raises(Desync, match=r"received gradient number 2 of this backward.*pass overlap=False"):
        replace(both, kind=kind).trained(mesh)
    assert_bits(mesh, kind, both, overlap=False)
