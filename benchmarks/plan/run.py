"""Step time and memory of two ranks on this machine, planned from one run of another strategy, and measured.

python benchmarks/plan/run.py                      writes results.json, the chart, and the tables of README.md

Each round makes a run to calibrate by (``naive``), and then one of each placement. What the calibrated plan
says of a placement is compared with its run of the same round; the table has medians over the rounds.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.nn import functional as F

import instep
from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench.tables import Row, markdown
from instep.cli.plan import figures_of
from instep.launch.launch import launch
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.plan.run_check import RunFigures, calibrated, check
from instep.plan.step_time import step, step_s
from instep.timeline import style
from instep.timeline.palette import BLUE, MUTED, VERMILION

HERE = Path(__file__).parent
COMMAND = "python benchmarks/plan/run.py"
MODEL = {"layers": 6, "width": 384, "heads": 6, "context": 128}
MICRO, GLOBAL, RANKS, STEPS = 2, 8, 2, 12
BASE = "naive"
PLACEMENTS = {
    "naive": "--parallel.strategy naive",
    "flat": "--parallel.strategy flat",
    "overlap": "--parallel.strategy overlap",
    "bucketed, 1 MB": "--parallel.bucket-mb 1",
    "bucketed, 10 MB": "--parallel.bucket-mb 10",
    "bucketed, 100 MB": "--parallel.bucket-mb 100",
    "stage 1": "--parallel.shard-stage 1",
    "stage 2": "--parallel.shard-stage 2",
    "stage 3": "--parallel.shard-stage 3",
    "pp 2": "--parallel.pp 2",
    "tp 2": "--parallel.tp 2",
    "bfloat16 nodes": "--parallel.nodes bfloat16",
    "one rank": "-n 1",
}
SERVER = "server"  # a loop of its own: instep train has none
ALIKE = 0.05  # steps that differ by less have no order
BAND = 0.1


def main() -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    wanted = parser.parse_args()
    began = time.monotonic()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*PLACEMENTS, SERVER)}
    for number in range(wanted.rounds):
        with tempfile.TemporaryDirectory() as folder:
            base = run(PLACEMENTS[BASE], Path(folder, "base"), wanted.steps)
            for name, flags in PLACEMENTS.items():
                compared = check(run(flags, Path(folder, name), wanted.steps), base)
                found[name].append(vars(compared))
                print(f"round {number}, {name}: {compared.words()}", flush=True)
            found[SERVER].append(serve(base, wanted.steps))
        write(found, wanted.steps, (time.monotonic() - began) / 60, wanted.out)
    return 0


def write(found: Mapping[str, Sequence[Mapping[str, Any]]], steps: int, minutes: float, folder: Path) -> None:
    """Results of the rounds so far, their table and chart."""
    prepare(folder, HERE)
    results = {"minutes": minutes, "model": MODEL, "steps": steps, "found": found}
    save(folder / "results.json", results, pages, HERE, COMMAND)
    draw(rows_of(found), folder / "chart.png")


def run(flags: str, folder: Path, steps: int) -> RunFigures:
    """A run of ``instep train``."""
    model = [word for name, value in MODEL.items() for word in (f"--model.{name}", str(value))]
    words = ["-n", str(RANKS), "--steps", str(steps), "--run-dir", str(folder), *model]
    words += ["--batch.global-size", str(GLOBAL), "--batch.micro-size", str(MICRO)]
    words += ["--eval.windows", "1", "--checkpoint.every", "0", *flags.split()]
    command = [sys.executable, "-m", "instep", "train", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return figures_of(folder)


def serve(base: RunFigures, steps: int) -> dict[str, Any]:
    """Steps with a parameter server, in a plain loop, whose Python and checks are not those of a run."""
    assert base.plan is not None
    plan, _ = calibrated(replace(base.plan, strategy="server"), base)
    with tempfile.TemporaryDirectory() as folder:
        launch(serve_rank, (steps, folder), ranks=RANKS)
        measured_s = max(float(path.read_text()) for path in Path(folder).iterdir())
    return {"planned_s": step_s(step(plan)), "measured_s": measured_s}


def serve_rank(steps: int, folder: str) -> None:
    mesh = instep.init()
    torch.manual_seed(0)
    model = GPT(GPTConfig(**MODEL))
    server = instep.ParameterServer(model, torch.optim.AdamW(model.parameters()))
    tokens, times = torch.randint(256, (MICRO, MODEL["context"])), []
    for _ in range(steps):
        began = time.perf_counter()
        for _ in server.micro_batches(GLOBAL // MICRO):
            F.cross_entropy(server(tokens).flatten(0, 1), tokens.flatten()).backward()
        server.step()
        times.append(time.perf_counter() - began)
    Path(folder, str(mesh.rank)).write_text(str(median(times[2:])))


def rows_of(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Row]:
    rows = []
    for name, rounds in found.items():
        planned, measured = (median(one[key] for one in rounds) for key in ("planned_s", "measured_s"))
        row: dict[str, Any] = {
            "placement": name,
            "planned(ms)": 1e3 * planned,
            "measured(ms)": 1e3 * measured,
        }
        row["error"] = f"{planned / measured - 1:+.1%}"
        if all(one.get("measured_bytes") for one in rounds):
            planned, measured = (
                median(one[key] for one in rounds) for key in ("planned_bytes", "measured_bytes")
            )
            row |= {"planned(MB)": planned / 1e6, "measured(MB)": measured / 1e6}
            row["error of memory"] = f"{planned / measured - 1:+.1%}"
        rows.append(row)
    return rows


def sayings(rows: Sequence[Row]) -> Iterator[str]:
    """What follows from the table."""
    errors = [abs(row["planned(ms)"] / row["measured(ms)"] - 1) for row in rows]
    yield f"Step time: median error {median(errors):.1%}, worst {max(errors):.1%}."
    sizes = [abs(row["planned(MB)"] / row["measured(MB)"] - 1) for row in rows if "planned(MB)" in row]
    yield f"Memory: median error {median(sizes):.1%}, worst {max(sizes):.1%}."
    pairs = [(a, b) for a, b in itertools.combinations(rows, 2) if apart(a, b)]
    right = sum(
        (a["planned(ms)"] < b["planned(ms)"]) == (a["measured(ms)"] < b["measured(ms)"]) for a, b in pairs
    )
    yield f"Of {len(pairs)} pairs that differ by more than {ALIKE:.0%}, {right} are in the planned order."


def apart(a: Row, b: Row) -> bool:
    low, high = sorted((a["measured(ms)"], b["measured(ms)"]))
    return bool(high > (1 + ALIKE) * low)


def pages(results: Results) -> Pages:
    rows = rows_of(results["found"])
    text = "\n".join(f"- {saying}" for saying in sayings(rows))
    return {README: {"plan table": f"{markdown(rows)}\n\n{text}\n\n{made(results)}"}}


def draw(rows: Sequence[Row], path: Path) -> None:
    """A bar per placement as measured, with a band of 10 %, and a mark as planned."""
    with style.styled():
        figure = Figure(figsize=(9.5, 5.6))
        axes = figure.subplots()
        style.head(
            figure,
            "Steps as planned from one run, and as measured",
            f"Two ranks on one host, {MODEL['layers']} blocks of width {MODEL['width']}; the plan has seen a "
            "run of naive; grey: within 10 % of the measured step",
        )
        style.place(figure, left=1.6, right=0.4, top=1.35, bottom=0.9)
        places = range(len(rows), 0, -1)
        measured = [row["measured(ms)"] for row in rows]
        axes.barh(places, measured, height=0.45, color=BLUE, label="measured")
        for y, ms in zip(places, measured, strict=True):
            axes.fill_betweenx(
                [y - 0.38, y + 0.38], (1 - BAND) * ms, (1 + BAND) * ms, color=MUTED, alpha=0.25, lw=0
            )
        planned = [row["planned(ms)"] for row in rows]
        axes.plot(planned, places, "D", color=VERMILION, markeredgecolor="white", label="planned")
        axes.set_yticks(places, [row["placement"] for row in rows])
        axes.set(xlim=(0, 1.15 * max(*measured, *planned)), ylim=(0.3, len(rows) + 0.7))
        axes.set_xlabel("step, ms")
        figure.legend(loc="lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    sys.exit(main())
