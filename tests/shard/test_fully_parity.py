"""Gradients that come in several parts: they are whole when a sharded module sends them, or it says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from instep.errors import Desync
from instep.mesh.mesh import Mesh
from tests.kinds import STAGES, Program, assert_same_state, on_every_kind, replicated_alone
from tests.parity import LeafStep
from tests.replicate.nets import Dense, Segments, requires_input, two_backwards

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
