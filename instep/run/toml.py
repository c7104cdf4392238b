"""Settings as TOML: a frozen dataclass of scalars and of such dataclasses; keys, types, ranges checked. Pure.

What is written is read back as it was. A range stands beside a type: ``every: Annotated[int, FROM_0] = 50``.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from instep.checkpoint.manifest import Scalar

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """What a number may be: in ``words``, and whether it ``holds``."""

    words: str
    holds: Callable[[float], bool]


ABOVE_0 = Range("a number above 0", lambda number: number > 0)
FROM_0 = Range("0 or more", lambda number: number >= 0)
FROM_2 = Range("2 or more", lambda number: number >= 2)
BELOW_1 = Range("a number from 0 to below 1", lambda number: 0 <= number < 1)
UP_TO_1 = Range("a number from 0 to 1", lambda number: 0 <= number <= 1)


def flatten(topic: Any, prefix: str = "", *, extras: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, declared type, value) of every setting below ``topic``, a dataclass instance; with
    ``extras`` the type has its range."""
    hints = get_type_hints(type(topic), include_extras=extras)
    for item in fields(topic):
        name, value = f"{prefix}{item.name}", getattr(topic, item.name)
        if is_dataclass(value):
            yield from flatten(value, f"{name}.", extras=extras)
        else:
            yield name, hints[item.name], value


def check(config: Any) -> None:
    """Raise ``ValueError`` for a word that is none of its setting's, or a number outside of its range."""
    for name, kind, value in flatten(config, extras=True):
        ranges = []
        if get_origin(kind) is Annotated:
            kind, *ranges = get_args(kind)
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ValueError(f"{name}: expected {_words(kind)}, got {value!r}")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{name}: expected a finite number, got {number}")
            for wanted in ranges:
                if isinstance(wanted, Range) and not wanted.holds(number):
                    raise ValueError(f"{name}: expected {wanted.words}, got {number}")


def scalars(topic: Any) -> dict[str, Scalar]:
    """Every setting below ``topic`` by its dotted name; of a tuple each item, and a path as its words.

    Raises:
        ValueError: a setting is of a kind that TOML has no word for.
    """
    found: dict[str, Scalar] = {}
    for name, _, value in flatten(topic):
        if isinstance(value, tuple | list):
            found |= {f"{name}.{i}": scalar(name, item) for i, item in enumerate(value)}
        elif value is not None:
            found[name] = scalar(name, value)
    return found


def load_toml(path: Path) -> dict[str, Any]:
    """The nested tables of the file at ``path``; ``ValueError`` that names the file if it is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or not TOML
        raise ValueError(f"{path}: {error}") from None


def merge(base: T, tables: Mapping[str, Any], source: str) -> T:
    """The settings ``base`` with what ``tables`` has in the place of their own.

    Raises:
        ValueError: a key that does not exist, with the nearest that does, or a value of another type; the
            message begins with ``source`` and has the full dotted key.
    """
    try:
        merged: T = _merge(base, tables, "", [name for name, _, _ in flatten(base)])
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    return merged


def to_toml(config: Any) -> str:
    """Every setting of ``config``, one a line, in a table per topic; left out where it is None.

    What is in no table comes first, as TOML wants it: a line after a table's head would be the table's.
    """
    by_topic: dict[str, list[str]] = {"": []}
    for full, _, value in flatten(config):
        if value is not None:
            topic, _, name = full.rpartition(".")
            by_topic.setdefault(topic, []).append(f"{name} = {_literal(full, value)}")
    lines = by_topic.pop("")
    for topic, settings in by_topic.items():
        lines += ["", f"[{topic}]", *settings]
    return "\n".join(lines) + "\n"


def scalar(name: str, value: Any) -> Scalar:
    """``value`` as TOML and JSON have it: a number of numpy's as Python's, an enumeration's by its value.

    Raises:
        ValueError: it is none; the message begins with ``name``.
    """
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return value
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Integral):  # numpy's are, too
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise ValueError(f"{name}: expected a number, a word or a path, or a tuple of them, got {value!r}")


def _merge(topic: Any, table: Mapping[str, Any], prefix: str, names: list[str]) -> Any:
    """The dataclass instance ``topic`` with ``table`` merged in; ``names`` are all the settings."""
    hints = get_type_hints(type(topic))
    changes = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if key not in hints:
            close = difflib.get_close_matches(name, [*hints, *names], n=1)
            raise ValueError(f"unknown key {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))
        current = getattr(topic, key)
        if not is_dataclass(current):
            changes[key] = _cast(name, value, hints[key])
        elif isinstance(value, Mapping):
            changes[key] = _merge(current, value, f"{name}.", names)
        else:
            raise ValueError(f"{name}: expected a table, got {type(value).__name__} {value!r}")
    return replace(topic, **changes)


def _cast(name: str, value: Any, kind: Any) -> Any:
    """``value`` as ``kind``, the type of the setting ``name``."""
    if get_origin(kind) is UnionType:  # X | None, and TOML has no None
        kind = get_args(kind)[0]
    if kind is float and type(value) is int:
        return float(value)
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if get_origin(kind) is tuple and type(value) in (list, tuple):
        items = get_args(kind)
        items = items[:1] * len(value) if items[-1] is Ellipsis else items
        if len(items) == len(value):
            return tuple(_cast(name, *pair) for pair in zip(value, items, strict=True))
    # By the exact type: to Python a bool is an int.
    if type(value) is not (type(get_args(kind)[0]) if get_origin(kind) is Literal else kind):
        raise ValueError(f"{name}: expected {_words(kind)}, got {type(value).__name__} {value!r}")
    return value


def _words(kind: Any) -> str:
    """A type as the user of a TOML file would call it."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        number = "" if others == [Ellipsis] else f"{1 + len(others)} "
        return f"an array of {number}{first.__name__}s"
    return "str" if kind is Path else str(kind.__name__)


def _literal(name: str, value: Any) -> str:
    """A scalar or a tuple of them as TOML writes it."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(_literal(name, item) for item in value)}]"
    plain = scalar(name, value)
    if isinstance(plain, bool):
        return str(plain).lower()
    if isinstance(plain, str):
        return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(plain)
