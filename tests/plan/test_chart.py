"""Charts of the command: their bars are the numbers that it prints, and both files are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instep.cli import plan_chart
from instep.cli.exit_codes import DONE
from instep.cli.plan import main
from instep.plan.memory_estimate import Batch, Device, MemoryPlan, Placement
from instep.plan.memory_table import GB, shards
from instep.plan.model import MODELS, Transformer

MODEL = Transformer(layers=4, width=512, heads=8, checkpoint=True)
PLANS = [
    MemoryPlan(model=MODELS["llama3-70b"], recipe="mixed"),
    MemoryPlan(model=MODEL, recipe="bf16-compute", batch=Batch(global_size=8), parallel=Placement(dp=2)),
    MemoryPlan(model=MODEL, device=Device(kind="cpu", snapshots=True), parallel=Placement(shard=2, stage=2)),
]


@pytest.mark.parametrize("plan", PLANS)
def test_the_bars_of_memory_add_up_to_a_rank(plan, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(plan_chart, "_stacked", lambda sizes, *_: drawn.append(sizes))
    plan_chart.draw(plan, "never.png")
    _, ranks = shards(plan)
    totals = [sum(values) for values in zip(*drawn[0].values(), strict=True)]
    assert totals == pytest.approx([rank.total / GB for rank in ranks.values()])


@pytest.mark.parametrize("args", ["memory llama3-70b", "step --parallel.dp 4", "scale --ranks 1 2 8 --weak"])
def test_the_command_draws_what_it_prints(args: str, tmp_path, capsys) -> None:
    assert main([*args.split(), "--json", "--chart", str(tmp_path / "chart.png")]) == DONE
    printed = capsys.readouterr()
    assert json.loads(printed.out) and printed.err.startswith("chart: ")
    for path in map(Path, printed.err.split()[1:]):
        assert path.stat().st_size > 5000
