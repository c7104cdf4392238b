"""Where a pipeline is cut: as many layers or parameters in each stage, or as given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import instep
from instep.mesh.mesh import Mesh
from instep.pipeline.cuts import balanced, edges_of
from instep.state.homes import offered
from tests.pipeline.test_runtime import gpt
from tests.rejoin import unranked
from tests.world import world


@given(st.lists(st.integers(1, 9), min_size=4, max_size=8), st.integers(1, 4))
def test_no_cut_has_a_smaller_largest_stage_than_the_balanced_one(costs: list[int], num_stages: int) -> None:
    def largest(edges: Sequence[int]) -> int:
        return max(sum(costs[a:b]) for a, b in pairwise(edges))

    inner = combinations(range(1, len(costs)), num_stages - 1)
    assert largest(balanced(costs, num_stages)) == min(largest([0, *its, len(costs)]) for its in inner)


def test_layers_and_parameters_are_what_stages_have_as_many_of() -> None:
    sizes = [6, 6, 6, 6, 400, 400]
    assert edges_of("layers", sizes, 2) == [0, 3, 6]
    assert edges_of("cost", sizes, 2) == [0, 5, 6]
    assert edges_of("cost", [0] * 4, 2) == [0, 2, 4]  # activations, say
    assert edges_of([1, 4], sizes, 3) == [0, 1, 4, 6]


@pytest.mark.parametrize(
    ("cuts", "refusal"),
    [
        ("memory", r"expected one of layers, cost, or a list of the first layers, got 'memory'"),
        (3, r"or a list of the first layers, got 3"),
        ([2, 1], r"cuts=\[2, 1\]: expected 2 of the layers 1 to 3, in order"),
        ([1], r"the first layer of each of 3 stages but stage 0, so that none is empty"),
    ],
)
def test_what_is_no_cut_is_refused(cuts: Any, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        edges_of(cuts, [1] * 4, 3)


@world(2, pp=2, dp=1)
def test_a_pipeline_cut_by_cost_has_as_many_parameters_in_each_stage(mesh: Mesh) -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)], nn.Linear(2, 200), nn.Linear(200, 2))
    model = instep.Pipeline(net, mesh, "1f1b", 8, cuts="cost")
    assert model.placement["cuts"] == [4]
    model.close()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("by", ["cost", [1]])
def test_a_pipeline_that_is_made_before_there_are_ranks_is_cut_when_they_meet(mesh: Mesh, by: Any) -> None:
    own = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    model = instep.Pipeline(gpt(), unranked(), own, 2, cuts=by)
    assert model.placement["cuts"] == []
    said = offered(model)
    said.leave()
    said.join(mesh)
    assert len(model.placement["cuts"]) == 1
    model.close()
