"""``instep plan buckets``: the steps of a simulated run with other buckets, and those of a model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from instep.cli.exit_codes import DONE, USAGE
from instep.cli.plan import main
from instep.models.config import GPTConfig
from instep.plan.cluster import CLUSTERS, Cluster
from instep.plan.memory_estimate import Batch, Placement
from instep.plan.model import MODELS, gpt
from instep.plan.step_time import TimePlan, step, step_s
from instep.timeline.analysis import exchanges_of
from instep.timeline.breakdown import breakdown, parts
from instep.timeline.bucket_times import bucket_rows
from instep.timeline.run_setting import RunSetting

LINK = Cluster(tflops=0.4, efficiency=1, ranks_per_host=1, remote_us=100, remote_gb_per_s=0.5)
PLAN = TimePlan(
    model=gpt(GPTConfig(layers=8, width=256, heads=4, context=64)),
    batch=Batch(global_size=8, micro_size=2),
    parallel=Placement(dp=2),
    cluster=LINK,
    strategy="overlap",
)


def summary_of(plan: TimePlan) -> dict:
    """The figures of a run that does as it is simulated."""
    timeline = step(plan)
    last = max((x for x in timeline.events if x.name == "backward"), key=lambda x: x.end_ns)
    setting = RunSetting(plan.strategy, "gloo", 2, 1, 2, threads=1, cores=8, bucket_mb=0.0, num_leaves=4)
    figures = {
        "breakdown": [breakdown([parts(timeline.of(rank, 0))] * 4).to_json() for rank in timeline.ranks],
        "buckets": [asdict(row) for row in bucket_rows([timeline])],
        "slow_rank": None,
        "setting": asdict(setting),
        "backward_s": last.duration_s,
    }
    return json.loads(json.dumps(figures))


def test_the_steps_with_other_buckets_are_those_that_a_simulation_has() -> None:
    exchanges = exchanges_of(summary_of(PLAN))
    assert exchanges is not None
    own, *others = exchanges.bucket_plans()
    assert own.step_s == pytest.approx(step_s(step(PLAN)))
    assert [one.strategy for one in others[:3]] == ["naive", "flat", "bucketed"]
    for one in others:
        cut = replace(PLAN.parallel, bucket_mb=one.cap_mb or 25)
        simulated = step_s(step(replace(PLAN, strategy=one.strategy, parallel=cut)))
        assert one.step_s == pytest.approx(simulated, rel=0.01)


def rows_of(out: str) -> list[dict]:
    return json.loads(out)["buckets"]


def test_the_best_of_a_model_is_marked(capsys) -> None:
    words = ["buckets", "gpt2-small", "h100", "--parallel.dp", "8"]
    assert main([*words, "--json"]) == DONE
    rows = rows_of(capsys.readouterr().out)
    plan = TimePlan(
        model=MODELS["gpt2-small"], cluster=CLUSTERS["h100"], parallel=Placement(dp=8, bucket_mb=4)
    )
    (four,) = [row for row in rows if row["cap_mb"] == 4]
    assert four["step_s"] == step_s(step(plan))
    assert main(words) == DONE
    (best,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith("best")]
    assert float(best[-2]) == pytest.approx(1e3 * min(row["step_s"] for row in rows), abs=0.01)


def test_a_run_is_a_folder(tmp_path: Path, capsys) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summary_of(PLAN)))
    assert main(["buckets", str(tmp_path)]) == DONE
    first, _, own, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("a bucket takes ") and own.split()[0] == "overlap" and "this run" in own
    assert main(["buckets", str(tmp_path), "--json"]) == DONE
    assert rows_of(capsys.readouterr().out)[0]["strategy"] == "overlap"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"setting": None}, "expected a run whose ranks exchange buckets"),
        ({"buckets": []}, "expected a run whose ranks exchange buckets"),
        ({"buckets": [{}]}, "the figures are not those of a run"),
    ],
)
def test_runs_without_buckets_are_refused(change: dict, says: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(summary_of(PLAN) | change))
    assert main(["buckets", str(tmp_path)]) == USAGE
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    ["", "--parallel.shard 8 --parallel.stage 3", "--parallel.dp 2 --parallel.pp 2"],
    ids=["one rank", "stage 3", "a pipeline"],
)
def test_models_without_buckets_are_refused(flags: str, capsys) -> None:
    assert main(["buckets", "gpt2-small", *flags.split()]) == USAGE
    assert "no buckets to choose: pass --parallel.dp" in capsys.readouterr().err
