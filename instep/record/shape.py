"""What the fields of a JSON object have to be, checked before any is used. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

Kind = tuple[str, Callable[[Any], bool]]
"""A kind of values: its name in messages, and whether a value is one."""


@dataclass(frozen=True)
class Shape:
    """``kinds`` of the known fields, where present; of all ``others``, if given; ``required`` fields."""

    kinds: Mapping[str, Kind]
    required: Set[str] = field(default_factory=frozenset)
    others: Kind | None = None

    def problem(self, value: Any) -> str:
        """Why ``value`` is not of this shape, "expected A, got B"; "" if it is."""
        if not isinstance(value, dict):
            return f"expected a JSON object, got {short(value)}"
        if lacking := sorted(self.required - value.keys()):
            return f"expected a field {lacking[0]!r}, got {short(', '.join(map(repr, value)) or 'none')}"
        for name, content in value.items():
            words, holds = self.kinds.get(name) or self.others or ANYTHING
            if not holds(content):
                return f"{short(name)}: expected {words}, got {short(repr(content))}"
        return ""


def short(text: Any) -> str:
    """As much of ``text`` as an error message has room for."""
    text = text if isinstance(text, str) else repr(text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_count(value: Any) -> bool:
    """Whether ``value`` is a whole number from 0 that fits in 64 bits; True and False are not."""
    return type(value) is int and 0 <= value < 1 << 63


def is_text(value: Any) -> bool:
    """Whether ``value`` is text."""
    return type(value) is str


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number that fits in a float; True and False are not."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


def is_object(value: Any, holds: Callable[[Any], bool] = lambda content: True) -> bool:
    """Whether ``value`` is an object each of whose contents ``holds``."""
    return isinstance(value, dict) and all(map(holds, value.values()))


ANYTHING: Kind = ("anything", lambda value: True)
COUNT: Kind = ("a whole number from 0", is_count)
NUMBER: Kind = ("a number", is_number)
TEXT: Kind = ("text", is_text)
