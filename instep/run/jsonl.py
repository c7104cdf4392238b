"""JSON files that survive their writers: replaced as a whole or appended line by line, and read with doubt.

A run may be killed in the middle of a line, and may go on while its files are read. So a line counts when it
is whole, and a reader takes the lines up to the first one that is not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instep.regular_files import require_in_place

TAIL_BYTES = 1 << 18
NOT_JSON = object()

Fields = dict[str, Any]
"""A JSON object: one line of a file, or all of it."""


class JsonLines:
    """A JSONL file that survives its writer: every line is on its own, and a torn last one is dropped."""

    def __init__(self, path: Path, *, until_step: int) -> None:
        """Go on after ``until_step``: lines of later steps belong to work that is done again, events stay."""
        if not _ends_at(path, until_step):
            kept = [line for line in read_lines(path) if "event" in line or line.get("step", 0) <= until_step]
            replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, **fields: Any) -> None:
        """Append one line.

        Raises:
            OSError: the disk is full, or the file was removed or replaced, so that its lines are lost.
        """
        self._file.write(json.dumps(fields) + "\n")
        require_in_place(self._file.fileno(), self._path)

    def close(self) -> None:
        """Flush to disk and close."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_object(path: Path, notes: list[str] | None = None) -> Fields:
    """The JSON object in a file; an empty one if there is none, or none that can be read.

    ``notes`` is told of a file that is there and cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    if notes is not None:
        notes.append(f"{path.name} cannot be read: left out")
    return {}


def read_lines(path: Path, notes: list[str] | None = None) -> list[Fields]:
    """The lines of a JSONL file, up to the first that is no whole JSON object; none if there is no file.

    ``notes`` is told of what was left out.

    Raises:
        OSError: the file cannot be read, and there are no ``notes`` to say so in.
    """
    found: list[Fields] = []
    try:
        for _, line in each_line(path, errors="replace"):
            if not isinstance(line, dict):
                if notes is not None:
                    notes.append(f"{path.name} is torn at line {len(found) + 1}: the rest is left out")
                break
            found.append(line)
    except FileNotFoundError:
        return []
    except OSError:
        if notes is None:
            raise
        notes.append(f"{path.name} cannot be read: left out")
        return []
    return found


def each_line(path: Path, *, errors: str = "strict") -> Iterator[tuple[bytes, Any]]:
    """Each line of a file as it stands there, and what JSON makes of it; ``NOT_JSON`` if nothing.

    ``errors`` says what becomes of bytes that are not UTF-8, as in ``bytes.decode``.
    """
    with path.open("rb") as file:
        for data in file:
            try:
                yield data, json.loads(data.decode(errors=errors))
            except (ValueError, RecursionError):
                yield data, NOT_JSON


def read_last_lines(path: Path) -> list[Fields]:
    """The lines at the end of a JSONL file, one of a step among them if there is any, however long it is."""
    tail = _tail(path)
    if tail is not None and any("event" not in line for line in tail):
        return tail
    return read_lines(path)


def _tail(path: Path) -> list[Fields] | None:
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
