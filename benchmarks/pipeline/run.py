"""Simulated pipelines beside what was published and beside closed forms; no model and no process.

python benchmarks/pipeline/run.py            half a minute; writes results.json, chart and tables in README.md
python benchmarks/pipeline/run.py --out DIR  the same elsewhere

Exit code 1 if a figure is further from the published one than published.py allows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import README, Pages, Results, parser_of, prepare, save
from benchmarks.pipeline.published import (
    GPIPE_MICRO_BATCHES,
    GPIPE_SPEED_UPS,
    GPIPE_WITHIN,
    ROWS,
    TO_1F1B,
    WITHIN,
    Measured,
)
from benchmarks.pipeline.published import (
    peak_activations as peak_by_formula,
)
from instep.bench.tables import cell, markdown, show
from instep.events import Timeline
from instep.pipeline.actions import Schedule
from instep.pipeline.check import check, peak_activations
from instep.pipeline.closed_forms import cost_s
from instep.pipeline.schedules import NAMES, generate
from instep.pipeline.simulate import StageTimes, bubble_rate, makespan_s, simulate
from instep.timeline.step_chart import side_by_side

HERE = Path(__file__).parent
COMMAND = "python benchmarks/pipeline/run.py"
RANKS, MICRO_BATCHES = 4, 8  # of the chart and of the table of all schedules
UNIT_S = 3.0  # of a rank's forward, input-gradient and weight-gradient of one micro-batch, a second each

Table = list[dict[str, Any]]


def main() -> int:
    parser = parser_of(__doc__, HERE)
    folder = parser.parse_args().out
    found = [simulated(row, name) for name in WITHIN for row in ROWS]
    tables = {
        "all schedules": all_schedules(),
        **{f"bubble of {name}": rates(found, name) for name in WITHIN},
        "speed-up of gpipe": speed_ups(),
        "throughput": throughput(found),
    }
    prepare(folder, HERE)
    for name, rows in tables.items():
        show(rows, name)
    save(folder / "results.json", {"tables": tables}, pages, HERE, COMMAND)
    draw(folder / "chart.svg")
    beyond = too_far(found)
    print("\n".join(beyond) if beyond else "all within what was set")
    return 1 if beyond else 0


def pages(results: Results) -> Pages:
    return {README: {name: markdown(rows) for name, rows in results["tables"].items()}}


def simulated(row: Measured, name: str) -> dict[str, Any]:
    """One published row by one schedule: the rate simulated, by formula and as published."""
    p, m, v = row.ranks, row.micro_batches, row.chunks if name == "interleaved" else 1
    work = (row.forward_ms, row.input_gradient_ms, row.weight_gradient_ms)
    schedule = generate(name, p, m, v)
    check(schedule)
    rate = bubble_rate(simulate(schedule, StageTimes(*(ms / v / 1e3 for ms in work), row.message_ms / 1e3)))
    cost_ms = cost_s(
        name, p, m, v, forward_s=work[0], input_gradient_s=work[1], weight_gradient_s=work[2],
        message_s=row.message_ms,
    )  # fmt: skip
    simulated_s = m * sum(work) / 1e3 / (1 - rate)
    return {
        "model": row.model, "ranks": p, "micro-batches": m, "chunks": v, "schedule": name,
        "published": row.rates[name], "simulated": rate, "by formula": 1 - m * sum(work) / cost_ms,
        "samples": row.samples.get(name), "simulated samples": row.batch * m / simulated_s / p,
    }  # fmt: skip


def rates(found: Sequence[dict[str, Any]], name: str) -> Table:
    """The bubble rates of one schedule, to their four digits."""
    return [
        {
            **{column: one[column] for column in ("model", "ranks", "micro-batches", "chunks")},
            **{column: f"{one[column]:.4f}" for column in ("published", "simulated", "by formula")},
            "difference": f"{one['simulated'] - one['published']:+.5f}",
        }
        for one in found
        if one["schedule"] == name
    ]


def throughput(found: Sequence[dict[str, Any]]) -> Table:
    """Samples per GPU and second: what was measured, and by how much the simulator promises more."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for one in found:
        if one["samples"]:
            row = rows.setdefault(
                (one["model"], one["micro-batches"]),
                {column: one[column] for column in ("model", "ranks", "micro-batches")},
            )
            promised = one["simulated samples"]
            row[one["schedule"]] = one["samples"]
            more = promised / one["samples"] - 1
            row[f"simulated {one['schedule']}"] = f"{cell(promised)} ({more:+.1%})"
    return list(rows.values())


def speed_ups() -> Table:
    """How many times as fast as one accelerator GPipe is on several."""
    rows = []
    for ranks, published in GPIPE_SPEED_UPS.items():
        m = GPIPE_MICRO_BATCHES
        times = {"forward_s": 1 / ranks, "input_gradient_s": 1 / ranks, "weight_gradient_s": 1 / ranks}
        alone = UNIT_S * m
        found = alone / makespan_s(simulate(generate("gpipe", ranks, m), StageTimes(**times)))
        rows.append(
            {
                "accelerators": ranks,
                "published": published,
                "simulated": found,
                "by formula": alone / cost_s("gpipe", ranks, m, **times),
                "difference": f"{found / published - 1:+.1%}",
            }
        )
    return rows


def all_schedules() -> Table:
    """Every schedule on the ranks of the chart, without messages, beside formula and publication."""
    made = {name: generate(name, RANKS, MICRO_BATCHES) for name in NAMES}
    wait = {name: waited(schedule) for name, schedule in made.items()}
    rows = []
    for name, schedule in made.items():
        chunks = schedule.num_stages // RANKS
        peak = max(peak_activations(schedule)) / chunks
        said = TO_1F1B.get(name)
        cost = cost_s(
            name, RANKS, MICRO_BATCHES, chunks, forward_s=1, input_gradient_s=1, weight_gradient_s=1
        )
        rows.append(
            {
                "schedule": name,
                "bubble": f"{wait[name] / (wait[name] + UNIT_S * MICRO_BATCHES):.3f}",
                "by formula": f"{1 - UNIT_S * MICRO_BATCHES / cost:.3f}",
                "x 1f1b": f"{wait[name] / wait['1f1b']:.2f}",
                "published": None if said is None else f"{said[0]:.2f}",
                "peak": f"{peak:g}",
                "peak by formula": f"{peak_by_formula(name, RANKS, MICRO_BATCHES, chunks) / chunks:g}",
                "peak x 1f1b": f"{peak / RANKS:.2f}",
                "published peak": None if said is None else f"{said[1]:.2f}",
            }
        )
    return rows


def draw(path: Path) -> list[Path]:
    """Every schedule but naive as boxes in time; F, I and W of all a rank's stages take 1 ms each."""
    steps, notes = {}, {}
    for schedule in (generate(name, RANKS, MICRO_BATCHES) for name in NAMES if name != "naive"):
        peak = max(peak_activations(schedule)) / (schedule.num_stages // RANKS)
        noun = "activation" if peak == 1 else "activations"
        steps[schedule.name] = units(schedule, 1e-3), 0
        rate = bubble_rate(units(schedule))
        notes[schedule.name] = f"{rate:.0%} bubble, at most {peak:g} {noun}"
    return side_by_side(
        steps,
        path,
        title="What a pipeline's schedule makes of its ranks' time",
        subtitle=f"{RANKS} ranks, {MICRO_BATCHES} micro-batches, simulated: a forward of one micro-batch "
        "takes a rank 1 ms, in all its stages; a number is a micro-batch. A backward is an input gradient "
        "and a weight gradient. Bubbles count from a rank's first box to its last, activations are what a "
        "rank keeps of one micro-batch.",
        notes=notes,
        ranks=range(RANKS),
    )


def units(schedule: Schedule, unit_s: float = 1.0) -> Timeline:
    """Simulated without messages, F, I and W of all a rank's stages ``unit_s`` each."""
    each_s = unit_s * schedule.num_ranks / schedule.num_stages
    return simulate(schedule, StageTimes(each_s, each_s, each_s))


def waited(schedule: Schedule) -> float:
    """The seconds of the longest rank's time in which it does not compute."""
    rate = bubble_rate(units(schedule))
    return UNIT_S * schedule.num_micro_batches * rate / (1 - rate)


def too_far(found: Sequence[dict[str, Any]]) -> list[str]:
    """What is further from its publication than it may be."""
    beyond = [
        f"{one['schedule']}, {one['model']}, {one['micro-batches']}: {one['simulated']:.5f}"
        for one in found
        if abs(one["simulated"] - one["published"]) > WITHIN[one["schedule"]]
    ]
    return beyond + [
        f"gpipe on {row['accelerators']}: {row['simulated']:.3f}"
        for row in speed_ups()
        if abs(row["simulated"] / row["published"] - 1) > GPIPE_WITHIN
    ]


if __name__ == "__main__":
    sys.exit(main())
