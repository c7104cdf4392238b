"""A config as TOML: read with every key and type checked, and written so that reading gives it back."""

from __future__ import annotations

import difflib
import json
import tomllib
from dataclasses import is_dataclass, replace
from itertools import groupby
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from instep.models.presets import preset
from instep.train.config import Config, flatten

RUN_CONFIG = "config.toml"  # in a run directory


def load_toml(path: Path) -> dict[str, Any]:
    """The nested tables of the file at ``path``; ``ValueError`` that names the file if it is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or not TOML
        raise ValueError(f"{path}: {error}") from None


def merge(base: Config, tables: dict[str, Any], source: str) -> Config:
    """``base`` with what ``tables`` has in the place of its own.

    ``model.preset``, a name for layers, width and heads together, is read too, and yields to these three.

    Raises:
        ValueError: a key that does not exist, with the nearest that does, or a value of another type; the
            message begins with ``source`` and has the full dotted key.
    """
    try:
        return _merge(base, _without_preset(tables), "", [name for name, _, _ in flatten(base)])
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def to_toml(config: Config) -> str:
    """Every setting of ``config``, one a line, in a table per topic; left out where it is None.

    TOML wants what is in no table first, and that is the order of the fields of ``Config``.
    """
    settings = [(name.rpartition("."), value) for name, _, value in flatten(config) if value is not None]
    lines: list[str] = []
    for topic, members in groupby(settings, key=lambda setting: setting[0][0]):
        lines += ["", f"[{topic}]"] if topic else []
        lines += [f"{name} = {_literal(value)}" for (_, _, name), value in members]
    return "\n".join(lines) + "\n"


def _without_preset(tables: dict[str, Any]) -> dict[str, Any]:
    """``tables`` with the sizes that ``model.preset`` names in its place."""
    model = tables.get("model")
    if not isinstance(model, dict) or "preset" not in model:
        return tables
    try:
        size = preset(str(model["preset"]))
    except ValueError as error:
        raise ValueError(f"model.preset: {error}") from None
    given = {key: value for key, value in model.items() if key != "preset"}
    return {**tables, "model": {"layers": size.layers, "width": size.width, "heads": size.heads, **given}}


def _merge(topic: Any, table: dict[str, Any], prefix: str, names: list[str]) -> Any:
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
        elif isinstance(value, dict):
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
    if kind is Path and type(value) is str:
        return Path(value)
    if get_origin(kind) is tuple and type(value) is list and len(value) == len(_items(kind, value)):
        return tuple(_cast(name, *pair) for pair in zip(value, _items(kind, value), strict=True))
    # By the exact type: to Python a bool is an int.
    if type(value) is not (str if get_origin(kind) is Literal else kind):
        raise ValueError(f"{name}: expected {_words(kind)}, got {type(value).__name__} {value!r}")
    return value


def _items(kind: Any, value: list[Any]) -> tuple[Any, ...]:
    """The type of each item of ``value`` as a ``kind``, ``tuple[X, Y]`` or ``tuple[X, ...]``."""
    items = get_args(kind)
    return items[:1] * len(value) if items[-1] is Ellipsis else items


def _words(kind: Any) -> str:
    """A type as the user of a TOML file would call it."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        number = "" if others == [Ellipsis] else f"{1 + len(others)} "
        return f"an array of {number}{first.__name__}s"
    return "str" if kind is Path else str(kind.__name__)


def _literal(value: Any) -> str:
    """A scalar or a tuple of them as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
