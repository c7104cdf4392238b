"""JSON files that survive their writers: replaced as a whole or appended line by line, and checked when read.

A run may be killed in the middle of a line, and may go on while its files are read. So a line counts when it
is whole, and a reader stops at the first torn one. A whole line that instep does not write was written by
something else: a reader that continues the run refuses it, by its number.

JSON has no NaN and no infinity: they are written as the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``
(as by protobuf), so that any reader takes the files. All other floats come back with the same bits.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.record.shape import Shape
from instep.regular_files import create, open_or_create, open_regular, require_in_place

TAIL_BYTES = 1 << 18
NOT_JSON = object()
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Fields = dict[str, Any]
"""A JSON object: one line of a file, or all of it."""

OBJECTS = Shape({})
OF_STEPS = Shape({"step": int, "event": str}, required={"step"})
EVENTS = Shape({"event": str}, required={"event"})


def to_json(fields: Any, indent: int | None = None) -> str:
    """``fields`` as JSON that any reader takes."""
    try:
        return json.dumps(fields, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(finite(fields), indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    """``value`` with texts in the place of numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: finite(content) for name, content in value.items()}
    return [finite(content) for content in value] if isinstance(value, list | tuple) else value


def numbers_of(fields: Fields) -> Fields:
    """``fields`` with the numbers that JSON does not have."""
    return {name: NOT_FINITE.get(x, x) if isinstance(x, str) else x for name, x in fields.items()}


class JsonLines:
    """A JSONL file that survives its writer: every line is flushed, and a torn last one is dropped."""

    def __init__(self, path: Path, *, before_step: int, shape: Shape = OF_STEPS) -> None:
        """Continue with step ``before_step``: lines of it and later ones are removed, events stay.

        Raises:
            ValueError: a line is not of ``shape``.
            OSError: ``path`` is no regular file.
        """
        tail = _tail(path, shape)
        if tail is None or not all(_stays(line, before_step) for line in tail):
            kept = [line for line in read_lines(path, shape=shape) if _stays(line, before_step)]
            replace_text(path, "".join(to_json(line) + "\n" for line in kept))
        self._path = path
        self._file = open(path, "a", encoding="utf-8", buffering=1, opener=open_or_create)  # noqa: SIM115

    def write(self, **fields: Any) -> None:
        """Append one line.

        Raises:
            OSError: the disk is full, or the file was removed or replaced, so that its lines are lost.
        """
        self._file.write(to_json(fields) + "\n")
        require_in_place(self._file.fileno(), self._path)

    def close(self) -> None:
        """Flush to disk and close."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, and never a mixture of two writers'."""
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
    """The JSON object in a file; {} if there is none, or none that can be read, which ``notes`` gets."""
    try:
        with open(path, encoding="utf-8", opener=open_regular) as file:
            found = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return numbers_of(found)
    if notes is not None:
        notes.append(f"{path.name} cannot be read: left out")
    return {}


def read_lines(
    path: Path, notes: list[str] | None = None, shape: Shape = OBJECTS, mark: bytes = b""
) -> list[Fields]:
    """The lines of a JSONL file that begin with ``mark``, up to the first torn one; [] if there is no file.

    With ``notes`` a file that cannot be read, and a line that is not of ``shape``, end the lines, too;
    ``notes`` says what was left out.

    Raises:
        OSError, ValueError: those two, without ``notes``.
    """
    found: list[Fields] = []
    told = [] if notes is None else notes
    try:
        for number, _, line in each_line(path, mark):
            if line is NOT_JSON:
                told.append(f"{path.name} is torn at line {number}: the rest is left out")
                break
            if problem := shape.problem(line):
                if notes is None:
                    fix = "restore the file, or move it away"
                    raise ValueError(f"{path}, line {number}: {problem}: {fix}")
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


def each_line(path: Path, mark: bytes = b"") -> Iterator[tuple[int, bytes, Any]]:
    """The lines of a file that begin with ``mark``: number, bytes, and the JSON, ``NOT_JSON`` if it is none.

    The others are not even parsed.
    """
    with open(path, "rb", opener=open_regular) as file:
        for number, data in enumerate(file, start=1):
            if data.startswith(mark):
                yield number, data, _parsed(data)


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
    """The last lines of a file; None if they are torn, or not of ``shape``."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
            tail = file.read()
    except FileNotFoundError:
        return []
    whole, _, torn = tail.rpartition(b"\n")
    lines = [_parsed(x) for x in whole.splitlines()[len(tail) == TAIL_BYTES :]]
    return None if torn or any(map(shape.problem, lines)) else lines


def _stays(line: Fields, before_step: int) -> bool:
    return "event" in line or line["step"] < before_step


def _parsed(data: bytes) -> Any:
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError):
        return NOT_JSON
    return numbers_of(found) if isinstance(found, dict) else found
