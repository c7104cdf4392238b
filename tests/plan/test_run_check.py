"""A run beside its plan: figures that a simulation has made are planned as they were, and others refused."""

from __future__ import annotations

import json
import math
import os
import random
import re
import tempfile
import tomllib
from dataclasses import asdict, replace

import pytest

from instep.cli.exit_codes import DONE, USAGE
from instep.cli.plan import main
from instep.comm.cost import fit, standard_errors
from instep.models.config import GPTConfig
from instep.plan.cluster import Cluster
from instep.plan.memory_estimate import Batch, Device, Placement, largest
from instep.plan.model import gpt
from instep.plan.run_check import RUN_MB, check, run_figures
from instep.plan.step_time import TimePlan, step, step_s
from instep.recipes.text_config import tiny
from instep.run.toml import to_toml
from instep.timeline.breakdown import breakdown, parts
from instep.timeline.bucket_times import bucket_rows

MODEL = GPTConfig(layers=4, width=128, heads=4, context=64)
CPU = Cluster(tflops=0.1, efficiency=1, memory_gb_per_s=5, ranks_per_host=8, local_us=50, local_gb_per_s=1)
PLAN = TimePlan(
    model=gpt(MODEL),
    batch=Batch(global_size=16, micro_size=2),
    parallel=Placement(dp=2, bucket_mb=1),
    device=Device(kind="cpu", context_mb=RUN_MB, snapshots=True),
    cluster=CPU,
)


def run_of(plan: TimePlan) -> tuple[dict, dict]:
    """config.toml and summary.json of a run that does as it is simulated."""
    timeline, parallel = step(plan), plan.parallel
    where = {name: getattr(parallel, name) for name in ("shard", "tp", "ep", "pp", "bucket_mb")}
    summary = {
        "world_size": parallel.world_size,
        "strategy": plan.strategy,
        "parallel": {**where, "shard_stage": parallel.stage, "schedule": ""},
        "memory": {"ranks": [{"gpu_peak": None, "resident_peak": largest(plan).total}]},
        "breakdown": [breakdown([parts(timeline.of(rank, 0))]).to_json() for rank in timeline.ranks],
        "buckets": [asdict(row) for row in bucket_rows([timeline])],
    }
    config = {
        "model": asdict(MODEL),
        "batch": {"global_size": plan.batch.global_size, "micro_size": plan.batch.micro_size},
        "optim": {"name": "adamw"},
        "parallel": {"sequence": False},
    }
    return config, json.loads(json.dumps(summary))


@pytest.fixture(autouse=True)
def idle_cores(monkeypatch):
    """On a host whose cores are all busy, hidden communication would cost compute."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


STRATEGIES = ["naive", "flat", "overlap", "bucketed"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_does_as_simulated_is_as_planned(strategy: str) -> None:
    plan = replace(PLAN, strategy=strategy)
    found = check(run_figures(*run_of(plan)))
    assert found.measured_s == pytest.approx(step_s(step(plan)))
    assert found.planned_s == pytest.approx(found.measured_s, rel=0.05)  # of one bucket latency is not known
    assert found.planned_bytes == found.measured_bytes


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_run_predicts_others_of_the_same_machine(strategy: str, stage: int) -> None:
    base = run_figures(*run_of(replace(PLAN, strategy="overlap")))
    place = Placement(shard=2, stage=stage) if stage else Placement(dp=4, bucket_mb=0.5)
    plan = replace(PLAN, strategy=strategy, parallel=place, batch=Batch(global_size=32, micro_size=2))
    found = check(run_figures(*run_of(plan)), base)
    assert found.planned_s == pytest.approx(found.measured_s, rel=0.02)


@pytest.mark.parametrize("place", [{"tp": 2}, {"pp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_a_run_of_buckets_predicts_layers_over_ranks(place: dict) -> None:
    base = run_figures(*run_of(replace(PLAN, strategy="naive")))
    plan = replace(PLAN, parallel=Placement(**place), strategy="flat")
    found = check(run_figures(*run_of(plan)), base)
    assert found.planned_s == pytest.approx(found.measured_s, rel=0.02)


def test_a_base_that_hid_its_exchanges_counts_what_hiding_cost_once(monkeypatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    busy = replace(PLAN, strategy="overlap", cluster=replace(CPU, busy=1.0))
    hidden = run_figures(*run_of(busy))
    assert check(hidden).planned_s == pytest.approx(check(hidden).measured_s, rel=0.03)
    flat = run_figures(*run_of(replace(busy, strategy="flat")))
    assert check(flat, hidden).planned_s == pytest.approx(check(flat).measured_s, rel=0.03)


def test_a_scripts_step_is_planned_and_its_memory_is_not(tmp_path, capsys) -> None:
    _, summary = run_of(PLAN)
    found = run_figures({}, summary)
    words = check(found).words()
    assert re.fullmatch(r"step [\d.,]+ ms planned, [\d.,]+ ms measured \([+-]\d\.\d%\)", words)
    with pytest.raises(ValueError, match=r"without tp, ep and pp, .* the model of a script is not known"):
        check(found, found)


def test_the_command_reads_runs_and_refuses_what_is_none(tmp_path, capsys) -> None:
    config, summary = run_of(PLAN)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.toml").write_text(toml_of(config))
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary))
    path = str(tmp_path / "a")
    assert main(["check", path, path, "--base", path]) == DONE
    assert "planned ms" in capsys.readouterr().out
    assert main(["check", path, "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)[path]["planned_bytes"] == largest(PLAN).total
    for broken in ({}, {**summary, "breakdown": []}, {"breakdown": summary["breakdown"]}):
        (tmp_path / "a" / "summary.json").write_text(json.dumps(broken))
        assert main(["check", path]) == USAGE
        assert "run" in capsys.readouterr().err


def test_a_cluster_fitted_to_a_run_is_a_file_of_the_next_plan(tmp_path, capsys) -> None:
    config, summary = run_of(replace(PLAN, strategy="overlap"))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.toml").write_text(toml_of(config))
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary))
    assert main(["fit", str(tmp_path / "a")]) == DONE
    text = capsys.readouterr().out
    for name in ("local_us", "local_gb_per_s"):
        low, high = re.search(
            rf"^{name} = .*# 95 %: ([\d.e+-]+) to ([\d.e+-]+)$", text, re.MULTILINE
        ).groups()
        assert float(low) <= getattr(CPU, name) * 1.01 and getattr(CPU, name) * 0.99 <= float(high)
    (tmp_path / "machine.toml").write_text(text)
    found = tomllib.loads(text)["cluster"]
    assert found["tflops"] == pytest.approx(CPU.tflops, rel=0.01)
    assert found["local_us"] == pytest.approx(CPU.local_us, rel=0.01)
    assert found["local_gb_per_s"] == pytest.approx(CPU.local_gb_per_s, rel=0.01)
    assert found["memory_gb_per_s"] == pytest.approx(CPU.memory_gb_per_s, rel=0.01)
    assert main(["step", "gpt2-small", str(tmp_path / "machine.toml"), "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["plan"]["cluster"]["tflops"] == found["tflops"]


def toml_of(tables: dict) -> str:
    topics = (
        "".join(f"{k} = {json.dumps(v)}\n" for k, v in its.items() if v is not None)
        for its in tables.values()
    )
    return "\n".join(f"[{name}]\n{lines}" for name, lines in zip(tables, topics, strict=True))


def test_the_settings_of_a_run_have_all_that_a_plan_reads() -> None:
    text = to_toml(tiny())
    for name in ("[model]", "[batch]", "[optim]", "[parallel]", "micro_size", "sequence"):
        assert name in text


def test_without_a_run_fit_makes_one_and_removes_it(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    flags = [
        "--",
        "--steps",
        "8",
        "--model.layers",
        "1",
        "--model.width",
        "16",
        "--model.heads",
        "1",
        "--model.context",
        "16",
    ]
    assert main(["fit", *flags]) == DONE
    found = tomllib.loads(capsys.readouterr().out)["cluster"]
    assert min(found[name] for name in ("tflops", "memory_gb_per_s", "local_us", "local_gb_per_s")) > 0
    assert not list(tmp_path.glob("instep-*"))
    assert main(["fit", "--", "--model.width", "-1"]) == USAGE
    assert "Traceback" not in capsys.readouterr().err


def test_intervals_of_a_fit_have_the_truth_in_them_about_as_often_as_they_say() -> None:
    rng, alpha, beta, held = random.Random(0), 50e-6, 2e-9, [0, 0]
    sizes = [2048.0 * 1.5**i for i in range(20)]
    for _ in range(400):
        times_s = [(alpha + beta * size) * rng.gauss(1, 0.05) for size in sizes]
        found, error = fit(sizes, times_s), standard_errors(sizes, times_s)
        held[0] += abs(found.latency_s - alpha) < 1.96 * error.latency_s
        held[1] += abs(found.s_per_byte - beta) < 1.96 * error.s_per_byte
    assert all(0.9 < count / 400 < 0.98 for count in held), held
    assert standard_errors(sizes[:2], [1.0, 2.0]).latency_s == math.inf
