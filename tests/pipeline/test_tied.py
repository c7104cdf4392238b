"""Parameters of several stages: the schedule knows of their gradients, which have the bits of one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import instep
from instep.mesh.mesh import Mesh
from instep.pipeline.actions import RECEIVES, SENDS, Action, Schedule
from instep.pipeline.check import check
from instep.pipeline.communication import programs
from instep.pipeline.simulate import StageTimes, makespan_s, simulate
from tests.pipeline.drawn import schedules
from tests.world import world

G = 4
X = torch.randn(G, 2, 6, 8, 8, generator=torch.Generator().manual_seed(0))


def test_the_stage_that_owns_a_shared_parameter_waits_for_the_gradients_of_the_others() -> None:
    schedule = replace(Schedule.parse("0F0 0B0\n1F0 2F0 2I0 2W0 1B0"), ties=((0, 2), (0, 1, 2)))
    check(schedule)
    assert schedule.needs(Action(0, "B", 0))[2:] == [Action(2, "W", 0), Action(1, "W", 0)]
    first, second = (" ".join(map(str, program)) for program in programs(schedule))
    assert first == "2RECV_W0/0 2RECV_W0/1 0RECV_B0 1RECV_W0/1 0F0 0SEND_F0 0B0"
    assert second == "1RECV_F0 1F0 2F0 2I0 2W0 2SEND_W0/0 2SEND_W0/1 1B0 1SEND_B0 1SEND_W0/1"
    assert str(Action(2, "SEND_W", 0, 1)) == "2SEND_W0/1"


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("0F0 1F0 1I0 0B0 1W0", r"0B0 needs 1W0 \(stages 0 and 1 share a parameter\).*put 1W0 before it"),
        (
            "0F0 0B0 0F1 0B1\n1F0 1I0 1F1 1I1 1W0 1W1",
            r"deadlock: rank 0 at 0B0 for 1W0, rank 1 at 1F1 for 0F1(?s:.*)<-- here",
        ),
    ],
)
def test_a_schedule_that_only_shared_parameters_make_illegal_is_refused(text: str, refusal: str) -> None:
    check(Schedule.parse(text))
    with pytest.raises(ValueError, match=refusal):
        check(replace(Schedule.parse(text), ties=((0, 1),)))


@given(schedules(), st.data())
def test_every_schedule_is_legal_with_shared_parameters(schedule: Schedule, data: st.DataObject) -> None:
    stages = st.lists(st.integers(0, schedule.num_stages - 1), min_size=2, max_size=4, unique=True)
    ties = data.draw(st.lists(stages.map(sorted).map(tuple), max_size=2)) if schedule.num_stages > 1 else []
    tied = replace(schedule, ties=tuple(ties))
    check(tied)
    every = [action for row in programs(tied) for action in row]
    num_sent = sum(
        schedule.stage_ranks[user] != schedule.stage_ranks[owner] for owner, *users in ties for user in users
    )
    for kinds in (SENDS, RECEIVES):
        assert sum(x.kind == kinds[2] for x in every) == num_sent * schedule.num_micro_batches
    slow = StageTimes(1, 1, 1)
    assert makespan_s(simulate(tied, slow)) >= makespan_s(simulate(schedule, slow))


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.conv2d(x, self.weight, padding=1))


class Scales(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Skips(nn.Module):
    """A layer that shares a weight and never uses it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


def conv_weight() -> nn.Parameter:
    values = torch.linspace(-0.3, 0.4, 6 * 6 * 3 * 3).view(6, 6, 3, 3)
    return nn.Parameter(values.to(memory_format=torch.channels_last))


def weight_of(layers: list[nn.Module]) -> nn.Parameter:
    (found,) = {p for layer in layers for p in layer.parameters() if p.ndim == 4}
    return found


def of_one_rank(layers: list[nn.Module]) -> Tensor | None:
    model = instep.DataParallel(nn.Sequential(*layers), find_unused_parameters=True)
    for micro_batch in model.micro_batches(G):
        model(X[micro_batch.index]).square().mean().backward()
    model.close()
    return weight_of(layers).grad


def piped(mesh: Mesh, layers: list[nn.Module], schedule: str, **options: Any) -> Tensor | None:
    model = instep.Pipeline(layers, mesh, schedule, G, find_unused_parameters=True, **options)
    model.step(lambda output, _: output.square().mean(), lambda micro_batch: X[micro_batch.index])
    model.close()
    return weight_of(layers).grad


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_shared_weight_that_a_stage_uses_twice_is_of_the_last_stage_or_refused(schedule: str) -> None:
    def layers() -> list[nn.Module]:
        weight = conv_weight()
        return [Tied(weight), Tied(weight), Tied(weight)]

    @world(2, pp=2, dp=1)
    def compared(mesh: Mesh) -> None:
        found = piped(mesh, layers(), schedule, cuts=[1])
        if mesh.rank == 0:
            assert torch.equal(found, of_one_rank(layers()))
        model = instep.Pipeline(layers(), mesh, schedule, G, cuts=[2])
        with pytest.raises((ValueError, RuntimeError)) as refused:
            model.step(lambda output, _: output.sum(), lambda micro_batch: X[micro_batch.index])
        if mesh.rank == 0:
            assert "stage 0 uses parameter '0.weight' 2 times, and a later stage" in str(refused.value)
        model.close()

    compared()


@world(2, pp=2, dp=1)
def test_a_stage_that_does_not_use_a_shared_weight_adds_no_zero_to_its_gradient(mesh: Mesh) -> None:
    """-0.0 + 0.0 is 0.0."""
    weight = nn.Parameter(torch.ones(2, 6, 8, 8))
    model = instep.Pipeline([Scales(weight), Skips(weight)], mesh, "1f1b", G, find_unused_parameters=True)
    model.step(lambda output, _: -output.sum(), lambda _: torch.zeros(2, 6, 8, 8))
    if mesh.rank == 0:
        assert weight.grad is not None
        assert torch.equal(torch.signbit(weight.grad), torch.ones_like(weight.grad, dtype=torch.bool))
    model.close()
