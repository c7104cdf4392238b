"""Every algorithm gives, on real groups of one to six ranks, what can be computed from all inputs alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from instep.comm import cost
from instep.comm.algorithms import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)
from instep.comm.messages import Messages
from instep.comm.perform import perform
from tests.comm.inputs import NUM_ELEMENTS, about, bits, counted, cut, drawn, everybodys
from tests.comm.orders import ORDERS, in_turn, rotated
from tests.ordered.trees import tree_sum
from tests.world import world

SIZES = range(1, 7)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.bool,  # its sum is "any", as in torch
)


def agrees_with(expected: cost.CollectiveCost, messages: Messages, operation: Callable[[], None]) -> None:
    """Run ``operation``; this rank must send what the formula says of it."""
    sent = counted(messages, operation)
    assert sent == (expected.messages[messages.rank], expected.sent[messages.rank])


@pytest.mark.parametrize("size", SIZES)
def test_an_all_reduce_gives_everybody_the_sum_for_the_bytes_of_its_formula(size):
    world(size)(all_reduces)()


def all_reduces(mesh):
    messages = Messages(mesh.world.pg)
    for name, algorithm in ALL_REDUCE.items():
        for num_elements in NUM_ELEMENTS:
            addends = everybodys(messages.size, num_elements)
            x = addends[messages.rank].clone()
            formula = cost.all_reduce(name, messages.size, 4 * num_elements, 4)
            agrees_with(formula, messages, lambda algorithm=algorithm, x=x: perform(algorithm, x, messages))
            assert about(x, in_turn(addends), addends), (name, num_elements)


@pytest.mark.parametrize(
    ("size", "backend"),
    [
        *(pytest.param(size, "gloo", marks=[pytest.mark.slow] * (size in (4, 5))) for size in SIZES),
        (2, "shm"),
        (5, "shm"),
    ],
)
def test_an_all_reduce_adds_in_the_order_that_it_states_in_every_dtype(size, backend):
    world(size, backend=backend)(all_reduces_in_order)()


def all_reduces_in_order(mesh):
    """So every rank has the same bits, too: all of them compare with the same ones."""
    messages = Messages(mesh.world.pg)
    for name, algorithm in ALL_REDUCE.items():
        for dtype in DTYPES:
            addends = everybodys(messages.size, 61, dtype)
            x = addends[messages.rank].clone()
            perform(algorithm, x, messages)
            assert bits(x) == bits(ORDERS[name](addends)), (name, dtype)


def test_the_orders_can_be_told_apart():
    addends = everybodys(5, 61)
    different = {
        bits(ORDERS[name](addends)) for name in ("direct", "reduce_broadcast", "ring", "halving_doubling")
    }
    assert len(different) == 4


@pytest.mark.parametrize("size", SIZES)
def test_every_root_can_broadcast(size):
    world(size)(broadcasts)()


def broadcasts(mesh):
    messages = Messages(mesh.world.pg)
    rank, size = messages.rank, messages.size
    for name, algorithm in BROADCAST.items():
        for num_elements in NUM_ELEMENTS:
            root = num_elements % size
            x = drawn(rank, num_elements)
            formula = cost.broadcast(name, size, 4 * num_elements, 4)
            sent = counted(messages, lambda a=algorithm, x=x, root=root: perform(a, x, messages, root))
            v = (rank - root) % size if name != "naive" else (0 if rank == root else size - 1)
            assert sent == (formula.messages[v], formula.sent[v]), (name, num_elements)
            assert bits(x) == bits(drawn(root, num_elements)), (name, num_elements)


@pytest.mark.parametrize("size", SIZES)
def test_every_root_can_reduce_in_the_order_that_is_stated(size):
    world(size)(reduces)()


def reduces(mesh):
    messages = Messages(mesh.world.pg)
    rank, size = messages.rank, messages.size
    for root in range(size):
        addends = everybodys(size, 13)
        around = [*addends[root:], *addends[:root]]
        expected = {"naive": in_turn(addends), "tree": tree_sum(around, torch.add)}
        for name, algorithm in REDUCE.items():
            x = addends[rank].clone()
            sent = counted(messages, lambda a=algorithm, x=x, root=root: perform(a, x, messages, root))
            assert sent == ((0, 0) if rank == root else (1, 4 * 13))
            assert rank != root or bits(x) == bits(expected[name]), (name, root)


@pytest.mark.parametrize("size", SIZES)
def test_parts_are_reduced_gathered_scattered_and_exchanged(size):
    world(size)(partwise)()


def partwise(mesh):
    messages = Messages(mesh.world.pg)
    for num_elements in NUM_ELEMENTS:
        reduce_scatters(messages, num_elements)
        all_gathers(messages, num_elements)
        exchanges_all(messages, num_elements)
        for root in {0, messages.size - 1}:
            scatters_and_gathers(messages, num_elements, root)


def reduce_scatters(messages: Messages, num_elements: int) -> None:
    rank, size = messages.rank, messages.size
    addends = everybodys(size, num_elements)
    orders = {"ring": rotated, "direct": in_turn}
    for name, algorithm in REDUCE_SCATTER.items():
        parts = cut(addends[rank].clone(), size)
        formula = cost.reduce_scatter(name, size, 4 * num_elements, 4)
        agrees_with(formula, messages, lambda a=algorithm, parts=parts: perform(a, parts, messages))
        assert bits(parts[rank]) == bits(cut(orders[name](addends), size)[rank]), name


def all_gathers(messages: Messages, num_elements: int) -> None:
    rank, size = messages.rank, messages.size
    for name, algorithm in ALL_GATHER.items():
        out = torch.zeros(num_elements)
        parts = cut(out, size)
        parts[rank].copy_(cut(drawn(9, num_elements), size)[rank])
        formula = cost.all_gather(name, size, 4 * num_elements, 4)
        agrees_with(formula, messages, lambda a=algorithm, parts=parts: perform(a, parts, messages))
        assert bits(out) == bits(drawn(9, num_elements)), name


def exchanges_all(messages: Messages, num_elements: int) -> None:
    rank, size = messages.rank, messages.size
    rows = [cut(x, size) for x in everybodys(size, num_elements)]
    for name, algorithm in ALL_TO_ALL.items():
        out = [torch.zeros_like(row[rank]) for row in rows]
        formula = cost.all_to_all(name, size, 4 * num_elements, 4)
        agrees_with(formula, messages, lambda a=algorithm, out=out: a(rows[rank], messages, out))
        assert [bits(part) for part in out] == [bits(row[rank]) for row in rows]


def scatters_and_gathers(messages: Messages, num_elements: int, root: int) -> None:
    rank, size = messages.rank, messages.size
    expected = cut(drawn(7, num_elements), size)
    own, back = torch.zeros_like(expected[rank]), torch.zeros(num_elements)
    scatter, gather = SCATTER["naive"], GATHER["naive"]
    down = counted(messages, lambda: scatter(expected if rank == root else [], messages, own, root))
    assert bits(own) == bits(expected[rank])
    up = counted(messages, lambda: gather(own, messages, cut(back, size) if rank == root else [], root))
    assert rank != root or bits(back) == bits(drawn(7, num_elements))
    if root == 0:
        for sent, of in ((down, cost.scatter), (up, cost.gather)):
            formula = of("naive", size, 4 * num_elements, 4)
            assert sent == (formula.messages[rank], formula.sent[rank])


@world(3)
def test_shapes_stay_and_tensors_without_dimensions_are_reduced(mesh):
    messages = Messages(mesh.world.pg)
    for algorithm in ALL_REDUCE.values():
        for shape in ((), (2, 3, 5), (4, 0)):
            x = torch.full(shape, 1.0 + messages.rank)
            perform(algorithm, x, messages)
            assert x.shape == shape and bool((x == 6).all())


@world(4)
def test_minus_zero_plus_minus_zero_stays_minus_zero(mesh):
    messages = Messages(mesh.world.pg)
    for name, algorithm in ALL_REDUCE.items():
        x = torch.full((9,), -0.0)
        perform(algorithm, x, messages)
        assert bool(torch.signbit(x).all()), name


@world(2)
def test_megabytes_pass(mesh):
    messages = Messages(mesh.world.pg)
    for name, algorithm in ALL_REDUCE.items():
        x = torch.arange(1 << 20, dtype=torch.float32) * (1 + messages.rank)
        perform(algorithm, x, messages)
        assert torch.equal(x, torch.arange(1 << 20, dtype=torch.float32) * 3), name


@world(3, by="process")
def test_processes_get_what_threads_get(mesh):
    messages = Messages(mesh.world.pg)
    for name, algorithm in ALL_REDUCE.items():
        addends = everybodys(3, 61)
        x = addends[messages.rank].clone()
        perform(algorithm, x, messages)
        assert bits(x) == bits(ORDERS[name](addends)), name
