"""Every algorithm gives, on real groups of one to six ranks, the result computed from all inputs alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from instep.comm.algorithms import SCHEDULES
from instep.comm.cost import collective_cost
from instep.comm.perform import perform
from instep.comm.schedule import edges
from instep.net.messages import Messages
from tests.comm.inputs import NUM_ELEMENTS, CountingMessages, bits, cut, drawn, everybodys
from tests.comm.orders import ORDERS
from tests.world import world

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
INPUTS = [*((torch.float32, count) for count in NUM_ELEMENTS), *((dtype, 61) for dtype in DTYPES)]
IN_PARTS = ("reduce_scatter", "all_gather", "scatter", "gather")
NOTHING, ALL = slice(0), slice(None)


@pytest.mark.parametrize(
    ("size", "backend"), [*((size, "gloo") for size in range(1, 7)), (2, "shm"), (5, "shm")]
)
def test_every_algorithm_gives_its_result_bit_by_bit_for_the_bytes_of_its_cost(size, backend):
    """So all ranks have the same bits, too: they all compare with the same ones."""
    world(size, backend=backend)(every_algorithm)()


def every_algorithm(mesh):
    for dtype, count in INPUTS:
        xs = everybodys(mesh.world.size, count, dtype)
        for collective, algorithms in SCHEDULES.items():
            for name in algorithms:
                messages = CountingMessages(mesh.world.pg)
                root = count % messages.size if collective in ("broadcast", "reduce") else 0
                run = exchanged if collective == "all_to_all" else performed
                found, expected = run(collective, name, xs, messages, root)
                assert bits(found) == bits(expected), (collective, name, dtype, count)
                cost = collective_cost(SCHEDULES[collective][name], messages.size, count, dtype.itemsize)
                v = (messages.rank - root) % messages.size
                assert (messages.num_messages, messages.bytes_sent) == (cost.messages[v], cost.sent[v])


def performed(collective: str, name: str, xs: list[Tensor], messages: Messages, root: int):
    """The elements that count on this rank, and what they should be."""
    size, rank = messages.size, messages.rank
    own = slice(*edges(len(xs[0]), size)[rank : rank + 2])
    around = [*xs[root:], *xs[:root]]
    x = xs[rank].clone()
    if collective in ("all_gather", "gather") or (collective == "scatter" and rank):
        x = torch.zeros_like(x)
        x[own if collective != "scatter" else NOTHING] = xs[0][own if collective != "scatter" else NOTHING]
    perform(SCHEDULES[collective][name], cut(x, size) if collective in IN_PARTS else x, messages, root)
    counts, expected = {
        "all_reduce": lambda: (ALL, ORDERS[name](xs)),
        "reduce": lambda: (ALL if rank == root else NOTHING, ORDERS[name](around)),
        "broadcast": lambda: (ALL, xs[root]),
        "reduce_scatter": lambda: (own, ORDERS[name](xs)),
        "all_gather": lambda: (ALL, xs[0]),
        "gather": lambda: (own if rank else ALL, xs[0]),
        "scatter": lambda: (own, xs[0]),
    }[collective]()
    return x[counts], expected[counts]


def exchanged(collective: str, name: str, xs: list[Tensor], messages: Messages, root: int):
    rows = [cut(x, messages.size) for x in xs]
    expected = torch.cat([row[messages.rank] for row in rows])
    out = torch.zeros_like(expected)
    parts = out.split([len(row[messages.rank]) for row in rows])
    perform(SCHEDULES[collective][name], rows[messages.rank], messages, out=parts)
    return out, expected


def test_the_orders_can_be_told_apart():
    addends = everybodys(5, 61)
    assert len({bits(ORDERS[name](addends)) for name in ("direct", "tree", "ring", "halving_doubling")}) == 4


@world(4)
def test_shapes_stay_minus_zero_stays_and_megabytes_pass(mesh):
    messages = Messages(mesh.world.pg)
    for name, algorithm in SCHEDULES["all_reduce"].items():
        for shape in ((), (2, 3, 5), (4, 0)):
            x = torch.full(shape, 1.0 + messages.rank)
            perform(algorithm, x, messages)
            assert x.shape == shape and bool((x == 10).all()), name
        x = torch.full((9,), -0.0)
        perform(algorithm, x, messages)
        assert bool(torch.signbit(x).all()), name
        x = drawn(0, 1 << 18).round()
        perform(algorithm, x, messages)
        assert torch.equal(x, 4 * drawn(0, 1 << 18).round()), name
