"""Where a pipeline is cut: the best of all cuts by time or by memory, for layers that are measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import instep
from instep.events import STEP, Event
from instep.mesh.mesh import Mesh
from instep.models.transformer import GPT
from instep.pipeline import cuts
from instep.pipeline.actions import Action, Schedule
from instep.pipeline.cuts import (
    LayerCost,
    Pace,
    balanced,
    fastest,
    leanest,
    peak_bytes,
    simulated_s,
)
from instep.pipeline.layer_costs import measure
from instep.pipeline.layers import layers_of
from instep.pipeline.message_words import HEAD_BYTES
from instep.pipeline.proposal import RankTimes, propose, rank_times
from instep.pipeline.schedules import generate
from instep.pipeline.simulate import makespan_s, simulate
from instep.shard.saved_memory import saved_beside
from instep.state.homes import offered
from tests.pipeline.test_runtime import G, gpt, loss, windows
from tests.rejoin import unranked
from tests.world import world

NAMES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")


def every_cut(num_layers: int, num_stages: int) -> list[list[int]]:
    inner = combinations(range(1, num_layers), num_stages - 1)
    return [[0, *edges, num_layers] for edges in inner]


@st.composite
def layers(draw: st.DrawFn, least: int = 4) -> list[LayerCost]:
    """Costs of some layers, in whole ms, and small sizes."""
    ms = st.integers(1, 9).map(lambda number: number / 1e3)
    size = st.integers(0, 9)
    one = st.builds(LayerCost, ms, ms, size, size, size, size)
    return draw(st.lists(one, min_size=least, max_size=8))


# Balanced, exactly.


@given(layers(), st.integers(1, 4), st.data())
def test_no_cut_has_a_smaller_largest_stage_than_the_balanced_one(costs, num_stages, data):
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=num_stages, max_size=num_stages))

    def largest(edges: Sequence[int]) -> float:
        sums = [sum(cost.time_s for cost in costs[a:b]) for a, b in pairwise(edges)]
        return max(cost / speed for cost, speed in zip(sums, speeds, strict=True))

    found = balanced([cost.time_s for cost in costs], num_stages, speeds)
    assert largest(found) <= min(map(largest, every_cut(len(costs), num_stages))) * (1 + 1e-9)


def test_a_slow_stage_has_fewer_layers():
    assert balanced([1.0] * 12, 2) == [0, 6, 12]
    assert balanced([1.0] * 12, 2, [1.0, 1 / 3]) == [0, 9, 12]
    assert balanced([1.0] * 12, 3, [1.0, 0.5, 1.0]) == [0, 5, 7, 12]


# By time.


@settings(max_examples=30)
@given(layers(), st.sampled_from(NAMES), st.integers(1, 6), st.data())
def test_no_cut_is_faster_in_the_simulator_than_the_fastest(costs, name, num_micro_batches, data):
    schedule = generate(name, 2, num_micro_batches)
    pace = st.builds(Pace, st.sampled_from([1.0, 3.0]), st.sampled_from([1.0, 2.0]))
    paces = data.draw(st.lists(pace, min_size=2, max_size=2))
    took_s = simulated_s(costs, fastest(costs, schedule, paces), schedule, paces)
    for edges in every_cut(len(costs), schedule.num_stages):
        assert took_s <= simulated_s(costs, edges, schedule, paces) + 1e-9


@settings(max_examples=20)
@given(layers(), st.sampled_from(NAMES), st.integers(2, 6))
def test_where_cuts_are_too_many_to_try_all_of_them_none_of_the_neighbours_is_faster(costs, name, count):
    schedule, paces = generate(name, 2, count), [Pace(), Pace(2.0, 2.0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "comb", lambda *of: 10**9)
        found = fastest(costs, schedule, paces)
    took_s = simulated_s(costs, found, schedule, paces)
    for edges in every_cut(len(costs), schedule.num_stages):
        if sum(abs(a - b) for a, b in zip(edges, found, strict=True)) == 1:
            assert took_s <= simulated_s(costs, edges, schedule, paces) + 1e-9


def test_of_cuts_whose_longest_stage_is_as_long_the_schedule_decides():
    """Five equal layers on two ranks: 2 + 3 has as long a stage as 3 + 2, and is slower."""
    costs, schedule, paces = [LayerCost(1.0, 1.0)] * 5, generate("1f1b", 2, 4), [Pace()] * 2
    assert balanced([cost.time_s for cost in costs], 2) == [0, 2, 5]
    assert fastest(costs, schedule) == [0, 3, 5]
    assert [simulated_s(costs, [0, edge, 5], schedule, paces) for edge in (2, 3)] == [28, 26]


# By memory.


def held(costs: Sequence[LayerCost], edges: Sequence[int], schedule: Schedule, moments: int) -> float:
    """The most of any rank, added up tensor by tensor along its row."""
    most = []
    for rank, row in enumerate(schedule.rows):
        own = {i for i, at in enumerate(schedule.stage_ranks) if at == rank}
        state = sum(
            x.weight_bytes + (1 + moments) * x.trained_bytes
            for i in own
            for x in costs[edges[i] : edges[i + 1]]
        )
        alive: set[Action] = set()
        peak = 0
        for action in row:
            forward = action._replace(kind="F")
            if action.kind == "F":
                alive.add(forward)
            elif action.kind in ("B", "W"):
                alive.remove(forward)
            now = 0
            for stage, *_ in alive:
                a, b = edges[stage], edges[stage + 1]
                now += sum(x.saved_bytes for x in costs[a:b])
                now += sum(x.output_bytes for x in costs[max(a - 1, 0) : b])
            peak = max(peak, now)
        most.append(state + peak)
    return max(most)


@settings(max_examples=30)
@given(layers(), st.sampled_from(NAMES), st.integers(1, 6), st.integers(0, 2))
def test_no_cut_takes_less_memory_than_the_leanest(costs, name, num_micro_batches, moments):
    schedule = generate(name, 2, num_micro_batches)
    found = leanest(costs, schedule, moments)
    assert max(peak_bytes(costs, found, schedule, moments)) == held(costs, found, schedule, moments)
    for edges in every_cut(len(costs), schedule.num_stages):
        assert held(costs, found, schedule, moments) <= held(costs, edges, schedule, moments)


def test_the_first_stage_of_1f1b_has_fewer_layers_where_activations_are_what_takes_memory():
    """It holds as many micro-batches as there are ranks, the last one holds one."""
    costs = [LayerCost(1.0, 1.0, 0, 0, 100, 0)] * 12
    assert leanest(costs, generate("1f1b", 2, 8)) == [0, 4, 12]
    assert leanest(costs, generate("gpipe", 2, 8)) == [0, 6, 12]
    weights = [LayerCost(1.0, 1.0, 100, 100, 0, 0)] * 12
    assert leanest(weights, generate("1f1b", 2, 8)) == [0, 6, 12]


# Proposals.


def times_of(costs: Sequence[LayerCost], edges: Sequence[int], schedule: Schedule, paces: Sequence[Pace]):
    """What the ranks of a simulated run tell."""
    timeline = simulate(schedule, cuts.stage_times(costs, edges, schedule, paces))
    return [
        rank_times([event for event in timeline.events if event.rank == rank], rank, rank)
        for rank in range(schedule.num_ranks)
    ]


def test_a_rank_that_is_three_times_slower_is_named_and_gets_fewer_layers():
    costs, schedule = [LayerCost(1e-3, 2e-3)] * 12, generate("1f1b", 2, 8)
    paces = [Pace(), Pace(3.0, 3.0)]
    found = propose(costs, [0, 6, 12], schedule, times_of(costs, [0, 6, 12], schedule, paces))
    assert found.proposed == (9,) and found.is_better
    assert found.expected_s == pytest.approx(simulated_s(costs, [0, 9, 12], schedule, paces))
    assert found.step_s == pytest.approx(found.simulated_s) and found.gain > 0.4
    assert found.slowness == pytest.approx((1.0, 3.0))
    assert str(found).startswith(
        "stage 1 takes 3.0 times as long as the others, as rank 1 is 3.0 times slower: cuts=[9] instead of "
        "[6]: "
    )


def test_layers_that_are_three_times_as_costly_are_told_from_a_slow_rank():
    costs = [*[LayerCost(1e-3, 2e-3)] * 6, *[LayerCost(3e-3, 6e-3)] * 6]
    schedule, paces = generate("zb-h1", 2, 8), [Pace(2.0, 2.0)] * 2
    found = propose(costs, [0, 6, 12], schedule, times_of(costs, [0, 6, 12], schedule, paces))
    assert found.proposed == (8,)
    assert "stage 1 takes 3.0 times as long as the others: cuts=[8] instead of [6]: " in str(found)


def test_what_the_simulator_does_not_know_stays_as_it_is():
    costs, schedule = [LayerCost(1e-3, 2e-3)] * 12, generate("1f1b", 2, 8)
    told = times_of(costs, [0, 3, 12], schedule, [Pace()] * 2)
    longer = [one._replace(step_s=one.step_s + 0.1) for one in told]
    found, other = (propose(costs, [0, 3, 12], schedule, its) for its in (told, longer))
    assert found.proposed == other.proposed == (6,)
    assert other.expected_s == pytest.approx(found.expected_s + 0.1)


def test_messages_and_shared_parameters_are_simulated_as_the_run_has_them():
    """The last stage tells the first one the gradients of what they share, which that waits for."""
    shares, alone = LayerCost(1e-3, 2e-3, shared=(3,)), LayerCost(1e-3, 2e-3)
    costs, made, edges = [shares, *[alone] * 4, shares], generate("zb-h1", 2, 4), [0, 2, 6]
    assert cuts.ties_at(costs, edges) == ((0, 1),)
    times = replace(cuts.stage_times(costs, edges, made, [Pace()] * 2), message_s=5e-4)
    timeline = simulate(replace(made, ties=((0, 1),)), times)
    told = [rank_times([x for x in timeline.events if x.rank == rank], rank, rank) for rank in (0, 1)]
    assert [one.message_s for one in told] == pytest.approx([5e-4, 5e-4])
    found = propose(costs, edges, made, told)
    assert found.simulated_s == pytest.approx(found.step_s)
    assert found.simulated_s > simulated_s([alone] * 6, edges, made, [Pace()] * 2, 5e-4)
    takes = [
        replace(cuts.stage_times(costs, cut, made, [Pace()] * 2), message_s=5e-4) for cut in every_cut(6, 2)
    ]
    least_s = min(makespan_s(simulate(replace(made, ties=((0, 1),)), its)) for its in takes)
    assert found.expected_s == pytest.approx(least_s)


def test_cuts_whose_shared_parameters_the_schedule_cannot_have_are_not_tried():
    """Stage 0 would wait for weight gradients of stage 2, which come later on their rank."""
    made = Schedule.parse("0F0 2F0 2I0 0B0 2W0\n1F0 1B0")
    alone, shares = LayerCost(1e-3, 2e-3), LayerCost(1e-3, 2e-3, shared=(0,))
    costs = [shares, alone, shares, alone]
    assert fastest([alone] * 4, made) == [0, 1, 2, 4]
    with pytest.raises(ValueError, match="does not come to its end"):
        simulated_s(costs, [0, 1, 2, 4], made, [Pace()] * 2)
    assert fastest(costs, made) == [0, 1, 3, 4]


def test_a_cut_that_is_good_stays_and_of_replicas_the_slowest_counts():
    costs, schedule = [LayerCost(1e-3, 2e-3)] * 4, generate("1f1b", 2, 8)
    told = times_of(costs, [0, 2, 4], schedule, [Pace()] * 2)
    found = propose(costs, [0, 2, 4], schedule, told)
    assert (found.proposed, found.is_better, found.gain) == ((2,), False, 0.0)
    assert str(found).startswith("no cut is expected to be faster than cuts=[2]: stage ")
    slow = told[1]._replace(rank=3, forward_s=3 * told[1].forward_s, backward_s=3 * told[1].backward_s)
    found = propose(costs, [0, 2, 4], schedule, [*told, told[0]._replace(rank=2), slow])
    assert (found.proposed, found.ranks) == ((3,), (0, 3))


def test_a_ranks_times_are_the_medians_of_its_steps_but_the_first():
    def step(number: int, forward_ms: int) -> list[Event]:
        at = number * 100
        spans = [
            ("forward", forward_ms, 0),
            ("forward", forward_ms, 1),
            ("backward", 10, 0),
            ("backward", 20, 1),
        ]
        events = [
            Event(0, "compute", name, at * 10**6, (at + ms) * 10**6, step=number, leaf=leaf, stage=0)
            for name, ms, leaf in spans
        ]
        return [*events, Event(0, "host", STEP, at * 10**6, (at + 90 + number) * 10**6, step=number)]

    found = rank_times([x for number, ms in enumerate([50, 4, 6, 8]) for x in step(number, ms)], 0, 0)
    assert found == RankTimes(0, 0, 2, pytest.approx(6e-3), pytest.approx(15e-3), 0.0, pytest.approx(0.092))
    with pytest.raises(ValueError, match="none has ended: train a few"):
        rank_times(step(0, 1)[:-1], 0, 0)


# Measured.


class Tall(nn.Module):
    """Draws of torch and of Python, and buffers that forward changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        hidden = nn.functional.dropout(self.norm(self.one(x)), 0.5, training=self.training)
        return x + self.two(hidden)


def entries(net: nn.Module) -> dict[str, Tensor]:
    grads = {f"{name}.grad": p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {**{name: x.clone() for name, x in net.state_dict().items()}, **grads}


def test_measuring_leaves_no_trace():
    net = nn.Sequential(Tall(16), Tall(64), nn.ReLU(inplace=True), nn.Linear(8, 1))
    x = torch.randn(32, 8)
    net(x.clone()).sum().backward()
    net[3].bias.requires_grad_(False)
    before, given = entries(net), x.clone()
    states = torch.get_rng_state(), random.getstate()
    called = []
    net[0].one.weight.register_post_accumulate_grad_hook(called.append)
    costs = measure(net, layers_of(net), x, lambda output: output.square().mean())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    after = entries(net)
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in after)
    assert torch.equal(x, given) and x.grad is None and not called
    assert [p.requires_grad for p in net.parameters()].count(False) == 1
    assert all(cost.forward_s > 0 and cost.backward_s > 0 for cost in costs)


def test_what_is_measured_of_memory_is_what_layers_have():
    net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    net[2].weight = nn.Parameter(torch.zeros(4, 4))
    net[3].bias.requires_grad_(False)
    costs = measure(net, layers_of(net), torch.zeros(16, 8), lambda output: output.sum(), repetitions=1)
    assert [cost.weight_bytes for cost in costs] == [4 * (32 + 4), 0, 4 * (16 + 4), 4 * (8 + 2)]
    assert [cost.trained_bytes for cost in costs] == [4 * (32 + 4), 0, 4 * (16 + 4), 4 * 8]
    assert [cost.output_bytes for cost in costs] == [4 * 16 * 4, 4 * 16 * 4, 4 * 16 * 4, 4]
    assert [cost.saved_bytes for cost in costs] == [
        0,
        0,
        0,
        0,
    ]  # what goes from layer to layer is all there is
    deep = nn.Sequential(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8)), nn.Linear(8, 1))
    costs = measure(deep, layers_of(deep), torch.zeros(16, 8), repetitions=1)
    assert [cost.saved_bytes for cost in costs] == [4 * 16 * 4, 0]
    tied = gpt()
    costs = measure(tied, layers_of(tied), torch.zeros(2, 8, dtype=torch.int64), repetitions=1)
    assert sum(cost.trained_bytes for cost in costs) == sum(p.nbytes for p in tied.parameters())


def test_a_model_without_values_is_measured_too_and_has_none_afterwards():
    """From the meta device, layer by layer: no process has to hold all of it."""
    whole = gpt()
    with torch.device("meta"):
        without = GPT(whole.config)
    parameters = list(without.parameters())
    assert without.head.out.weight is without.embedding.tokens.weight
    state = torch.get_rng_state()
    of_values, found = (measure(net, layers_of(net), EXAMPLE, repetitions=1) for net in (whole, without))
    assert [cost[2:] for cost in found] == [cost[2:] for cost in of_values]  # all but times
    assert all(cost.time_s > 0 for cost in found)
    assert all(p is q and p.is_meta for p, q in zip(without.parameters(), parameters, strict=True))
    assert without.head.out.weight is without.embedding.tokens.weight
    assert torch.equal(torch.get_rng_state(), state)


# On ranks.

EXAMPLE = torch.zeros(2, 8, dtype=torch.int64)


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-v"])
def test_ranks_hold_as_many_bytes_of_activations_as_cuts_by_memory_count_with(
    mesh: Mesh, schedule: str
) -> None:
    """Counted while autograd keeps them: all but what it has no need of, as of an output of a stage."""
    targets = EXAMPLE.flatten()
    model = instep.Pipeline(
        gpt(tied=False),
        mesh,
        schedule,
        G,
        example=EXAMPLE,
        example_loss=lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), targets),
    )
    saved = saved_beside(model.module)
    with saved.watch():
        model.step(lambda x, one: loss(x, 0, one), lambda one: windows(0, one)[:, :-1])
    costs = [cost._replace(weight_bytes=0, trained_bytes=0) for cost in model._cutter.costs]
    edges = [0, *model.placement["cuts"], len(costs)]
    expected = peak_bytes(costs, edges, generate(schedule, 2, G))[mesh.along["pp"].rank]
    headers = 2 * G * HEAD_BYTES  # what is short comes in one piece of memory with what is said of it
    assert 0.95 * expected <= saved.peak <= expected + headers
    model.close()


@world(2, pp=2, dp=1)
def test_ranks_agree_on_what_the_first_one_has_measured(mesh: Mesh) -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)], nn.Linear(2, 200), nn.Linear(200, 2))
    model = instep.Pipeline(net, mesh, "1f1b", 8, cuts="memory", example=torch.zeros(1, 2), moments=0)
    assert model.placement["cuts"] == [4]
    told = mesh.world.group.all_gather_bytes(repr(model._cutter.costs).encode(), "a test")
    assert len(set(told)) == 1 and len(model._cutter.costs) == 5
    model.close()


@world(2, pp=2, dp=1)
def test_a_pipeline_proposes_what_its_own_steps_say(mesh: Mesh) -> None:
    net = gpt(tied=False)
    model = instep.Pipeline(net, mesh, "1f1b", G, cuts=[5], example=EXAMPLE)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model.step(lambda x, one: loss(x, 0, one), lambda one: windows(0, one)[:, :-1])
        optimizer.step()
        optimizer.zero_grad()
    found = model.propose_cuts()
    told = mesh.world.group.all_gather_bytes(repr(found).encode(), "a test")
    assert len(set(told)) == 1
    assert found.cuts == (5,) and found.step_s > 0 and len(found.stage_s) == 2
    model.close()
    tied = instep.Pipeline(gpt(), mesh, "1f1b", G, example=EXAMPLE)
    assert cuts.ties_at(tied._cutter.costs, tied._edges) == tied._tied.ties == ((0, 1),)
    tied.close()
    unmeasured = instep.Pipeline(gpt(), mesh, "1f1b", G)
    with pytest.raises(ValueError, match="have not been measured: make it with example="):
        unmeasured.propose_cuts()
    unmeasured.close()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("by", ["cost", [1]])
def test_a_pipeline_that_is_made_before_there_are_ranks_is_cut_when_they_meet(mesh: Mesh, by: Any) -> None:
    """As under `instep run`; each process has measured for itself, and then the first one's costs count."""
    own = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    model = instep.Pipeline(gpt(), unranked(), own, 2, cuts=by, example=EXAMPLE)
    assert model.placement["cuts"] == []
    said = offered(model)
    said.leave()
    said.join(mesh)
    assert len(model.placement["cuts"]) == 1 and by in ("cost", model.placement["cuts"])
    told = mesh.world.group.all_gather_bytes(repr((model._cutter.costs, model.placement)).encode(), "a test")
    assert len(set(told)) == 1
    model.close()


@world(2, pp=2, dp=1)
def test_cuts_that_cannot_be_are_refused(mesh: Mesh) -> None:
    with pytest.raises(
        ValueError, match="expected one of layers, cost, memory, or a list of the first layers, got 'even'"
    ):
        instep.Pipeline(gpt(), mesh, cuts="even")
    with pytest.raises(ValueError, match="or a list of the first layers, got 2"):
        instep.Pipeline(gpt(), mesh, cuts=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='cuts="cost" measures the layers: pass example='):
        instep.Pipeline(gpt(), mesh, cuts="cost")
    with pytest.raises(ValueError, match="expected an even number"):
        instep.Pipeline([Odd(), nn.Linear(2, 2)], mesh, example=torch.zeros(3, 2))


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) % 2:
            raise ValueError(f"expected an even number of samples, got {len(x)}")
        return x
