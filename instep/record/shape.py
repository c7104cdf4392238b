"""What the fields of a JSON object have to be, checked before any is used. Pure.

A kind is a type: ``int`` is a count, from 0, ``float`` any number, ``dict[str, int]`` an object of counts,
``tuple[str, int]`` a list of these two, and a ``TypedDict`` an object with at least its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

WORDS = {int: "a whole number from 0", float: "a number", str: "text"}


@dataclass(frozen=True)
class Shape:
    """``kinds`` of the known fields, where present; that of all ``others``; ``required`` fields."""

    kinds: Mapping[str, Any]
    required: Set[str] = field(default_factory=frozenset)
    others: Any = Any

    def problem(self, value: Any) -> str:
        """Why ``value`` is not of this shape, "expected A, got B"; "" if it is."""
        if not isinstance(value, dict):
            return f"expected a JSON object, got {short(value)}"
        if lacking := sorted(self.required - value.keys()):
            return f"expected a field {lacking[0]!r}, got {short(', '.join(map(repr, value)) or 'none')}"
        for name, content in value.items():
            kind = self.kinds.get(name, self.others)
            if not check_of(kind)(content):
                return f"{short(name)}: expected {WORDS.get(kind, kind)}, got {short(repr(content))}"
        return ""


def short(text: Any) -> str:
    """As much of ``text`` as an error message has room for."""
    text = text if isinstance(text, str) else repr(text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number that fits in a float; True and False are not."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


@lru_cache(maxsize=256)
def check_of(kind: Any) -> Callable[[Any], bool]:
    """What tells whether a value is of ``kind``."""
    if kind is Any:
        return lambda value: True
    if kind is int:
        return lambda value: type(value) is int and 0 <= value < 1 << 63
    if kind is float:
        return is_number
    if is_typeddict(kind):
        shape = Shape(get_type_hints(kind), kind.__required_keys__)
        return lambda value: not shape.problem(value)
    origin, items = get_origin(kind), [check_of(item) for item in get_args(kind)]
    if origin is dict:
        return lambda value: type(value) is dict and all(map(items[1], value.values()))
    if origin is list:
        return lambda value: type(value) is list and all(map(items[0], value))
    if origin is tuple:
        count = len(items)
        return lambda value: (
            type(value) is list
            and len(value) == count
            and all(test(x) for test, x in zip(items, value, strict=True))
        )
    if items:  # of a union
        return lambda value: any(test(value) for test in items)
    return lambda value: type(value) is kind
