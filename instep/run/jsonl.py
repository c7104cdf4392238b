"""JSON files that survive their writers: replaced as a whole or appended line by line, and read with doubt.

A run may be killed in the middle of a line, and may go on while its files are read. So a line counts when it
is whole, and a reader takes the lines up to the first one that is not. A line that is whole, but is not what
instep writes, was written by something else: a reader that goes on with the run refuses it, by its number.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.regular_files import create, open_or_create, open_regular, require_in_place
from instep.run.shape import COUNT, TEXT, Shape

TAIL_BYTES = 1 << 18
NOT_JSON = object()

Fields = dict[str, Any]
"""A JSON object: one line of a file, or all of it."""

OBJECTS = Shape({})
OF_STEPS = Shape({"step": COUNT, "event": TEXT}, required={"step"})
EVENTS = Shape({"event": TEXT}, required={"event"})


class JsonLines:
    """A JSONL file that survives its writer: every line is on its own, and a torn last one is dropped."""

    def __init__(self, path: Path, *, until_step: int, shape: Shape = OF_STEPS) -> None:
        """Go on after ``until_step``: lines of later steps belong to work that is done again, events stay.

        Raises:
            ValueError: a line is not of ``shape``.
            OSError: there is something else than a regular file.
        """
        if not _ends_at(path, until_step, shape):
            kept = [line for line in read_lines(path, shape=shape) if _stays(line, until_step)]
            replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._path = path
        self._file = open(path, "a", encoding="utf-8", buffering=1, opener=open_or_create)  # noqa: SIM115

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
    """Write a file so that a reader sees the old one or the new one, and no mixture of what two wrote."""
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        with os.fdopen(create(temporary), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def read_object(path: Path, notes: list[str] | None = None) -> Fields:
    """The JSON object in a file; an empty one if there is none, or none that can be read.

    ``notes`` is told of a file that is there and cannot be read.
    """
    try:
        with open(path, encoding="utf-8", opener=open_regular) as file:
            found = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    if notes is not None:
        notes.append(f"{path.name} cannot be read: left out")
    return {}


def read_lines(path: Path, notes: list[str] | None = None, shape: Shape = OBJECTS) -> list[Fields]:
    """The lines of a JSONL file, up to the first that is no whole JSON; none if there is no file.

    ``notes`` is told of what was left out, which then are also lines that are not of ``shape``.

    Raises:
        OSError: the file cannot be read, and there are no ``notes`` to say so in.
        ValueError: a line is not of ``shape``, and there are no ``notes``.
    """
    found: list[Fields] = []
    told = [] if notes is None else notes
    try:
        for number, (_, line) in enumerate(each_line(path, errors="replace"), start=1):
            if line is NOT_JSON:
                told.append(f"{path.name} is torn at line {number}: the rest is left out")
                break
            if problem := shape.problem(line):
                if notes is None:
                    raise _not_ours(path, number, problem)
                told.append(f"{path.name}, line {number}: {problem}: the rest is left out")
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
    with open(path, "rb", opener=open_regular) as file:
        for data in file:
            yield data, _parsed(data, errors)


def marked_lines(path: Path, mark: bytes, shape: Shape) -> list[Fields]:
    """The whole lines that have ``mark`` in them; the others are not even parsed. None if there is no file.

    Raises:
        OSError: the file cannot be read.
        ValueError: such a line is not of ``shape``.
    """
    found: list[Fields] = []
    with suppress(FileNotFoundError), open(path, "rb", opener=open_regular) as file:
        for number, data in enumerate(file, start=1):
            if mark in data and data.endswith(b"\n"):
                line = _parsed(data, "replace")
                if problem := "expected JSON" if line is NOT_JSON else shape.problem(line):
                    raise _not_ours(path, number, problem)
                found.append(line)
    return found


def read_last_lines(path: Path, shape: Shape = OF_STEPS) -> list[Fields]:
    """The lines at the end of a JSONL file, one of a step among them if there is any, however long it is.

    Raises:
        OSError, ValueError: as ``read_lines``.
    """
    tail = _tail(path, shape)
    if tail is not None and any("event" not in line for line in tail):
        return tail
    return read_lines(path, shape=shape)


def _tail(path: Path, shape: Shape) -> list[Fields] | None:
    """The last lines of a file; None if they are not whole, or not of ``shape``."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
            tail = file.read()
    except FileNotFoundError:
        return []
    whole, _, torn = tail.rpartition(b"\n")
    lines = [_parsed(x, "strict") for x in whole.splitlines()[len(tail) == TAIL_BYTES :]]
    return None if torn or any(map(shape.problem, lines)) else lines


def _ends_at(path: Path, step: int, shape: Shape) -> bool:
    """Whether the file's last lines are whole, and none is of a later step."""
    tail = _tail(path, shape)
    return tail is not None and all(_stays(line, step) for line in tail)


def _stays(line: Fields, step: int) -> bool:
    return "event" in line or line["step"] <= step


def _parsed(data: bytes, errors: str) -> Any:
    try:
        return json.loads(data.decode(errors=errors))
    except (ValueError, RecursionError):
        return NOT_JSON


def _not_ours(path: Path, number: int, problem: str) -> ValueError:
    return ValueError(f"{path}, line {number}: {problem}: put the file back as it was, or move it away")
