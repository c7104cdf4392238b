"""A step of two ranks as they recorded it: what is computed, what is exchanged meanwhile, what is waited for.

Both ranks are on one device over gloo: the picture shows what overlaps, and not how fast GPUs exchange.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.gpu.part import ROOT, Part, instep, main
from instep.timeline import style
from instep.timeline.breakdown import parts
from instep.timeline.step_chart import panel, step_chart
from instep.timeline.trace_files import FOLDER, read_traces

DROPPED = 4  # steps at the beginning
QUICK = (
    "--model.layers 2 --model.width 64 --batch.global-size 8 --batch.micro-size 2 --parallel.bucket-mb 0.1"
)
LARGE = (
    "--model.layers 6 --model.width 512 --model.heads 8 --model.context 512 "
    "--batch.global-size 64 --batch.micro-size 16 --parallel.bucket-mb 8"
)


def streams(part: Part) -> None:
    words = ["-n", 2, "--steps", 12, "--data", ROOT / "instep" / "recipes", "--eval.windows", 8]
    words += [*(QUICK if part.quick else LARGE).split(), "--parallel.device", part.device]
    words += ["--parallel.backend", "gloo"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        instep("train", *words, "--run-dir", run, cwd=Path(folder))
        traces = read_traces(run / FOLDER)
        lengths = {step: panel(traces.timeline(step), step).ms for step in traces.steps[DROPPED:]}
        median_ms = statistics.median_low(lengths.values())
        step = next(step for step, ms in lengths.items() if ms == median_ms)
        timeline = traces.timeline(step)
    where = f"emulation: two ranks on one {'card' if part.on_gpu else 'CPU'} over gloo"
    style.save(
        step_chart(timeline, step=step, title="One step, bucketed", subtitle=where), part.output / "step"
    )
    for rank in timeline.ranks:
        spent = parts(timeline.of(rank, step))
        assert spent is not None
        seconds = {"step": spent.wall, "compute": spent.compute, "waiting": spent.waiting_s}
        seconds |= {"hidden": spent.hidden, "exposed": spent.exposed_s}
        figures = {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
        part.found(f"rank {rank}, step {step}", "measured", **figures)


if __name__ == "__main__":
    main({"streams": streams})
