"""Every algorithm takes, on a network whose time is arithmetic, what its formula says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

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
from instep.comm.schedule import Schedule
from tests.comm.inputs import cut
from tests.comm.simulated import Network

ALPHA_S, BETA_S = 1.0, 1 / 64
SIZES = range(1, 9)

Body = Callable[[Messages], None]


def parts(messages: Messages, num_elements: int) -> list[Tensor]:
    return cut(torch.zeros(num_elements), messages.size)


def bodies(n: int) -> dict[tuple[str, str], Body]:
    """Every algorithm on n elements, by collective and name."""

    def whole(schedule: Schedule) -> Body:
        return lambda messages: perform(schedule, torch.zeros(n), messages)

    def partwise(schedule: Schedule) -> Body:
        return lambda messages: perform(schedule, parts(messages, n), messages)

    def between(algorithm: Callable) -> Body:
        return lambda messages: algorithm(parts(messages, n), messages, received(messages))

    def received(messages: Messages) -> Sequence[Tensor]:
        return [torch.zeros_like(parts(messages, n)[messages.rank]) for _ in range(messages.size)]

    def scatter(algorithm: Callable) -> Body:
        return lambda m: algorithm(parts(m, n), m, torch.zeros_like(parts(m, n)[m.rank]))

    def gather(algorithm: Callable) -> Body:
        return lambda m: algorithm(torch.zeros_like(parts(m, n)[m.rank]), m, parts(m, n))

    kinds = {
        "broadcast": (whole, BROADCAST),
        "reduce": (whole, REDUCE),
        "all_reduce": (whole, ALL_REDUCE),
        "reduce_scatter": (partwise, REDUCE_SCATTER),
        "all_gather": (partwise, ALL_GATHER),
        "all_to_all": (between, ALL_TO_ALL),
        "scatter": (scatter, SCATTER),
        "gather": (gather, GATHER),
    }
    return {
        (collective, name): wrap(algorithm)
        for collective, (wrap, algorithms) in kinds.items()
        for name, algorithm in algorithms.items()
    }


def formulas() -> dict[tuple[str, str], cost.Formula]:
    tables = cost.FORMULAS.items()
    return {(kind, name): formula for kind, table in tables for name, formula in table.items()}


def test_there_is_a_formula_for_every_algorithm():
    assert formulas().keys() == bodies(1).keys()


@pytest.mark.parametrize("size", SIZES)
def test_the_formula_is_the_time_where_all_parts_are_equal(size):
    n = size * 8 * 3  # eight: the butterfly cuts into powers of two
    for key, body in bodies(n).items():
        expected = formulas()[key](size, 4 * n, 4).time_s(ALPHA_S, BETA_S)
        found = Network(size, ALPHA_S, BETA_S).time_s(body)
        if key == ("broadcast", "scatter_allgather"):  # the ring begins while the tree ends
            assert found <= expected, (key, found, expected)
        else:
            assert found == pytest.approx(expected), key


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", [0, 5, 23])
def test_the_formula_is_not_below_the_time_where_parts_are_unequal(size, n):
    for key, body in bodies(n).items():
        expected = formulas()[key](size, 4 * n, 4).time_s(ALPHA_S, BETA_S)
        assert Network(size, ALPHA_S, BETA_S).time_s(body) <= expected + 1e-9, key
