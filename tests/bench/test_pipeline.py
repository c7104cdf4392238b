"""``instep bench pipeline``: from what ranks record to rows, and once from the command line to its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.bench.options import PipelineOptions
from instep.bench.pipeline import (
    MeasuredStep,
    PipelineResults,
    PipelineSteps,
    draw,
    is_crowded,
    run,
    short_row,
)
from instep.bench.pipeline_rank import PipelineLoop, count_kept, variant
from instep.events import PIPELINE, Timeline
from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.pipeline.actions import Action
from instep.pipeline.check import peak_activations
from instep.pipeline.schedules import NAMES, generate
from instep.pipeline.simulate import StageTimes, makespan_s, simulate
from tests.launched.command import instep
from tests.world import world

FORWARD_S, INPUT_GRADIENT_S, WEIGHT_GRADIENT_S = [0.010, 0.012], [0.008, 0.009], [0.007, 0.010]
MESSAGE_S = 0.001
TINY = GPTConfig(vocab_size=16, context=16, layers=4, width=32, heads=2, tied=False)


def told(timeline: Timeline, rank: int) -> Any:
    """What a rank tells of a step: its computations and waits, as JSON."""
    events = [one for one in timeline.of(rank, 0) if one.lane == "compute" or one.name == PIPELINE]
    return json.loads(json.dumps(events))


def recorded(schedule: str, m: int, *, late_s: float = 0.0, steps: int = 3) -> list[dict[str, Any]]:
    """What two ranks record of steps that go as simulated; each later one ``late_s`` slower in all."""
    made, name = generate(schedule, 2, m), variant(schedule, m)
    turns: list[list[dict[str, Any]]] = [[], []]
    for number in range(steps):
        later = number * late_s
        times = StageTimes(
            [x + later for x in FORWARD_S],
            [x + later for x in INPUT_GRADIENT_S],
            WEIGHT_GRADIENT_S,
            MESSAGE_S,
        )
        timeline = simulate(made, times)
        for rank, turn in enumerate(turns):
            turn.append({"step_s": 0.5 + 0.1 * rank + number, "events": told(timeline, rank)})
    peaks = peak_activations(made)
    kept = [{"bytes": 1e6 * peak, "micro_batches": peak} for peak in peaks]
    return [
        {"steps": {name: turn}, "kept": {name: of_rank}} for turn, of_rank in zip(turns, kept, strict=True)
    ]


def steps_of(schedule: str, m: int, **told: Any) -> PipelineSteps:
    return PipelineSteps.of(generate(schedule, 2, m), recorded(schedule, m, **told))


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zb-h1"])
def test_what_went_as_simulated_is_simulated_as_it_went(schedule: str) -> None:
    row = steps_of(schedule, 4).row()
    assert row["x simulated"] == pytest.approx(1, abs=1e-6)
    assert row["x replayed"] == pytest.approx(1, abs=1e-6)
    assert row["message(ms)"] == pytest.approx(1, abs=1e-4)
    assert row["around(ms)"] == pytest.approx(0, abs=1e-4)


def test_each_step_is_simulated_with_its_own_times() -> None:
    found = steps_of("1f1b", 4, late_s=0.002)
    assert found.steps[2].times.forward_s == pytest.approx([0.014, 0.016])
    # Of a backward in one part, input gradients and weight gradients are not known.
    assert found.steps[2].times.input_gradient_s == pytest.approx([0.019, 0.023])
    assert found.steps[2].times.weight_gradient_s == [0.0, 0.0]
    row = found.row()
    assert [row[f"x simulated{part}"] for part in ("", " q25", " q75")] == pytest.approx([1, 1, 1], abs=1e-6)
    assert (row["forward(ms)"], row["backward(ms)"]) == pytest.approx((13, 19))
    assert row["weight gradient(ms)"] is None
    assert steps_of("zb-h1", 4).row()["weight gradient(ms)"] == pytest.approx(8.5)


def test_one_micro_batch_waits_for_half_of_the_step_and_more_of_them_for_less() -> None:
    formula = [steps_of("gpipe", m).by_formula() for m in (1, 2, 4, 8)]
    assert formula == pytest.approx([1 / 2, 1 / 3, 1 / 5, 1 / 9])
    assert steps_of("zb-h2", 2).by_formula() is None  # it has no room for its forwards
    assert steps_of("zb-h2", 3).by_formula() == pytest.approx(0)


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    row = steps_of("gpipe", 2).row()
    assert (row["q25(ms)"], row["step(ms)"], row["q75(ms)"]) == pytest.approx((1100, 1600, 2100))


def test_the_first_stage_has_no_input_gradient_and_waits_all_the_same() -> None:
    made = generate("zb-h1", 2, 2)
    times = StageTimes([0.010, 0.010], [0.0, 0.010], [0.020, 0.010], 0.003)
    timeline = simulate(made, times)
    found = MeasuredStep.of(made, [{"step_s": 1.0, "events": told(timeline, rank)} for rank in (0, 1)])
    assert found.message_s == pytest.approx(0.003)
    assert found.times.input_gradient_s == pytest.approx([0.0, 0.010])
    assert found.times.weight_gradient_s == pytest.approx([0.020, 0.010])
    assert makespan_s(found.simulated) == pytest.approx(makespan_s(timeline))


def test_a_replay_has_the_time_of_each_action_and_a_simulation_their_mean() -> None:
    made = generate("1f1b", 2, 4)
    uneven = {Action(0, "F", 1): 0.050, Action(1, "B", 2): 0.070}
    timeline = simulate(made, StageTimes(0.010, 0.010, 0.010, 0.003, single=uneven))
    found = MeasuredStep.of(made, [{"step_s": 1.0, "events": told(timeline, rank)} for rank in (0, 1)])
    assert makespan_s(found.replayed) == pytest.approx(makespan_s(timeline))
    assert makespan_s(found.simulated) < makespan_s(timeline) - 0.005


def results(options: PipelineOptions, schedules: Sequence[str] = ("gpipe", "1f1b")) -> PipelineResults:
    return PipelineResults(options, [steps_of(name, m) for m in options.counts for name in schedules])


def test_rows_begin_with_one_micro_batch(tmp_path: Path) -> None:
    options = PipelineOptions(schedules=("gpipe,1f1b",), micro_batches=("8,1", "2"))
    found = results(options)
    assert [row["micro-batches"] for row in found.rows] == [1, 1, 2, 2, 8, 8]
    assert short_row(found.rows[0])["bubble"] == "51.7%"  # of 58 ms a rank computes 28
    assert found.rows[-1]["kept"] == found.rows[-1]["kept by schedule"] == "2, 1"
    files = {path.name for path in draw(found, tmp_path / "a.svg")}
    assert files == {"a.svg", "a.png", "a-steps.svg", "a-steps.png"}


def test_more_ranks_than_cores_show_no_bubbles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    options = PipelineOptions(chart=tmp_path / "a.svg")
    assert is_crowded(options)
    found = results(options)
    assert "bubble" not in found.rows[0] and "kept" in found.rows[0]
    assert "2 ranks take turns on 1 cores" in found.notes[-1]
    with pytest.raises(ValueError, match="--chart draws bubbles, which 2 ranks on 1 cores do not show"):
        run(options)


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", NAMES)
def test_ranks_keep_what_their_schedule_says(mesh: Mesh, schedule: str) -> None:

    windows = torch.zeros(2, TINY.context + 1, dtype=torch.int64)
    loop = PipelineLoop(mesh, TINY, schedule, windows)
    made = generate(schedule, 2, 4)
    kept = count_kept(mesh, loop, 4)["micro_batches"]
    expected = peak_activations(made)[mesh.rank] * 2 / made.num_stages
    assert kept == pytest.approx(expected, rel=0.1)
    loop.model.close()


def test_the_command_writes_a_row_per_schedule_and_number_of_micro_batches(tmp_path: Path) -> None:
    small = "--schedules 1f1b,zb-v --micro-batches 1,3 --width 32 --context 8 --layers 4 --samples 1"
    files = "--json a.json --csv a.csv --chart a.svg"
    ended = instep("bench", "pipeline", *small.split(), *files.split(), cwd=tmp_path)
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "a.json").read_text())
    assert [(row["schedule"], row["micro-batches"]) for row in found["rows"]] == [
        ("1f1b", 1),
        ("zb-v", 1),
        ("1f1b", 3),
        ("zb-v", 3),
    ]
    assert all(0 < row["bubble"] < 1 and 0 < row["simulated bubble"] < 1 for row in found["rows"])
    assert len(found["times"]["zb-v, 3"][0]["forward_s"]) == 4
    assert "A step by schedule: GPT of 4 blocks" in ended.out
    assert all((tmp_path / name).exists() for name in ("a.csv", "a.svg", "a.png", "a-steps.png"))
