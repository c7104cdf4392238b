"""Sizes, counts and durations as people say and write them; 1 KB is 1000 bytes, as in GB/s, 1 KiB 1024."""

from __future__ import annotations

import re

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def size_text(nbytes: float) -> str:
    """1000 -> 1 KB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if round(nbytes / unit, 3) >= 1:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes:.3g} B"


def duration_text(microseconds: float) -> str:
    """1500 -> 1.5 ms."""
    for unit, name in ((1e6, "s"), (1e3, "ms")):
        if microseconds >= unit:
            return f"{microseconds / unit:.3g} {name}"
    return f"{microseconds:.3g} µs"


def words(given: tuple[str, ...]) -> tuple[str, ...]:
    """``given``, whether it was separated by spaces or by commas; each word once."""
    return tuple(dict.fromkeys(word for part in given for word in part.split(",") if word))


def parse_count(text: str) -> int:
    """``"70M"`` -> 70_000_000.

    Raises:
        ValueError: it is not a number with one of the units K, M, G, or is less than one.
    """
    found = re.fullmatch(r"([0-9.]+) *([KMG]?I?)", text.strip().upper())
    if found is None or found[2] not in UNITS or found[1].count(".") > 1 or not re.search("[0-9]", found[1]):
        raise ValueError(f"expected a number such as 512, 64K or 1.5M, got {text!r}")
    count = round(float(found[1]) * UNITS[found[2]])
    if count < 1:
        raise ValueError(f"expected at least 1, got {text!r}")
    return count


def parse_size(text: str) -> int:
    """``"64KB"`` -> 64_000, ``"1MiB"`` -> 1_048_576, ``"512"`` -> 512; in bytes.

    Raises:
        ValueError: it is not a size.
    """
    try:
        return parse_count(re.sub("[bB]$", "", text.strip()))
    except ValueError:
        raise ValueError(f"expected a size such as 512, 64KB, 1MiB or 1GB, got {text!r}") from None
