"""The command that makes a recorded run once more, from its ``config.toml``. Pure."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Any

from instep.regular_files import open_regular
from instep.run.toml import CONFIG


def config_of(path: Path) -> dict[str, Any]:
    """The settings of the run in ``path``; {} if it has none that can be read."""
    try:
        with open(path / CONFIG, encoding="utf-8", errors="replace", opener=open_regular) as file:
            return tomllib.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}


def again(path: Path, beside: Path, flags: tuple[str, ...] = ()) -> str:
    """The command that makes the run in ``path`` once more, in ``beside``; "" where it was of a notebook.

    ``flags`` are those that ``instep train`` and ``instep run`` share.
    """
    config = config_of(path)
    script, module, arguments = config.get("script"), config.get("module"), config.get("arguments", [])
    if script == "":
        return ""
    if isinstance(script, str) and isinstance(arguments, list):
        started = ["-m", module] if isinstance(module, str) and module else [script]
        words = ["run", "--run-dir", str(beside), *flags, *started, *map(str, arguments)]
    else:
        fresh = ["--no-resume"] if flags else []
        words = ["train", "--config", str(path / CONFIG), "--run-dir", str(beside), *fresh, *flags]
    return f"instep {shlex.join(words)}"
