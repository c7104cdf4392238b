"""The state of a run, from the files in its directory, any of which may be missing, torn or nonsense."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from instep.net.peers import Peer, is_alive
from instep.record.directory import CONFIG, SUMMARY, WORKERS, command_again, config_of, config_text
from instep.record.jsonl import Fields, read_object
from instep.record.shape import Shape
from instep.record.step_lines import part_begins
from instep.timeline.run_setting import setting_of
from instep.timeline.trace_files import RunTraces

PEER = Shape({"host": str}, required={field.name for field in fields(Peer)}, others=int)


def workers(path: Path) -> list[Peer]:
    """The processes that work, or have worked, in ``path``, as far as it says."""
    records = read_object(path / WORKERS).values()
    return [] if any(map(PEER.problem, records)) else [Peer(**record) for record in records]


def run_status(
    path: Path,
    summary: Fields,
    lines: Sequence[Fields],
    starts: Sequence[Fields],
    tapes: RunTraces,
    notes: list[str],
) -> Fields:
    """The run's name, its state, its settings; ``notes`` gets what is wrong."""
    setting = setting_of(tapes.first.head.get("setting")) if tapes.first else None
    config, is_run = config_text(path), (path / CONFIG).is_file()
    return {
        "name": path.absolute().name,
        "state": _state(path, _steps_wanted(starts, path), summary, steps_done(lines), notes)
        if is_run
        else "recorded",
        "command": command_again(path, path.with_name(f"{path.absolute().name}-again"), starts),
        "versions": _versions(tapes),
        "summary": {name: value for name, value in summary.items() if not isinstance(value, list | dict)},
        "strategy": setting and setting.strategy,
        "backend": setting and setting.backend,
        "world_size": tapes.world_size or summary.get("world_size"),
        "threads": setting and setting.threads,
        "config": config,
    }


def steps_done(lines: Sequence[Fields]) -> int:
    """How many steps ``lines`` are of."""
    return max((line["step"] + 1 for line in lines if "event" not in line), default=0)


def last_part(starts: Sequence[Fields], done: int, steps: Sequence[int]) -> list[int]:
    """Those of ``steps`` that the last start which has made any has made in one layout.

    A trace may have more than the steps ``done``: those made before a restart, and not yet again.
    """
    done = done or sys.maxsize
    made = [start for start in starts if isinstance(step := start.get("step"), int) and step < done]
    begin = part_begins(made)
    return [step for step in steps if begin <= step < done]


def _versions(tapes: RunTraces) -> Fields:
    """Of what the run was made with."""
    found = tapes.first.head.get("versions") if tapes.first else None
    return {name: str(version)[:80] for name, version in found.items()} if isinstance(found, dict) else {}


def _state(path: Path, wanted: int, summary: Fields, done: int, notes: list[str]) -> str:
    so_far = f"{done} of {wanted}" if wanted else f"{done}"
    alive = [is_alive(peer) for peer in workers(path)]
    if any(alive):
        notes.append(f"the run is still going: {so_far} steps so far")
        return "running"
    if (path / SUMMARY).exists() and summary.get("steps", done) == done >= wanted:
        return "finished"
    if summary.get("is_finished") is True and summary.get("steps") == done:
        notes.append(f"run.finish() ended the run after {so_far} steps")
        return "finished"
    unseen = ", or is still going on another host" if None in alive else ""
    notes.append(f"the run ended early, after {so_far} steps{unseen}")
    if "steps" in summary and summary["steps"] != done:
        notes.append(f"{SUMMARY} is of the first {summary['steps']!r:.20} steps")
    return "ended early"


def _steps_wanted(starts: Sequence[Fields], path: Path) -> int:
    """The number of steps of the whole run, by its contract, else by its settings; 0: unknown."""
    numerical = starts[-1].get("numerical") if starts else None
    known = numerical if isinstance(numerical, dict) and "steps" in numerical else config_of(path)
    steps = known.get("steps")
    return steps if isinstance(steps, int) else 0
