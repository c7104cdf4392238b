"""The figures of a whole run, from its lines, printed at its end."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.errors import counted
from instep.record.directory import SUMMARY
from instep.record.shape import Shape, is_number
from instep.record.step_lines import PER_S, of_script

SHOWN = Shape(
    {
        "steps": int,
        "strategy": str,
        "world_size": int,
        "state_sha256": str,
        "first_step": int,
        "parallel": dict[str, Any],
        "logged": dict[str, dict[str, float]],
    },
    required={"steps", "strategy", "world_size", "state_sha256"},  # without these there is nothing to show
)
WARM_UP_STEPS = 2  # the first learns the order of the gradients, the second sends by it for the first time


def throughput_name(names: Iterable[str]) -> str:
    """Which of the figures called ``names`` says how much is trained on in a second: ``tokens_per_s``."""
    return next((name for name in names if name.endswith(PER_S)), f"samples{PER_S}")


def throughput(figures: Mapping[str, Any], form: str = ",.0f") -> str:
    """That figure in words, "12,346 tokens/s"; a dash for one that is not known."""
    name = throughput_name(figures)
    return f"{_number(figures, name, form)} {name.removesuffix(PER_S)}/s"


def figures(lines: Sequence[Mapping[str, Any]], first_step: int, items_per_step: int) -> dict[str, Any]:
    """What ``lines`` of ``steps.jsonl`` say; None stands for "no such step".

    Losses are those of the whole run; speed is that of the part from ``first_step`` on, in one layout. An
    item is what the lines count by the second.
    """
    losses = [line["loss"] for line in lines if "loss" in line] or [None]
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line] or [None]
    logged: dict[str, list[float]] = {}
    for line in lines:
        for name, x in of_script(line).items() if "event" not in line else ():
            logged.setdefault(name, []).append(x)
    rate_name = throughput_name(name for line in lines for name in line)
    ours = [line for line in lines if line["step"] >= first_step and {"step_ms", "exposed_ms"} <= line.keys()]
    steady = ours[WARM_UP_STEPS:] or ours
    step_ms = statistics.median(line["step_ms"] for line in steady) if steady else None
    whole_ms = sum(line["step_ms"] for line in steady)
    return {
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "held_out_loss_first": held_out[0],
        "held_out_loss": held_out[-1],
        "step_ms_median": step_ms,
        rate_name: items_per_step / step_ms * 1e3 if step_ms else None,
        "exposed_comm_share": sum(line["exposed_ms"] for line in steady) / whole_ms if whole_ms else None,
        "logged": {name: {"last": x[-1], "min": min(x), "max": max(x)} for name, x in logged.items()},
    }


def show(
    summary: Mapping[str, Any], path: Path, insight: Iterable[tuple[str, str]] = (), *, loss_unit: str = ""
) -> None:
    """The result, on stdout, with the lines of ``insight`` (label, text) into where the time went."""
    unit = loss_unit and f" {loss_unit}"
    has_last = is_number(summary.get("loss_last"))
    loss = f"{_number(summary, 'loss_last', '.3f')}{unit} in the last step" if has_last else ""
    if summary.get("held_out_loss") is not None or (loss_unit and not loss):
        loss = (
            f"{_number(summary, 'held_out_loss', '.3f')}{unit} on held-out data, "
            f"{_number(summary, 'held_out_loss_first', '.3f')} at the start"
        )
        if has_last or loss_unit:  # else the script has logged none
            loss += f"; {_number(summary, 'loss_last', '.3f')} in the last training step"
    speed = (
        f"{throughput(summary)}, {_number(summary, 'step_ms_median', '.0f')} ms a step (median), "
        f"{_number(summary, 'exposed_comm_share', '.1%')} of it waiting for communication"
    )
    rows = [
        ("run", str(path)),
        ("steps", _steps(summary)),
        *([("loss", loss)] if loss else []),
        *(("logged", f"{name} {_range(its)}") for name, its in (summary.get("logged") or {}).items()),
        (
            "speed",
            speed if summary.get("step_ms_median") else "not measured: no step was made in this layout",
        ),
        *insight,
        ("more", f"{path / SUMMARY}; instep report {shlex.quote(str(path))}"),
        ("state", f"sha256 {summary['state_sha256']}"),
    ]
    sys.stdout.write("".join(f"{name:<6} {text}\n" for name, text in rows))
    sys.stdout.flush()


def finished(steps: int, *, command: str = "instep train") -> str:
    """What to say where all ``steps`` were made before."""
    say = f"already finished: {steps} of {steps} steps; to train longer, "
    if command == "instep run":
        return f"{say}raise the number in run.steps()"
    return f"{say}pass --steps {2 * steps} --accept-contract (which changes the learning rate's schedule)"


def _range(its: Mapping[str, Any]) -> str:
    """The last value of a figure, and between which it was."""
    last, least, most = (_number(its, name, ".5g") for name in ("last", "min", "max"))
    return f"{last} at the end, {least} to {most}"


def _number(figures: Mapping[str, Any], name: str, form: str) -> str:
    figure = figures.get(name)
    return format(figure, form) if is_number(figure) else "-"


def _steps(summary: Mapping[str, Any]) -> str:
    """How many, on how many ranks, in which way; all figures but the losses are of one layout."""
    steps, first = summary["steps"], summary.get("first_step") or 0
    parallel = summary.get("parallel") or {}
    strategy, stage, schedule = summary["strategy"], parallel.get("shard_stage"), parallel.get("schedule")
    layout = f"{counted(summary['world_size'], 'rank')}, {strategy}"
    layout += f", stage {stage} of sharding" if stage else ""
    layout += f", in pipelines ({schedule})" if schedule and parallel.get("pp", 0) != 1 else ""
    if not first:
        return f"{steps} on {layout}"
    return f"{steps}; the last {steps - first} on {layout}: speed, memory and time are of these"
