"""What the fields of a JSON object have to be, looked at before any of them is used. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

Kind = tuple[str, Callable[[Any], bool]]
"""What a value has to be: in words, and whether it is."""


@dataclass(frozen=True)
class Shape:
    """``kinds`` of the fields that are known, if they are there; of all ``others``, if that matters.

    ``required`` fields are there.
    """

    kinds: Mapping[str, Kind]
    required: Set[str] = field(default_factory=frozenset)
    others: Kind | None = None

    def problem(self, value: Any) -> str:
        """In what ``value`` is not of this shape, "expected A, got B"; "" if it is."""
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
    """As much of it as a line of an error has room for."""
    text = text if isinstance(text, str) else repr(text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_count(value: Any) -> bool:
    """Whether ``value`` is a whole number from 0 that fits in 64 bits; True and False are none."""
    return type(value) is int and 0 <= value < 1 << 63


def is_text(value: Any) -> bool:
    """Whether ``value`` is text."""
    return type(value) is str


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number, and can be a float; True and False are none."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


ANYTHING: Kind = ("anything", lambda value: True)
COUNT: Kind = ("a whole number from 0", is_count)
NUMBER: Kind = ("a number", is_number)
TEXT: Kind = ("text", is_text)
