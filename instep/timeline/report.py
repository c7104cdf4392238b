"""The report on a run as one static HTML file that needs nothing else: text, tables and pictures.

The page loads nothing and may load nothing, nor run a script: its Content-Security-Policy names the hash of
its one style, and allows no address. What is in a report is untrusted (a run may be called ``<script>``):
``json_safe`` keeps what any file can hold, and jinja escapes it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from jinja2 import ChainableUndefined, Environment, FileSystemLoader, Undefined
from markupsafe import Markup

from instep.timeline.breakdown import (
    BUBBLE,
    COMPUTE,
    DATA,
    EXPOSED,
    HOST,
    PARTS,
    UNATTRIBUTED,
    UPDATE,
    WAITING,
)
from instep.timeline.palette import COLOURS

FILES = Path(__file__).parent / "page"
NOTHING = "\u2013"
MOST_DEPTH = 20  # of what lies in each other
WORTH_SAYING = 0.03  # of a step; the headline leaves out what takes less
STATES = {
    "running": "The run is still going: these are its figures so far.",
    "ended early": "The run ended early: what it had recorded until then is here.",
    "failed": "The run failed: what it had recorded until then is here.",
}

Pictures: TypeAlias = Mapping[str, Sequence[tuple[str, bytes]]]
"""By the page's section "timeline", "over_time" or "curves": captions, each with a PNG."""


def render(report: Mapping[str, Any], pictures: Pictures | None = None) -> str:
    """The page of ``report``, which has the shape of ``report.json``; any section may be missing."""
    safe = json_safe(report)
    colours = {_slug(name): COLOURS[name] for name in PARTS}
    rules = (f".{name} {{ background: {colour}; fill: {colour}; }}\n" for name, colour in colours.items())
    style = (FILES / "page.css").read_text() + "".join(rules)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            report=safe,
            pictures=pictures or {},
            style=Markup(style),
            style_hash=f"sha256-{digest}",
            headline=headline(safe),
            mean=mean_parts(safe),
            state=STATES.get(str((safe.get("run") or {}).get("state")), ""),
        )
    )


def headline(report: Mapping[str, Any]) -> str:
    """Where a step goes, in one sentence: "61 % of a step is compute; 22 % waits for rank 2"."""
    parts = mean_parts(report)
    wall = sum(parts.values())
    if not wall:
        return "No step was recorded from its begin to its end"
    slow = (report.get("slow") or {}).get("rank")
    share = {name: value / wall for name, value in parts.items()}
    others = sorted((name for name in share if name != COMPUTE), key=lambda name: -share[name])
    worth = [name for name in others if share[name] >= WORTH_SAYING][:2]
    verbs = [_verb(name, slow) for name in worth]
    # Said once: "13 % waits for rank 2, 12 % for messages".
    if all(verb.startswith("waits ") for verb in verbs):
        verbs[1:] = [verb.removeprefix("waits ") for verb in verbs[1:]]
    said = ", ".join(f"{_percent(share[name])} {verb}" for name, verb in zip(worth, verbs, strict=True))
    begin = f"{_percent(share.get(COMPUTE, 0))} of a step is compute"
    return f"{begin}; {said or f'nothing else takes {_percent(WORTH_SAYING)}'}"


def mean_parts(report: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of each part, the mean over the ranks."""
    breakdown = report.get("breakdown") or {}
    ranks = breakdown.get("ranks") or []
    return {
        name: fmean((rank.get("parts") or {}).get(name) or 0.0 for rank in ranks)
        for name in breakdown.get("parts") or []
        if ranks
    }


def _verb(part: str, slow: int | None) -> str:
    return {
        EXPOSED: "waits for messages",
        WAITING: "waits for slower ranks" if slow is None else f"waits for rank\u00a0{slow}",
        BUBBLE: "is the pipeline's bubble",
        DATA: "waits for data",
        UPDATE: "updates the weights",
        HOST: "is host work",
        UNATTRIBUTED: "is not accounted for",
    }.get(part, f"is {part}")


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FILES),
        autoescape=True,
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ms": _milliseconds, "number": _number, "percent": _percent, "flat": _flat, "columns": _columns,
        "slug": _slug, "figure": _figure, "source": _source,
    }  # fmt: skip
    return environment


def _slug(name: object) -> str:
    return str(name).replace(" ", "-")


def _source(png: bytes) -> str:
    """A picture as the address of an image, which has it whole."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any, digits: int = 1) -> str:
    return f"{value:,.{digits}f}" if _is_number(value) else NOTHING


def _milliseconds(value: Any) -> str:
    """Three figures or so: 0.04, 1.25, 12.5, 125."""
    if not _is_number(value):
        return NOTHING
    size = abs(value)
    return _number(value, 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2)


def _percent(share: Any) -> str:
    if not _is_number(share):
        return NOTHING
    return f"{100 * share:.{0 if abs(share) >= 0.0995 or share == 0 else 1}f}\u00a0%"


def _figure(value: Any) -> str:
    """A figure of the summary or of a table, whatever it is."""
    if value is None or isinstance(value, Undefined):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value, 0) if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return str(value) if abs(value) < 10_000 else f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flat(fields: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested fields by dotted names, as in a TOML file."""
    if not isinstance(fields, Mapping):
        return []
    rows: list[tuple[str, Any]] = []
    for name, value in fields.items():
        rows += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return rows


def _columns(rows: Any) -> list[str]:
    """Every key that some row has, in the order in which they come."""
    rows = rows if isinstance(rows, Sequence) else []
    return list(dict.fromkeys(key for row in rows if isinstance(row, Mapping) for key in row))


def json_safe(value: Any, depth: int = 0) -> Any:
    """A copy in which every number is finite and every word can be written; None for what cannot be kept."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else None
    if value is None or depth == MOST_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {printable(str(key)): json_safe(each, depth + 1) for key, each in value.items()}
    return [json_safe(each, depth + 1) for each in value]


def printable(text: str) -> str:
    """``text`` without what is no letter in any file: a path need not be text."""
    return text.encode(errors="replace").decode()
