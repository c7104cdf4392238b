"""Two configurations side by side: which fields differ, and one hash for all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from instep.checkpoint.manifest import Scalar, canonical

ABSENT = "absent"


def fingerprint(fields: Mapping[str, Scalar]) -> str:
    """SHA-256 of the fields' canonical JSON: equal exactly when :func:`differences` is empty."""
    return hashlib.sha256(canonical(dict(fields))).hexdigest()


def differences(
    a: Mapping[str, Scalar], b: Mapping[str, Scalar], where: tuple[str, str] = ("in the checkpoint", "now")
) -> list[str]:
    """One line per field that differs, sorted: ``batch.micro_size: 4 in the checkpoint, 8 now``."""
    lines = []
    for name in sorted({*a, *b}):
        first, second = (json.dumps(fields[name]) if name in fields else ABSENT for fields in (a, b))
        if first != second:
            lines.append(f"{name}: {first} {where[0]}, {second} {where[1]}")
    return lines
