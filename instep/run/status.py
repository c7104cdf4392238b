"""Where a run stands, from the files in its directory, any of which may be missing, torn or nonsense."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path

from instep.net.peers import is_alive
from instep.regular_files import open_regular
from instep.run.again import again
from instep.run.folder import CONFIG, SUMMARY, workers
from instep.run.jsonl import Fields
from instep.run.ledger import part_begins
from instep.timeline.run_setting import setting_of
from instep.timeline.trace_files import RunTraces


def run_status(
    path: Path,
    summary: Fields,
    metrics: Sequence[Fields],
    starts: Sequence[Fields],
    tapes: RunTraces,
    notes: list[str],
) -> Fields:
    """The run's name, its state, what it was told; what is wrong is added to ``notes``."""
    setting = setting_of(tapes.first.head.get("setting")) if tapes.first else None
    config, is_run = _text(path / CONFIG), (path / CONFIG).is_file()
    return {
        "name": path.absolute().name,
        "state": _state(path, _steps_wanted(starts, config), summary, metrics, notes)
        if is_run
        else "recorded",
        "command": again(path, path.with_name(f"{path.absolute().name}-again")) if is_run else "",
        "versions": _versions(tapes),
        "summary": {name: value for name, value in summary.items() if not isinstance(value, list | dict)},
        "strategy": setting and setting.strategy,
        "backend": setting and setting.backend,
        "world_size": tapes.world_size or summary.get("world_size"),
        "threads": setting and setting.threads,
        "config": config,
    }


def last_part(starts: Sequence[Fields], metrics: Sequence[Fields], steps: Sequence[int]) -> list[int]:
    """Those of ``steps``, counted from 0, that the last start which has made any has made in one layout.

    A trace may have more: steps that were made before a restart, and are not yet made again.
    """
    done = _steps_done(metrics) or math.inf
    made = [start for start in starts if isinstance(step := start.get("step"), int) and step < done]
    begin = part_begins(made)
    return [step for step in steps if begin <= step < done]


def _versions(tapes: RunTraces) -> Fields:
    """Of what the run was made with."""
    found = tapes.first.head.get("versions") if tapes.first else None
    return {name: str(version)[:80] for name, version in found.items()} if isinstance(found, dict) else {}


def _state(path: Path, wanted: int, summary: Fields, metrics: Sequence[Fields], notes: list[str]) -> str:
    done = _steps_done(metrics)
    so_far = f"{done} of {wanted}" if wanted else f"{done}"
    alive = [is_alive(peer) for peer in workers(path)]
    if any(alive):
        notes.append(f"the run is going on: it has made {so_far} steps so far")
        return "running"
    if (path / SUMMARY).exists() and summary.get("steps", done) == done >= wanted:
        return "finished"
    notes.append(f"the run ended early, after {so_far} steps, or goes on where its processes cannot be seen"
                 if None in alive else f"the run ended early, after {so_far} steps")  # fmt: skip
    if "steps" in summary and summary["steps"] != done:
        notes.append(f"{SUMMARY} tells of the run up to step {summary['steps']!r:.20}")
    return "ended early"


def _steps_done(metrics: Sequence[Fields]) -> int:
    return max((line["step"] for line in metrics if isinstance(line.get("step"), int)), default=0)


def _steps_wanted(starts: Sequence[Fields], config: str) -> int:
    """The number of steps of the whole run; 0: unknown.

    Its contract has it. The settings may have none, or of a script another one by this name; where nothing
    was begun yet there is nothing else.
    """
    numerical = starts[-1].get("numerical") if starts else None
    if isinstance(numerical, dict) and isinstance(steps := numerical.get("steps"), int):
        return steps
    try:
        steps = tomllib.loads(config).get("steps")
    except (ValueError, RecursionError):
        return 0
    return steps if isinstance(steps, int) else 0


def _text(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace", opener=open_regular) as file:
            return file.read()
    except OSError:
        return ""
