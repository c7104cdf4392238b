"""``instep bench memory-savers``: rows, notes and the chart from made-up figures, and once the real thing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from instep.bench.memory_savers import PLAIN, SAVERS, chart_rows, draw, loss_row, notes, row
from instep.bench.steps import StepResults
from instep.bench.steps_rank import measure_memory
from instep.bench.tables import short
from instep.bench.workloads import Workload
from instep.bench.worlds import World
from tests.launched.command import instep
from tests.world import world

WORKLOAD = Workload("memory-savers", 200_000, 8, "memory", tokens=64)
STEPS = {
    "neither": [1.0, 2.0, 4.0],
    "checkpoint": [1.5, 2.5, 5.0],
    "bf16": [0.5, 1.0, 2.0],
    "both": [2.0] * 3,
}


@pytest.fixture
def results() -> StepResults:
    """Of two ranks, the second of which is always faster."""
    slow = {SAVERS[name].name: {"step_s": steps} for name, steps in STEPS.items()}
    fast = {SAVERS[name].name: {"step_s": [s / 2 for s in steps]} for name, steps in STEPS.items()}
    return StepResults([slow, fast])


def rows_of(results: StepResults) -> list[dict]:
    memory = {"activations(MB)": 8.0, "peak(MB)": 400.0}
    return [row(name, results, memory, WORKLOAD) for name in SAVERS]


def test_every_way_has_a_name_of_its_own() -> None:
    assert len({one.name for one in SAVERS.values()}) == len(SAVERS)
    assert SAVERS["neither"] == PLAIN


def test_steps_are_compared_round_by_round(results: StepResults) -> None:
    rows = {found["way"]: found for found in rows_of(results)}
    assert [rows[name]["step(ms)"] for name in SAVERS] == [2000, 2500, 1000, 2000]
    assert [rows[name]["x neither"] for name in SAVERS] == [1.0, 1.25, 0.5, 1.0]
    assert short([rows["checkpoint"]])[0]["x neither"] == "1.25 (1.25 to 1.38)"


def test_a_block_is_computed_again_where_it_is_not_kept(results: StepResults) -> None:
    rows = {found["way"]: found for found in rows_of(results)}
    assert [rows[name]["a block again(MB)"] > 0 for name in SAVERS] == [False, True, False, True]
    assert rows["checkpoint"]["formula(MB)"] < rows["neither"]["formula(MB)"] / 4
    assert rows["bf16"]["formula(MB)"] < rows["neither"]["formula(MB)"]


def test_the_chart_shows_multiples_of_neither(results: StepResults, tmp_path: Path) -> None:
    rows = rows_of(results)
    bars = chart_rows(rows)
    assert [bar["way"] for bar in bars] == [*SAVERS] * 3
    assert [bar["value"] for bar in bars] == [1.0] * 9 + [
        1.25,
        0.5,
        1.0,
    ]  # as much memory was made up for all
    assert ["low" in bar for bar in bars] == [False] * 9 + [True] * 3
    found = {"rows": rows, "text": WORKLOAD.text, "ranks": 2}
    assert [path.suffix for path in draw(found, tmp_path / "chart.svg")] == [".svg", ".png"]


def test_a_loss_is_compared_with_that_of_the_same_seed() -> None:
    plain, bf16 = {"held_out_loss_first": 5.5, "held_out_loss": 2.0}, {"held_out_loss": 2.5}
    rows = [loss_row(seed, plain, bf16) for seed in range(2)]
    assert rows[1] == {"seed": 1, "before": 5.5, "float32": 2.0, "bf16": 2.5, "bf16 - float32": 0.5}
    runs = {"rows": rows, "steps": 9, "state_sha256": {"neither": "a" * 64, "bf16": "b" * 64}}
    said = notes({"text": "", "ranks": 2, "samples": 3, "runs": runs})
    assert "after 9 steps of instep train; bf16 - float32: +0.5000 (median), seeds alone: 0.0000" in said[2]
    assert "same bits" in said[3]


@pytest.mark.slow
@world(2, by="process")
def test_what_is_computed_again_is_not_kept(mesh) -> None:
    kept = {}
    for name, one in SAVERS.items():
        task = {"workload": asdict(WORKLOAD), "variant": asdict(one)}
        found = measure_memory(World(), task)
        kept[name] = found["activations"]
        said = (
            row(
                name,
                StepResults([{each.name: {"step_s": [1.0]} for each in SAVERS.values()}]),
                {"activations(MB)": None, "peak(MB)": None},
                WORKLOAD,
            )["formula(MB)"]
            * 1e6
        )
        assert said == pytest.approx(kept[name], rel=0.05), name
    assert kept["checkpoint"] < kept["neither"] / 3
    assert kept["both"] < kept["bf16"] < kept["neither"]


@pytest.mark.slow
def test_the_command_writes_a_row_per_way(tmp_path: Path) -> None:
    small = "--params 200K --batch 2 --context 16 --samples 2 --steps 3 --seeds 1"
    files = "--json a.json --csv a.csv --chart a.svg"
    ended = instep("bench", "memory-savers", *small.split(), *files.split(), cwd=tmp_path)
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "a.json").read_text())
    assert [each["way"] for each in found["rows"]] == list(SAVERS)
    assert len(set(found["runs"]["state_sha256"].values())) == 2
    assert "the runs end with the same bits" in ended.out
    assert (tmp_path / "a.csv").exists() and (tmp_path / "a.svg").exists() and (tmp_path / "a.png").exists()
