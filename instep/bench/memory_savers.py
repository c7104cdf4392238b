"""``instep bench memory-savers``: memory saved by two switches, and their cost.

    checkpoint    a block keeps its input alone, and is computed again in backward: a third forward
    bf16          products are computed, and kept, in half of the bytes; the weights stay float32

Memory and time are those of the same training step on every rank, by ``bench.steps_rank``. Losses, and that
blocks which are computed again move no bit, are of ``instep train`` as it comes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from instep.bench.charts import bars
from instep.bench.options import MemorySaversOptions, parse_count
from instep.bench.steps import MS, StepResults
from instep.bench.steps_rank import MEGABYTE, measure_memory, measure_steps, memory_columns
from instep.bench.tables import Row, quantile, short, show, spread, write
from instep.bench.variants import Variant
from instep.bench.workloads import Workload
from instep.bench.worlds import BEGAN, on_ranks
from instep.models.config import num_parameters
from instep.plan.memory_estimate import for_gpt, largest
from instep.record.directory import SUMMARY
from instep.record.display import follow
from instep.record.jsonl import read_object
from instep.shm.segment import available

PLAIN = Variant("bucketed", "shm" if available() else "gloo")
SAVERS = {
    "neither": PLAIN,
    "checkpoint": replace(PLAIN, checkpoint=True),
    "bf16": replace(PLAIN, autocast="bf16"),
    "both": replace(PLAIN, checkpoint=True, autocast="bf16"),
}
PANELS = {
    "activations(MB)": "activations that wait for backward",
    "peak(MB)": "most memory of a rank, torch itself included",
    "x neither": "time of a step, and its quartiles",
}
STEPS_SHARE = 0.4  # of the time, where runs of instep train follow
DROPOUT = 0.1  # of the runs whose bits are compared: recomputation has to draw the same again


def run(options: MemorySaversOptions) -> None:
    """Measure, print the tables, write the files."""
    results = measure(options)
    tables(results)
    write(options, results, results["rows"], lambda path: draw(results, path))


def measure(options: MemorySaversOptions) -> dict[str, Any]:
    """A row per way, a row per seed, and what has to be known to read them."""
    options.check()
    params = parse_count(options.params)
    workload = Workload("memory-savers", params, options.batch, "memory", tokens=options.context)
    task = {"workload": asdict(workload), "samples": options.samples}
    steps = {**task, "variants": [asdict(one) for one in SAVERS.values()]}
    end = STEPS_SHARE if options.steps else 1.0
    results = StepResults(on_ranks(measure_steps, steps, ranks=options.ranks, part=(0.0, end)))
    memory = {name: _memory(one, workload, options.ranks) for name, one in SAVERS.items()}
    runs = compare_runs(options) if options.steps else {}
    return {
        "ranks": options.ranks,
        "samples": len(results.steps(PLAIN.name)),
        "model": {**asdict(workload.config), "parameters": num_parameters(workload.config)},
        "text": workload.text,
        "rows": [row(name, results, memory[name], workload) for name in SAVERS],
        "ms": {name: [MS * s for s in results.steps(one.name)] for name, one in SAVERS.items()},
        "runs": runs,
    }


def row(
    name: str, results: StepResults, memory: Mapping[str, float | None], workload: Workload
) -> dict[str, Any]:
    """The figures of one way: memory of a rank, and the time of a step beside that of neither."""
    one, config = SAVERS[name], replace(workload.config, checkpoint=SAVERS[name].checkpoint)
    autocast = one.autocast == "bf16"
    steps, ratio = results.steps(one.name), results.against(one.name, PLAIN.name)
    said = largest(for_gpt(config, workload.batch, autocast=autocast))
    return {
        "way": name,
        "activations(MB)": memory["activations(MB)"],
        "formula(MB)": said.of("activations") / MEGABYTE,
        "a block again(MB)": said.of("recomputation") / MEGABYTE,
        "peak(MB)": memory["peak(MB)"],
        "step(ms)": quantile(steps, 0.5) * MS,
        "q25(ms)": quantile(steps, 0.25) * MS,
        "q75(ms)": quantile(steps, 0.75) * MS,
        **spread("x neither", ratio),
    }


def compare_runs(options: MemorySaversOptions) -> dict[str, Any]:
    """Losses in nats per byte by seed, of whole runs; ``state_sha256`` of those with the first seed.

    Raises:
        RuntimeError: a run failed, or blocks that are computed again have moved a bit.
    """
    wanted = [*((name, 0) for name in SAVERS)]
    wanted += [(name, seed) for seed in range(1, options.seeds) for name in ("neither", "bf16")]
    with tempfile.TemporaryDirectory(prefix="instep-memory-savers-") as directory:
        found = {
            (name, seed): _train(SAVERS[name], seed, options, Path(directory, f"{name}-{seed}"))
            for name, seed in follow(wanted, "instep train, run", part=(STEPS_SHARE, 1.0), began=BEGAN)
        }
    hashes = {name: found[name, 0]["state_sha256"] for name in SAVERS}
    if hashes["checkpoint"] != hashes["neither"] or hashes["both"] != hashes["bf16"]:
        raise RuntimeError(f"expected the same bits where blocks are computed again, got {hashes}")
    rows = [
        loss_row(seed, *(found[name, seed] for name in ("neither", "bf16"))) for seed in range(options.seeds)
    ]
    return {"steps": options.steps, "rows": rows, "state_sha256": hashes}


def loss_row(seed: int, plain: Mapping[str, Any], bf16: Mapping[str, Any]) -> dict[str, Any]:
    """The held-out losses of two runs with one seed."""
    before, after = plain["held_out_loss_first"], plain["held_out_loss"]
    rounded = bf16["held_out_loss"]
    return {
        "seed": seed,
        "before": before,
        "float32": after,
        "bf16": rounded,
        "bf16 - float32": rounded - after,
    }


def notes(results: Mapping[str, Any]) -> list[str]:
    """What has to be known to read the tables."""
    lines = [
        f"{results['text']}; {results['ranks']} ranks; a step is forward, backward, exchange and update, the "
        f"slowest rank's, median of {results['samples']}, all in turns",
        "activations: kept at the end of forward; formula: the same by arithmetic; a block again: additional "
        "activations of the block that backward recomputes; peak: of a process of its own",
    ]
    if runs := results["runs"]:
        rows = runs["rows"]
        least, most = min(row["float32"] for row in rows), max(row["float32"] for row in rows)
        lines += [
            f"losses: held out, nats per byte, after {runs['steps']} steps of instep train; bf16 - float32: "
            f"{median(row['bf16 - float32'] for row in rows):+.4f} (median), seeds alone: {most - least:.4f}",
            "with --model.checkpoint the runs end with the same bits: state "
            f"{runs['state_sha256']['neither'][:16]} in float32, {runs['state_sha256']['bf16'][:16]} in bf16",
        ]
    return lines


def tables(results: Mapping[str, Any]) -> None:
    """The rows on stdout."""
    show(short(results["rows"]), "Ways to need less memory", notes=notes(results))
    if results["runs"]:
        show(results["runs"]["rows"], "What bf16 does to the loss")


def draw(results: Mapping[str, Any], path: Path) -> list[Path]:
    """Bars beside neither: activations, peak, time."""
    return bars(
        chart_rows(results["rows"]), path,
        title=f"Ways to need less memory: a training step on {results['ranks']} ranks",
        subtitle=f"{results['text']}; multiples of what a step takes with neither",
        label="way", value="value", low="low", high="high", unit="x", group="panel",
    )  # fmt: skip


def chart_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every figure as a multiple of neither's, by panel."""
    plain = next(row for row in rows if row["way"] == "neither")
    found = []
    for column, panel in PANELS.items():
        for row in rows:
            if row[column] is not None and plain[column]:
                bar = {"way": row["way"], "panel": panel, "value": row[column] / plain[column]}
                if column == "x neither" and row is not plain:
                    bar |= {"low": row["x neither q25"], "high": row["x neither q75"]}
                found.append(bar)
    return found


def _memory(one: Variant, workload: Workload, ranks: int) -> dict[str, float | None]:
    task = {"workload": asdict(workload), "variant": asdict(one)}
    return memory_columns([x for x in on_ranks(measure_memory, task, ranks=ranks) if x], workload, one)


def _train(one: Variant, seed: int, options: MemorySaversOptions, path: Path) -> dict[str, Any]:
    """``summary.json`` of a run of the default recipe."""
    words = [
        *("--steps", options.steps, "--seed", seed, "-n", options.ranks, "--run-dir", path),
        *("--autocast", one.autocast, "--model.dropout", DROPOUT, "--eval.every", 0, "--checkpoint.every", 0),
        *(["--model.checkpoint"] if one.checkpoint else []),
    ]
    command = [sys.executable, "-m", "instep", "train", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(
            f"{' '.join(command[2:])} ended with code {ended.returncode}:\n{ended.stderr[-2000:]}"
        )
    return read_object(path / SUMMARY)
