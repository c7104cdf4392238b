"""The search: its step times are those of the simulation, the first row is the fastest, failures cost."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from instep.cli.exit_codes import DONE
from instep.cli.plan import main
from instep.plan.cluster import CLUSTERS, Cluster
from instep.plan.memory_estimate import Batch, Device, Placement
from instep.plan.model import MODELS, Transformer
from instep.plan.search import SearchPlan, checkpoint_every_s, goodput, search, step_parts, text
from instep.plan.step_time import TimePlan, step, step_s

MODEL = Transformer(layers=8, width=512, heads=8, context=512, vocab_size=1000)
PLACES = [
    Placement(dp=4),
    Placement(shard=4, stage=1),
    Placement(shard=2, dp=2, stage=3),
    Placement(tp=2, dp=2),
    Placement(pp=4),
    Placement(pp=2, dp=2, schedule="interleaved", chunks=2),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recomputed", [False, True])
def test_its_step_is_the_simulated_one(place: Placement, recomputed: bool) -> None:
    model = replace(MODEL, checkpoint=recomputed)
    plan = TimePlan(model=model, parallel=place, batch=Batch(global_size=32), cluster=Cluster(tflops=10))
    assert sum(step_parts(plan).values()) == pytest.approx(step_s(step(plan)), rel=0.03)


def test_a_thousand_gpus_and_70_billion_parameters_take_seconds() -> None:
    plan = SearchPlan(model=MODELS["llama3-70b"], cluster=CLUSTERS["h100"], ranks=1024, recipe="mixed",
                      batch=Batch(global_size=2048))  # fmt: skip
    began = time.process_time()
    found = search(plan)
    assert time.process_time() - began < 5
    fitting = [one for one in found if one.parts_s]
    assert len(fitting) > 50 and all(one.num_bytes <= 80e9 for one in fitting)
    assert all(one.num_bytes > 80e9 for one in found[len(fitting) :])
    assert [one.step_s for one in fitting] == sorted(one.step_s for one in fitting)
    assert all(one.plan.parallel.world_size == 1024 for one in found)
    assert {one.plan.parallel.stage for one in found} == {0, 1, 3}


def test_the_lines_name_the_part_that_makes_a_placement_slower() -> None:
    plan = SearchPlan(model=MODEL, ranks=8, batch=Batch(global_size=64), rows=30, tokens_to_train=1e9)
    lines = list(text(plan))
    assert lines[0].endswith("fit 80 GB") and lines[2].split()[-1] == "0.0%"
    causes = {line.partition("%")[2].rpartition("%")[2].strip() for line in lines[3:33]}
    assert causes & {"pipeline bubble", "exposed communication", "recomputation"}
    assert lines[-1].startswith("1e+09 tokens: ")


def test_failures_cost_a_checkpoint_interval_or_half_a_step() -> None:
    plan = SearchPlan(ranks=1000, rank_mtbf_years=1, checkpoint_s=10, restart_s=0, batch=Batch(global_size=8))
    mtbf = 365 * 86_400 / 1000
    every = math.sqrt(2 * 10 * mtbf)
    assert checkpoint_every_s(plan) == pytest.approx(every)
    assert goodput(plan, 4.0, in_memory=False) == pytest.approx((1 - every / 2 / mtbf) * every / (every + 10))
    assert goodput(plan, 4.0, in_memory=True) == pytest.approx(1 - 2 / mtbf)
    # PyTorch's torchft: a failure every 60 s, 10.9 s per step, 82.3 % of the steps were committed.
    often = replace(plan, rank_mtbf_years=60 * 1000 / (365 * 86_400), checkpoint_s=0, restart_s=10.9 / 2)
    assert goodput(often, 10.9, in_memory=True) == pytest.approx(0.823, abs=0.01)


def test_a_model_that_fits_nowhere_says_what_would() -> None:
    plan = SearchPlan(
        model=MODELS["llama3-405b"], ranks=8, batch=Batch(global_size=8), device=Device(memory_gb=80)
    )
    with pytest.raises(
        ValueError, match=r"none of \d+ placements fits 80 GB: the smallest, .* pass more --ranks"
    ):
        list(text(plan))


def test_the_command_prints_json(capsys) -> None:
    assert main(["search", "gpt2-xl", "a100", "--ranks", "8", "--batch.global-size", "64", "--json"]) == DONE
    assert '"placements"' in capsys.readouterr().out
