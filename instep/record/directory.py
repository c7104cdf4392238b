"""The run directory: its files by name, and the command that repeats the run. Pure.

    config.toml      the resolved settings          workers.json   rank to process, while the run goes on
    steps.jsonl      one line per step              checkpoints/   step-00000100/ ...
    summary.json     the figures of the whole run   faults.jsonl   failures and recoveries
    trace/           what each rank did when, in its last steps; and what instep report makes of it
    report.html      by instep report, with report.json        tensorboard/, wandb/   on request
    run.lock         which process has claimed it, while the run goes on

Rank 0 writes, and the process that starts the ranks; in trace/ every rank has a file.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.record.jsonl import Fields
from instep.regular_files import open_regular

CONFIG = "config.toml"
RECORD = "steps.jsonl"
SUMMARY = "summary.json"
WORKERS = "workers.json"
FAULTS = "faults.jsonl"
CHECKPOINTS = "checkpoints"


def config_text(path: Path) -> str:
    """The file of settings of the run in ``path``; "" if it cannot be read."""
    try:
        with open(path / CONFIG, encoding="utf-8", errors="replace", opener=open_regular) as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def config_of(path: Path) -> dict[str, Any]:
    """The settings of the run in ``path``; {} if none can be read."""
    try:
        return tomllib.loads(config_text(path))
    except (ValueError, RecursionError):
        return {}


def command_again(path: Path, beside: Path, starts: Sequence[Fields], flags: Sequence[str] = ()) -> str:
    """The command that repeats the run in ``path``, in ``beside``; "" if none does, as for a notebook's run.

    It began with the first of ``starts``; ``flags`` are those that ``instep train`` and ``instep run`` share.
    """
    ranks = ["-n", str(starts[0]["world_size"])] if starts and "world_size" in starts[0] else []
    flags = [*ranks, "--run-dir", str(beside), *flags]
    config = config_of(path)
    script, module, arguments = config.get("script"), config.get("module"), config.get("arguments", [])
    if script == "" or not config:
        return ""
    if isinstance(script, str) and isinstance(arguments, list):
        started = ["-m", module] if isinstance(module, str) and module else [script]
        words = ["run", *flags, *started, *map(str, arguments)]
    else:
        words = ["train", "--config", str(path / CONFIG), *flags]
    return f"instep {shlex.join(words)}"
