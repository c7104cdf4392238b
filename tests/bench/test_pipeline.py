"""``instep bench pipeline``: from what ranks record to rows, and once from the command line to its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.bench.options import PipelineOptions
from instep.bench.pipeline import PipelineResults, PipelineSteps, is_crowded, run
from instep.bench.pipeline_rank import PipelineLoop, count_kept, variant
from instep.events import PIPELINE, Timeline
from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.pipeline.check import peak_activations
from instep.pipeline.schedules import NAMES, generate
from instep.pipeline.simulate import StageTimes, simulate
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


def results(options: PipelineOptions, schedules: Sequence[str] = ("gpipe", "1f1b")) -> PipelineResults:
    return PipelineResults(options, [steps_of(name, m) for m in options.counts for name in schedules])


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
    assert kept == pytest.approx(expected, abs=0.1)
    loop.model.close()
