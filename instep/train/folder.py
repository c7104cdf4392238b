"""The run directory: what a run leaves on disk while it goes on, and when it is done.

    config.toml      the resolved config            workers.json   rank to process, while the run goes on
    metrics.jsonl    a line per step, to plot       ledger.jsonl   a line per step, to compare bit by bit
    summary.json     the figures of the whole run   checkpoints/   step-00000100/ ...
    faults.jsonl     what went wrong, and what it took to go on
    trace/           what each rank did when, in its last steps; and what instep report makes of it
    report.html      by instep report, with report.json        tensorboard/, wandb/   if they are asked for

Only rank 0 writes, and who starts the ranks; but for trace/, where every rank has a file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from instep.mesh.peers import Peer, lives
from instep.train.config import Config
from instep.train.toml import RUN_CONFIG, to_toml

CONFIG = RUN_CONFIG
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
WORKERS = "workers.json"
FAULTS = "faults.jsonl"
CHECKPOINTS = "checkpoints"

TAIL_BYTES = 1 << 18


def claim(config: Config) -> Path:
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
        busy = [f"rank {peer.rank} (pid {peer.pid})" for peer in workers(path) if lives(peer)]
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


def begin(path: Path, config: Config, workers: Sequence[Peer]) -> None:
    """Write what holds for the whole run."""
    _replace(path / CONFIG, to_toml(config))
    _replace(path / WORKERS, json.dumps({str(peer.rank): asdict(peer) for peer in workers}, indent=1) + "\n")


def end(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the figures: none of an earlier part stays, which may have been made on other ranks."""
    _replace(path / SUMMARY, json.dumps(summary, indent=1) + "\n")


def release(path: Path) -> None:
    """No process works in ``path`` any more; if the run has not even begun, it leaves no empty directory."""
    with suppress(OSError):  # nothing here may hide the error that ends the run
        (path / WORKERS).unlink(missing_ok=True)
        path.rmdir()  # which fails if anything is in it


class Lines:
    """A JSONL file that survives its writer: every line is on its own, and a torn last one is dropped."""

    def __init__(self, path: Path, *, until_step: int) -> None:
        """Go on after ``until_step``: lines of later steps belong to work that is done again, events stay."""
        if not _ends_at(path, until_step):
            kept = [line for line in read_lines(path) if "event" in line or line.get("step", 0) <= until_step]
            _replace(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, **fields: Any) -> None:
        """Append one line."""
        self._file.write(json.dumps(fields) + "\n")

    def close(self) -> None:
        """Flush to disk and close."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file, none if there is no file."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def read_last_lines(path: Path) -> list[dict[str, Any]]:
    """The lines at the end of a JSONL file, one of a step among them if there is any, however long it is."""
    tail = _tail(path)
    knows = tail is not None and any("event" not in line for line in tail)
    return tail if tail is not None and knows else read_lines(path)


def _tail(path: Path) -> list[dict[str, Any]] | None:
    """The last lines of a file; None if they are not whole."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
        tail = file.read()
    whole, _, torn = tail.rpartition(b"\n")
    try:
        return None if torn else [json.loads(x) for x in whole.splitlines()[len(tail) == TAIL_BYTES :]]
    except ValueError:
        return None


def _ends_at(path: Path, step: int) -> bool:
    """Whether the file's last lines are whole, and none is of a later step."""
    tail = _tail(path)
    return tail is not None and all("event" in line or line.get("step", 0) <= step for line in tail)


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


def workers(path: Path) -> list[Peer]:
    """The processes that work, or have worked, in ``path``, as far as it says."""
    try:
        return [Peer(**record) for record in read_object(path / WORKERS).values()]
    except TypeError:
        return []


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
