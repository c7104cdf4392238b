"""How a run stands, from the files in its directory, any of which may be missing, torn or nonsense."""

from __future__ import annotations

import json
import math
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.mesh.peers import Peer, lives
from instep.timeline.insight import setting_of
from instep.timeline.tape import Tapes
from instep.train import folder
from instep.train.ledger import part_begins

Fields = dict[str, Any]


def run(path: Path, summary: Fields, metrics: Sequence[Fields], tapes: Tapes, notes: list[str]) -> Fields:
    """Its name, its state, what it was told; what is wrong is added to ``notes``."""
    setting = setting_of(tapes.first.head.get("setting")) if tapes.first else None
    config, is_run = _text(path / folder.CONFIG), (path / folder.CONFIG).is_file()
    return {
        "name": path.absolute().name,
        "state": _state(path, config, summary, metrics, notes) if is_run else "recorded",
        "command": f"instep train --config {shlex.quote(str(path / folder.CONFIG))}" if is_run else "",
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
    done = _done(metrics) or math.inf
    made = [start for start in starts if isinstance(step := start.get("step"), int) and step < done]
    begin = part_begins(made)
    return [step for step in steps if begin <= step < done]


def _versions(tapes: Tapes) -> Fields:
    """Of what the run was made with."""
    found = tapes.first.head.get("versions") if tapes.first else None
    return {name: str(version)[:80] for name, version in found.items()} if isinstance(found, dict) else {}


def _state(path: Path, config: str, summary: Fields, metrics: Sequence[Fields], notes: list[str]) -> str:
    done = _done(metrics)
    wanted = _wanted(config)
    so_far = f"{done} of {wanted}" if wanted else f"{done}"
    alive = [lives(peer) for peer in _workers(path)]
    if any(alive):
        notes.append(f"the run is going on: it has made {so_far} steps so far")
        return "running"
    if (path / folder.SUMMARY).exists() and summary.get("steps", done) == done >= wanted:
        return "finished"
    notes.append(f"the run ended early, after {so_far} steps, or goes on where its processes cannot be seen"
                 if None in alive else f"the run ended early, after {so_far} steps")  # fmt: skip
    if "steps" in summary and summary["steps"] != done:
        notes.append(f"{folder.SUMMARY} tells of the run up to step {summary['steps']!r:.20}")
    return "ended early"


def _done(metrics: Sequence[Fields]) -> int:
    return max((line["step"] for line in metrics if isinstance(line.get("step"), int)), default=0)


def _wanted(config: str) -> int:
    """The number of steps of the whole run; 0: unknown."""
    try:
        steps = tomllib.loads(config).get("steps")
    except (ValueError, RecursionError):
        return 0
    return steps if isinstance(steps, int) else 0


def _workers(path: Path) -> list[Peer]:
    try:
        return folder.workers(path)
    except RecursionError:
        return []


def read_object(path: Path, notes: list[str]) -> Fields:
    """The JSON object in a file; an empty one if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    notes.append(f"{path.name} cannot be read: left out")
    return {}


def read_lines(path: Path, notes: list[str]) -> list[Fields]:
    """The whole lines of a JSONL file, up to the first that is not; none if there is no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError:
        notes.append(f"{path.name} cannot be read: left out")
        return []
    found: list[Fields] = []
    for line in text.splitlines():
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            notes.append(f"{path.name} is torn at line {len(found) + 1}: the rest is left out")
            break
        found.append(fields)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
