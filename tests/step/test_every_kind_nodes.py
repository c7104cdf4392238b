"""Tree nodes in smaller formats: each format has bits of its own, the same for every kind and placement."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import instep
from instep.mesh.mesh import Mesh
from instep.reduce.node_format import BucketNodes, NodeFormat
from instep.reduce.tree import Node
from instep.step.micro_batches import MicroBatch
from tests.kinds import (
    EVERY,
    KINDS,
    STAGES,
    WIDTH,
    Program,
    State,
    assert_same_state,
    close,
    on_every_kind,
    once_each,
    state_of,
)
from tests.parity import filled, world_of_one
from tests.reduce.rounded_nodes import FORMATS, by_hand
from tests.replicate.nets import Images
from tests.world import world

FORMAT = pytest.mark.parametrize("nodes", FORMATS, ids=str)


class Turned(nn.Module):
    """Complex parameters, one of a block of pairs and a half."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.zeros(40, WIDTH, dtype=torch.complex64))
        self.small = nn.Parameter(torch.zeros(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.turn.mT * self.small.sum()).flatten(1)


class Seldom(nn.Linear):
    """Used only in micro-batches whose first number is positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) if x[0, 0] > 0 else x


def mixed() -> nn.Sequential:
    """Parameters of several blocks and of parts of one, complex ones, and one that is not always used."""
    return nn.Sequential(
        Seldom(WIDTH, WIDTH), nn.Linear(WIDTH, 130), nn.Tanh(), nn.Linear(130, WIDTH), Turned()
    )


def words(nodes: NodeFormat) -> dict[str, Any]:
    name, rounding, seed = astuple(nodes)
    return {"nodes": name, "rounding": rounding, "seed": seed}


def program(kind: str, nodes: NodeFormat, **wrap: Any) -> Program:
    momentum = {"lr": 0.02, "momentum": 0.9, "fused": False, "foreach": False}
    loops = {} if kind == "pipeline" else {"find_unused_parameters": True}
    return Program(
        kind,
        mixed,
        optimizer=torch.optim.SGD,
        options=momentum,
        clip=0.1,
        wrap={**words(nodes), **loops, **wrap},
    )


@once_each
def alone(nodes: NodeFormat) -> State:
    return program("replicated", nodes).trained(world_of_one())


def by_definition(nodes: NodeFormat, one: Program) -> list[Tensor]:
    """The gradients of the first step: autograd, and each node of the tree as its format defines it."""
    module = filled(mixed())
    gradients = []
    for index in range(one.num_leaves):
        one.leaf(module, MicroBatch(index, one.num_leaves), 0)
        gradients.append([p.grad for p in module.parameters()])
        module.zero_grad()
    found = []
    for number, parameter in enumerate(module.parameters()):
        real = torch.view_as_real(parameter).flatten() if parameter.is_complex() else parameter.flatten()
        zero = torch.full(real.shape, -0.0)
        own = [zero if x[number] is None else flat(x[number]) for x in gradients]
        found.append(
            node_value([x.numpy() for x in own], (0, one.num_leaves), nodes, number) / one.num_leaves
        )
    return [torch.from_numpy(x) for x in found]


def flat(x: Tensor) -> Tensor:
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).flatten()


def node_value(leaves: list[np.ndarray], node: Node, nodes: NodeFormat, parameter: int) -> np.ndarray:
    lo, hi = node
    if hi - lo == 1:
        return by_hand(leaves[lo], nodes, 0, node, parameter)
    middle = 1
    while 2 * middle < hi - lo:
        middle *= 2
    halves = (lo, lo + middle), (lo + middle, hi)
    left, right = (node_value(leaves, half, nodes, parameter) for half in halves)
    return by_hand(left + right, nodes, 0, node, parameter)


@FORMAT
def test_one_process_computes_every_node_and_rounds_it(nodes: NodeFormat) -> None:
    one = program("replicated", nodes)
    model, _ = one.make(filled(mixed()), world_of_one())
    one.backward(model, 0)
    for p, expected in zip(model.parameters(), by_definition(nodes, one), strict=True):
        torch.testing.assert_close(flat(p.grad), expected, rtol=1e-6, atol=0)  # but for the last division
    close(model)


def test_every_format_and_rounding_has_bits_of_its_own() -> None:
    found = [
        alone(nodes).weights["1.weight"]
        for nodes in (NodeFormat(), *FORMATS, NodeFormat("int8", "stochastic", 4))
    ]
    assert len({x.numpy().tobytes() for x in found}) == len(found)


@FORMAT
@on_every_kind(2, EVERY)
def test_two_ranks_give_the_bits_of_one(mesh: Mesh, kind: str, nodes: NodeFormat) -> None:
    if kind == "pipeline" and nodes.rounding == "stochastic":
        pytest.skip("refused, see REFUSALS")
    assert_same_state(program(kind, nodes).trained(mesh), alone(nodes))


@FORMAT
@on_every_kind(4, STAGES, dp=2, shard=2)
def test_shard_groups_give_the_bits_of_one(mesh: Mesh, kind: str, nodes: NodeFormat) -> None:
    assert_same_state(program(kind, nodes).trained(mesh), alone(nodes))


@world(2)
def test_values_that_are_rounded_only_where_they_travel_are_others(mesh: Mesh) -> None:
    """A control: what a format must not be."""
    nodes = NodeFormat("bfloat16")
    one = program("replicated", nodes)
    model, optimizer = one.make(filled(mixed()), mesh)
    for bucket in model._reducer.buckets:
        bucket.counter._nodes = BucketNodes(bucket.slice_length, 2, bucket.dtype)
    for number in range(one.num_steps):
        one.step(model, optimizer, number)
    found = state_of(model, optimizer)
    close(model)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_state(found, alone(nodes))


REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "unordered": ("replicated", {"nodes": "int8", "ordered": False}, "nodes='int8' with ordered=False"),
    "unknown": ("replicated", {"nodes": "half"}, "expected one of float32, bfloat16, int8"),
    "random bits by stage": ("pipeline", {"nodes": "int8", "rounding": "stochastic"}, "depend on the cuts"),
    "order of memory": ("stage 2", {"nodes": "int8"}, "not contiguous"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_format_does_not_go_with_is_refused(name: str) -> None:
    kind, options, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        KINDS[kind].wrap(Images(), world_of_one(), **KINDS[kind].options, **options)


def test_a_communication_hook_is_refused() -> None:
    model = instep.DataParallel(nn.Linear(2, 2), nodes="int8")
    with pytest.raises(ValueError, match="a communication hook with nodes='int8'"):
        model.register_comm_hook(None, lambda state, bucket: None)
    close(model)


@on_every_kind(2, EVERY)
def test_a_format_on_one_rank_alone_is_refused_on_all(mesh: Mesh, kind: str) -> None:
    with pytest.raises(ValueError, match=r"nodes"):
        program(kind, NodeFormat(("int8", "bfloat16")[mesh.rank])).make(mixed(), mesh)
