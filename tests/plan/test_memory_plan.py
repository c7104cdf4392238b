"""The memory of a rank, line by line: a model of products, pipelines."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from instep.cli.exit_codes import DONE
from instep.cli.plan import main
from instep.models.config import GPTConfig, num_parameters
from instep.pipeline.schedules import NAMES
from instep.plan.memory_estimate import (
    MIB,
    Batch,
    Device,
    MemoryPlan,
    Placement,
    largest,
    memory,
    smallest_shard,
)
from instep.plan.memory_table import text
from instep.plan.model import MODELS, Transformer, gpt, kept_by_block

H, F, LAYERS = 16384, 53248, 126
N = 2 * LAYERS * H * F
FFN = MemoryPlan(
    model=Transformer(
        layers=LAYERS, width=H, ff_width=F, heads=0, vocab_size=0, activation="none", norm="none", bias=False
    ),
    recipe="bf16-compute",
)
FFN_FILE = f"""
recipe: bf16-compute
model: {{layers: {LAYERS}, width: {H}, ff_width: {F}, heads: 0, vocab_size: 0, activation: none, norm: none,
  bias: false}}
"""


def test_a_model_of_products_alone_has_the_numbers_of_its_formulas() -> None:
    assert FFN.model.num_parameters == N
    found = largest(FFN)
    assert found.of("parameters") == found.of("gradients") == 4 * N == found.of("optimizer") / 2
    assert round(4 * N / 2**30, 1) == 819.0 and round(4 * N / 1e9, 1) == 879.4
    assert found.of("activations") == 2 * LAYERS * (H + F) * FFN.tokens
    assert [math.ceil(found.of(part) / 80e9) for part in ("parameters", "gradients", "optimizer")] == [
        11,
        11,
        22,
    ]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_smallest_number_of_shards_is_that_of_the_inequality(share: float) -> None:
    plan = replace(FFN, parallel=Placement(sharded_activations=share), batch=Batch(micro_size=2))
    kept = 2 * LAYERS * (H + F) * plan.tokens
    block = 2 * H * F
    constant = 1343e6 + 64 * MIB + 256 * MIB  # context, cuBLAS, one communicator
    constant += 2 * block * 2 + 2 * block * 4 + (1 - share) * kept  # gathered, gradients on their way
    expected = math.ceil((16 * N + share * kept) / (80e9 - constant))
    assert smallest_shard(plan) == expected


def test_a_file_in_yaml_or_toml_prints_the_arithmetic(tmp_path, capsys) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "ffn.yaml").write_text(FFN_FILE)
    assert main(["memory", str(tmp_path / "ffn.yaml")]) == DONE
    out = capsys.readouterr().out
    assert "model: 219,848,638,464 parameters, 126 blocks" in out
    line = next(line for line in out.splitlines() if line.startswith("  parameters"))
    assert line.split()[1:5] == ["219,848,638,464", "parameters", "x", "4"]
    assert line.split()[-4:] == ["879,394,553,856", "879.39", "819.00", "11"]
    assert "smallest number of ranks that fits 80 GB: 90" in out
    (tmp_path / "tiny.toml").write_text(
        "[model]\nlayers = 2\nwidth = 64\nheads = 2\n[device]\nmemory_gb = 8\n"
    )
    assert main(["memory", str(tmp_path / "tiny.toml"), "--json", "--model.layers", "3"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["plan"]["model"]["layers"] == 3
    assert found["stages"][0]["total"] == sum(line["num_bytes"] for line in found["stages"][0]["lines"])


def test_a_gpt_has_the_parameters_that_training_counts() -> None:
    for changes in ({}, {"tied": False}, {"experts": 4}, {"ff_width": 100}):
        config = GPTConfig(layers=3, width=64, heads=4, context=32, **changes)
        assert gpt(config).num_parameters == num_parameters(config)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt2-small", 0.12444), ("gpt2-xl", 1.558), ("gpt3-175b", 174.6),
     ("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.85)],
)  # fmt: skip
def test_named_models_have_their_published_size(name: str, billions: float) -> None:
    assert MODELS[name].num_parameters / 1e9 == pytest.approx(billions, rel=0.001)


@pytest.mark.parametrize("schedule", [name for name in NAMES if name != "naive"])
def test_a_pipelines_ranks_hold_what_its_schedule_has_under_way(schedule: str) -> None:
    p, m, layers = 4, 8, 16
    model = Transformer(layers=layers, width=64, heads=4, context=64)
    plan = MemoryPlan(
        model=model, batch=Batch(global_size=m), parallel=Placement(pp=p, schedule=schedule, declared=False)
    )
    a_block = sum(one.size for one in kept_by_block(model, 64)) * 4
    first = memory(plan)[0].lines
    held = next(line.num_bytes for line in first if line.part == "activations") / (a_block * layers / p)
    most = {"gpipe": m, "1f1b": p, "interleaved": 5.5, "zb-h1": p, "zb-h2": 2 * p - 1, "zb-v": p}[schedule]
    assert held == most


def test_accumulation_costs_the_partial_sums_of_a_declared_step() -> None:
    for count, sums in ((1, 0), (2, 0), (4, 1), (8, 2), (5, 2)):
        plan = MemoryPlan(batch=Batch(global_size=count))
        assert largest(plan).of("partial sums") == sums * 4 * plan.model.num_parameters
        assert not largest(replace(plan, parallel=Placement(declared=False))).of("partial sums")


def test_a_global_batch_is_made_of_ranks_or_of_accumulation() -> None:
    lines = list(text(replace(FFN, batch=Batch(global_size=512))))
    # Of the divisors of 512 from 90 on; accumulation has partial sums, and each rank a shard of them.
    ways = [line.partition(" ranks")[0].split()[-1] for line in lines if line.startswith("global batch 512")]
    assert ways == ["128", "256", "512"]


def test_a_device_that_no_sharding_helps_says_what_does(capsys) -> None:
    plan = MemoryPlan(model=MODELS["llama3-405b"], device=Device(memory_gb=40))
    lines = list(text(plan))
    assert any("no number of ranks makes it fit" in line and "--model.checkpoint" in line for line in lines)
