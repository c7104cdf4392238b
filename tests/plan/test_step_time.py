"""A simulated step against closed forms, and a slow rank; and how it scales."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from statistics import fmean

import pytest

from instep.cli.exit_codes import DONE
from instep.cli.plan import main
from instep.comm import direct, ring
from instep.comm.cost import collective_cost
from instep.events import PARAMETER_GATHER
from instep.pipeline import closed_forms
from instep.plan.cluster import (
    CLUSTERS,
    AxisGroup,
    Cluster,
    all_gather_s,
    all_reduce_s,
    block_flops,
    message_s,
    output_flops,
    reduce_scatter_s,
)
from instep.plan.memory_estimate import MIB, Batch, Placement, memory
from instep.plan.model import MODELS, Transformer, block
from instep.plan.step_time import TimePlan, sent_on_s, step, step_s, with_ranks
from instep.timeline.breakdown import parts
from instep.timeline.bubbles import bubbles
from instep.timeline.bucket_times import bucket_rows
from instep.timeline.predict import exposed_s, pack

LINK = Cluster(ranks_per_host=1, remote_us=50, remote_gb_per_s=1)
MODEL = Transformer(layers=6, width=512, heads=8, context=512, vocab_size=1000)
FLAT = TimePlan(model=MODEL, cluster=LINK, parallel=Placement(dp=4, bucket_mb=4))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("kind", "module"), [("ordered", direct), ("ring", ring)])
def test_collectives_cost_what_their_steps_count(ranks: int, kind: str, module) -> None:
    cluster = replace(LINK, collectives=kind)
    size, group = 840 * 1000, AxisGroup(1, ranks)
    header = message_s(cluster, group, 0) * (kind == "ordered")
    for ours, schedule, first in (
        (reduce_scatter_s, module.reduce_scatter, header),
        (all_gather_s, module.all_gather, 0.0),
    ):
        counted = collective_cost(schedule, ranks, size).time_s(50e-6, 1e-9)
        assert ours(cluster, group, size) == pytest.approx(counted + first)
    if kind == "ordered":
        halves = reduce_scatter_s(cluster, group, size) + all_gather_s(cluster, group, size)
        assert all_reduce_s(cluster, group, size) == pytest.approx(halves)


def test_neighbours_along_the_last_axes_share_a_host() -> None:
    place = Placement(dp=4, tp=4, pp=2)
    assert Cluster().group(place, "tp") == (4, 1)
    assert Cluster().group(place, "dp") == (2, 2)
    assert Cluster().group(place, "pp") == (1, 2)
    assert Cluster().group(Placement(dp=2, shard=16), "dp", "shard") == (8, 4)


@pytest.mark.parametrize("strategy", ["naive", "flat", "overlap", "bucketed"])
def test_a_strategys_step_is_that_of_its_recursion(strategy: str) -> None:
    plan, rate = replace(FLAT, strategy=strategy), LINK.flops_per_s
    a_block = block_flops(MODEL, 512) / rate
    output = output_flops(MODEL, 512) / rate
    forward, backward = 6 * a_block + output, 2 * (6 * a_block + output)
    tensors = _tensors()  # (bytes, seconds after the begin of backward) in the order of backward
    sizes = [size for size, _ in tensors]
    whole = {"naive": sizes, "overlap": sizes, "flat": [sum(sizes)], "bucketed": pack(sizes, 4 * MIB)}[
        strategy
    ]
    ready, sent = [], 0
    for size in whole:
        sent += size
        done = [at for i, (_, at) in enumerate(tensors) if sum(sizes[: i + 1]) <= sent]
        ready.append(done[-1] if strategy in ("overlap", "bucketed") else backward)
    costs = [all_reduce_s(LINK, AxisGroup(1, 4), size) for size in whole]
    update = 4 * (1 + 2 + 4) * MODEL.num_parameters / (LINK.memory_gb_per_s * 1e9)
    expected = forward + backward + exposed_s(ready, costs, backward) + update
    assert step_s(step(plan)) == pytest.approx(expected, rel=1e-5)


def _tensors() -> list[tuple[int, float]]:
    """Bytes of every gradient, and when backward has made it: evenly within its block."""
    h, f, vocab = 512, 2048, 1000
    a_block = [h, f, f * h, h * f, h, 3 * h, h * h, 3 * h * h, h, h, h, h]
    a_block_s, output_s = (
        2 * x / LINK.flops_per_s for x in (block_flops(MODEL, 512), output_flops(MODEL, 512))
    )
    parts = [([2 * h], output_s), *[(a_block, a_block_s)] * 6, ([512 * h, vocab * h], 0.0)]
    found, begin = [], 0.0
    for sizes, seconds in parts:
        for i, size in enumerate(sizes):
            found.append((4 * size, begin + seconds * sum(sizes[: i + 1]) / sum(sizes)))
        begin += seconds
    return found


def test_a_slow_rank_makes_the_others_wait_for_it() -> None:
    plan = replace(FLAT, cluster=replace(LINK, tflops=1), strategy="flat")
    timeline = step(replace(plan, slow_by=1.5))
    usual, slow = (parts(timeline.of(rank, 0)) for rank in timeline.ranks)
    assert slow.compute == pytest.approx(1.5 * usual.compute) and not slow.waiting
    assert usual.waiting[1] > 0 and usual.wall == slow.wall
    assert {found.peer for found in bubbles(timeline.of(0, 0)) if found.is_slowness} == {1}
    assert [row.wait_ms > 0 for row in bucket_rows([timeline])] == [True]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_send_what_the_paper_counts(stage: int) -> None:
    plan = replace(FLAT, parallel=Placement(shard=4, stage=stage))
    events = [event for event in step(plan).events if event.lane == "communication"]
    psi = 4 * MODEL.num_parameters
    exchanged = sum(event.bytes for event in events if event.name == "exchange")
    gathered = sum(event.bytes for event in events if event.name == PARAMETER_GATHER)
    # An all-reduce and a gather of weights; a scatter and a gather; a scatter and two gathers.
    assert exchanged == psi and gathered == {1: psi, 2: psi, 3: 2 * psi}[stage]


def test_parts_of_a_step_sum_to_its_time_in_every_placement() -> None:
    for place in (Placement(dp=2, tp=2), Placement(shard=4, stage=3), Placement(pp=3), Placement(dp=2, pp=2)):
        plan = TimePlan(model=MODEL, parallel=place, batch=Batch(global_size=12))
        for rank in (timeline := step(plan)).ranks:
            row = parts(timeline.of(rank, 0))
            assert sum(row.totals().values()) == pytest.approx(row.wall, rel=1e-6)
            assert row.unattributed == pytest.approx(0, abs=1e-6) and rank < place.world_size


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_pipelines_step_is_that_of_the_closed_form(schedule: str) -> None:
    model = replace(MODEL, layers=8, vocab_size=0)
    fast = Cluster(memory_gb_per_s=1e9, local_us=0, local_gb_per_s=1e9)
    plan = TimePlan(
        model=model, cluster=fast, batch=Batch(global_size=8), parallel=Placement(pp=4, schedule=schedule)
    )
    each = 2 * block_flops(model, 512) / fast.flops_per_s
    expected = closed_forms.cost_s(
        schedule, 4, 8, forward_s=each, input_gradient_s=each, weight_gradient_s=each
    )
    assert step_s(step(plan)) == pytest.approx(expected, rel=0.01)


def test_a_pipeline_is_as_slow_as_its_longest_stage_and_cuts_say_which_that_is() -> None:
    model = replace(MODEL, vocab_size=0)
    fast = Cluster(memory_gb_per_s=1e9, local_us=0, local_gb_per_s=1e9)
    plan = TimePlan(model=model, cluster=fast, batch=Batch(global_size=8), parallel=Placement(pp=2))
    block_s = 3 * block_flops(model, 512) / fast.flops_per_s
    for cuts, longest in (((), 3), ((2,), 4), ((1,), 5)):
        cut = replace(plan, parallel=replace(plan.parallel, cuts=cuts))
        assert step_s(step(cut)) == pytest.approx((7 * longest + 6) * block_s, rel=0.01)
        assert [rank.of("parameters") for rank in memory(cut)] == [
            4 * blocks * sum(one.size for one in block(model)) for blocks in (6 - longest, longest)
        ]


def test_a_stage_sends_its_slice_of_a_sequence() -> None:
    plan = TimePlan(model=MODEL, cluster=LINK, parallel=Placement(pp=2, tp=4))
    sliced = replace(plan, parallel=replace(plan.parallel, sequence=True))
    latency_s = LINK.remote.latency_s
    assert sent_on_s(plan) - latency_s == pytest.approx(4 * (sent_on_s(sliced) - latency_s))


def test_sixteen_thousand_ranks_take_no_time() -> None:
    began = time.perf_counter()
    plan = TimePlan(model=MODELS["llama3-405b"], parallel=Placement(dp=128, tp=8, pp=16), recipe="mixed",
                    batch=Batch(global_size=8192), cluster=CLUSTERS["h100"], slow_by=1.1)  # fmt: skip
    assert len(step(plan).ranks) == 16
    huge = replace(plan, parallel=Placement(dp=100_000), batch=Batch())
    assert step(huge).ranks == [0, 1]
    assert time.perf_counter() - began < 10


def test_weak_scaling_keeps_the_work_per_rank_and_strong_scaling_the_batch() -> None:
    plan = replace(FLAT, batch=Batch(global_size=64))
    assert with_ranks(plan, 16, weak=True).batch.global_size == 256
    assert with_ranks(plan, 16, weak=False).micro_batches == 4
    sharded = replace(plan, parallel=Placement(shard=4, stage=3))
    assert with_ranks(sharded, 8, weak=False).parallel.shard == 8
    hybrid = replace(plan, parallel=Placement(dp=2, shard=4, stage=3))
    assert with_ranks(hybrid, 32, weak=False).parallel.dp == 8
    with pytest.raises(ValueError, match="expected a positive multiple of 4"):
        with_ranks(hybrid, 6, weak=False)


def test_experts_and_busy_processors_cost_time() -> None:
    model = replace(MODEL, experts=8)
    plan = TimePlan(model=model, parallel=Placement(ep=4))
    one = step_s(step(replace(plan, parallel=Placement())))
    assert step_s(step(plan)) < one < 4 * step_s(step(plan))
    assert step_s(step(replace(plan, expert_load=2.0))) > step_s(step(plan))
    busy = replace(FLAT, cluster=replace(LINK, busy=1.0, tflops=1))
    assert step_s(step(busy)) > step_s(step(replace(busy, cluster=replace(LINK, tflops=1))))


def test_the_command_prints_a_step_and_a_table_of_ranks(capsys) -> None:
    assert (
        main(
            [
                "step",
                "llama3-8b",
                "h100",
                "--parallel.shard",
                "64",
                "--parallel.stage",
                "3",
                "--recipe",
                "mixed",
                "--json",
            ]
        )
        == DONE
    )
    found = json.loads(capsys.readouterr().out)["steps"][0]
    assert found["ranks"] == 64 and found["fits"] and 0.3 < found["model_flops_utilisation"] < 0.55
    assert main(["scale", "gpt2-xl", "a100", "--ranks", "1", "8", "64", "--batch.global-size", "512"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    efficiencies = [float(line.split()[6].rstrip("%")) for line in lines[2:]]
    assert efficiencies == sorted(efficiencies, reverse=True) and efficiencies[0] == 100
    assert fmean(efficiencies) > 50
