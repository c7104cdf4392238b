"""The run directory: what a run leaves on disk while it goes on, and when it is done.

    config.toml      the resolved config            workers.json   rank to process, while the run goes on
    metrics.jsonl    a line per step, to plot       ledger.jsonl   a line per step, to compare bit by bit
    summary.json     the figures of the whole run   checkpoints/   step-00000100/ ...
    faults.jsonl     what went wrong, and what it took to go on
    trace/           what each rank did when, in its last steps; and what instep report makes of it
    report.html      by instep report, with report.json        tensorboard/, wandb/   if they are asked for

Rank 0 writes, and the process that starts the ranks; but for trace/, where every rank has a file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from instep.mesh.peers import Peer, is_alive
from instep.run.jsonl import read_object, replace_text
from instep.run.toml import CONFIG, to_toml

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
WORKERS = "workers.json"
FAULTS = "faults.jsonl"
CHECKPOINTS = "checkpoints"


class Claim(Protocol):
    """What is asked for: a directory, or None for a new one in ``runs/``; and to go on with what is in it."""

    @property
    def run_dir(self) -> Path | None:
        """Where the run is recorded."""

    @property
    def resume(self) -> bool:
        """Whether an earlier command has begun it."""


def claim(config: Claim) -> Path:
    """The directory of this run, made if need be; nothing in it is touched.

    Raises:
        ValueError: it holds another run, or that run is still going on, or there is nothing to resume.
        PermissionError: it cannot be written to.
    """
    if config.run_dir is None:
        if config.resume:
            raise ValueError("--resume needs --run-dir: which run shall go on?")
        return _make(Path("runs") / time.strftime("train-%Y%m%d-%H%M%S"), fresh=True)
    if config.resume and not config.run_dir.exists():
        raise ValueError(f"{config.run_dir} does not exist, so there is no run to resume: look at --run-dir")
    path = _make(config.run_dir, fresh=False)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(f"run directory {path} cannot be written to: pass another --run-dir")
    is_empty = not any(path.iterdir())
    holds_run = (path / CONFIG).exists()
    if config.resume:
        busy = [f"rank {peer.rank} (pid {peer.pid})" for peer in workers(path) if is_alive(peer)]
        if busy:
            raise ValueError(
                f"{path}: the run is still going on in {', '.join(busy)}: wait for it, or end it"
            )
        if not is_empty and not holds_run:
            raise ValueError(f"{path} holds other files and no run to resume: look at --run-dir")
    elif holds_run:
        raise ValueError(f"{path} holds another run: pass --resume to continue it, or another --run-dir")
    elif not is_empty:
        raise ValueError(f"{path} holds other files: pass another --run-dir")
    return path


def begin(path: Path, config: Any, peers: Sequence[Peer]) -> None:
    """Write what holds for the whole run: ``config``, a dataclass of settings, and its processes."""
    replace_text(path / CONFIG, to_toml(config))
    records = {str(peer.rank): asdict(peer) for peer in peers}
    replace_text(path / WORKERS, json.dumps(records, indent=1) + "\n")


def end(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the figures: none of an earlier part stays, which may have been made on other ranks."""
    replace_text(path / SUMMARY, json.dumps(summary, indent=1) + "\n")


def release(path: Path) -> None:
    """No process works in ``path`` any more; if the run has not even begun, it leaves no empty directory."""
    with suppress(OSError):  # nothing here may hide the error that ends the run
        (path / WORKERS).unlink(missing_ok=True)
        path.rmdir()  # which fails if anything is in it


def workers(path: Path) -> list[Peer]:
    """The processes that work, or have worked, in ``path``, as far as it says."""
    try:
        return [Peer(**record) for record in read_object(path / WORKERS).values()]
    except TypeError:
        return []


def _make(path: Path, *, fresh: bool) -> Path:
    """``path`` as a directory; with ``fresh`` one that was not there, with a number if need be."""
    candidates = [path, *(path.with_name(f"{path.name}-{i}") for i in range(2, 1000))] if fresh else [path]
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True, exist_ok=not fresh)
        except FileExistsError:
            if not fresh:
                raise ValueError(f"{path} is a file, expected a directory: pass another --run-dir") from None
        except OSError as error:
            raise PermissionError(
                f"run directory {path} cannot be made ({error.strerror}): pass another --run-dir"
            ) from None
        else:
            return candidate
    raise FileExistsError(f"{path} and 998 more of that name exist: pass --run-dir")
