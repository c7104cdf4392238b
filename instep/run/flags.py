"""Settings from the command line, by tyro: a flag for each, and which of them were given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import tyro

from instep.run.settings import Count
from instep.run.toml import flatten

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LaunchFlags:
    """Settings of ``RunConfig`` with a short or a repeatable flag; ``RunConfig`` has their help texts."""

    ranks: Annotated[Count, tyro.conf.arg(aliases=["-n"])] = 0
    fault: tyro.conf.UseAppendAction[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="KIND:KEY=VALUE,...")]
    ] = ()


def parse(default: T, args: Sequence[str], *, program: str, description: str, quiet: bool = False) -> T:
    """``default`` with what ``args`` say in the place of its own; ``quiet`` prints neither help nor errors.

    Raises:
        SystemExit: 0 after ``--help``; 2 after a flag that does not exist, with the nearest that do.
    """
    found: T = tyro.cli(
        type(default),
        prog=program,
        description=description,
        args=list(args),
        default=default,
        console_outputs=not quiet,
    )
    return found


def given(config: Any, args: Sequence[str]) -> dict[str, Any]:
    """Those settings of ``config`` that ``args`` have flags for, as nested tables."""
    names = set(_names(args))
    tables: dict[str, Any] = {}
    for name, _, value in flatten(config):
        if name in names:
            topic, _, setting = name.rpartition(".")
            (tables.setdefault(topic, {}) if topic else tables)[setting] = value
    return tables


def split(config: Any, args: Sequence[str]) -> int:
    """How many of ``args`` are flags of ``config`` and their values: what follows is not ours to read."""
    kinds = {name: kind for name, kind, _ in flatten(config)} | {"ranks": int}
    i = 0
    while i < len(args) and args[i].startswith("-") and args[i] not in ("-m", "--"):
        kind = kinds.get(next(_names(args[i : i + 1]), ""))
        has_value = "=" not in args[i] and kind not in (None, bool)
        i += 1
        if has_value and kind == tuple[int, ...]:  # as many numbers as there are
            while i < len(args) and args[i].isdigit():
                i += 1
        elif has_value:
            i += 1
    return min(i, len(args))


def _names(args: Sequence[str]) -> Iterator[str]:
    """The settings that flags among ``args`` set: "-n" "ranks", "--record.no-leaves" "record.leaves"."""
    for arg in args:
        word = arg.partition("=")[0]
        if word == "-n":
            yield "ranks"
        elif word.startswith("--"):
            topic, dot, name = word[2:].replace("-", "_").rpartition(".")
            yield f"{topic}{dot}{name.removeprefix('no_')}"
