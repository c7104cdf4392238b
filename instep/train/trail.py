"""What a run has left to compare it by: its ledger and its leaf hashes, read with doubt.

The files may be of a run that was killed in the middle of a line, of one that still goes on, or no ledger at
all; whatever cannot be read is a ``ValueError`` that names file, line and field. No torch is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.train.ledger import ACCEPTED, LEAVES, LEDGER, STARTED, Whole

Digests = Mapping[str, str]
Line = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One line of a step; a field that the line does not have is None or empty."""

    cursor: int | None
    loss: str | None
    norm: str | None
    skipped: str
    sampled: Mapping[tuple[str, int], str]
    whole: Whole | None
    placement: str


@dataclass(frozen=True)
class Leaf:
    """Who computed a micro-batch, and the hash of each parameter's gradient."""

    rank: int
    parameters: Digests


@dataclass
class Run:
    """Everything that was read, by steps done. ``remade``: steps made again, with other bits than before."""

    path: Path
    steps: dict[int, Step] = field(default_factory=dict)
    starts: list[Line] = field(default_factory=list)
    accepted: list[Line] = field(default_factory=list)
    others: list[Line] = field(default_factory=list)
    remade: list[int] = field(default_factory=list)
    leaves: dict[int, dict[int, Leaf]] = field(default_factory=dict)
    reduced: dict[int, Digests] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def numerical(self) -> Mapping[str, Any]:
        """The numerical configuration that the run began under; empty if its ledger has none."""
        return self.starts[0].get("numerical", {}) if self.starts else {}

    def whole(self, step: int) -> Whole | None:
        """The hashes of the whole state after ``step``, from its line or from a start there."""
        if step in self.steps and self.steps[step].whole is not None:
            return self.steps[step].whole
        return next((_whole(line) for line in self.starts if line["step"] == step), None)


def read_run(path: Path) -> Run:
    """The run in directory ``path``.

    Raises:
        ValueError: it is no run, or a file of it cannot be understood.
    """
    if not path.is_dir():
        raise ValueError(
            f"{path}: expected the directory of a run, got {'a file' if path.exists() else 'none'}"
        )
    if not (path / LEDGER).is_file():
        raise ValueError(f"{path} has no {LEDGER}: expected the directory of a run of instep train")
    run = Run(path)
    for line in _lines(path / LEDGER, KINDS, run.notes):
        _take(run, line)
    if (path / LEAVES).is_file():
        for line in _lines(path / LEAVES, LEAF_KINDS, run.notes):
            if "leaf" in line:
                leaf = Leaf(line["rank"], line["parameters"])
                run.leaves.setdefault(line["step"], {})[line["leaf"]] = leaf
            elif "reduced" in line:
                run.reduced[line["step"]] = line["reduced"]
    return run


def _take(run: Run, line: Line) -> None:
    """Put one line of the ledger where it belongs; the last line of a step counts."""
    if "event" in line:
        kinds = {STARTED: run.starts, ACCEPTED: run.accepted}
        kinds.get(line["event"], run.others).append(line)
        return
    number, step = line["step"], _step(line)
    before = run.steps.get(number)
    if before is not None and (before.loss, before.norm) != (step.loss, step.norm):
        run.remade.append(number)
    run.steps[number] = step


def _step(line: Line) -> Step:
    return Step(
        cursor=line.get("cursor"),
        loss=line.get("loss"),
        norm=line.get("grad_norm"),
        skipped=line.get("skipped", ""),
        sampled={(name, block): digest for name, block, digest in line.get("sampled", ())},
        whole=_whole(line),
        placement=placement(line),
    )


def placement(line: Line) -> str:
    """Who did the work of a line, in words: ``dp=2, bucketed``."""
    axes = [f"{axis}={size}" for axis, size in line.get("placement", {}).items()]
    if not axes and "world_size" in line:
        axes = [f"{line['world_size']} ranks"]
    return ", ".join([*axes, *([line["strategy"]] if "strategy" in line else [])])


def _whole(line: Line) -> Whole | None:
    return (line["state_sha256"], line.get("entries", {})) if "state_sha256" in line else None


def _lines(path: Path, kinds: Mapping[str, Kind], notes: list[str]) -> Iterator[Line]:
    """The lines of a JSONL file; a last one without an end was being written when the run was killed."""
    with path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                line = json.loads(data)
            except (ValueError, RecursionError):
                if data.endswith(b"\n"):
                    raise ValueError(f"{where}: expected JSON, got {_short(data)}") from None
                notes.append(f"{where}: torn, and left out")
                return
            yield _checked(line, kinds, where)


def _checked(line: Any, kinds: Mapping[str, Kind], where: str) -> Line:
    """``line`` if it has a step, and every field that it has is of its kind."""
    if not isinstance(line, dict):
        raise ValueError(f"{where}: expected a JSON object, got {_short(line)}")
    if "step" not in line:
        raise ValueError(f"{where}: expected a field 'step', got {', '.join(map(repr, line)) or 'none'}")
    for name, (words, holds) in kinds.items():
        if name in line and not holds(line[name]):
            raise ValueError(f"{where}: {name}: expected {words}, got {_short(line[name])}")
    if "leaf" in line and not {"rank", "parameters"} <= set(line):
        raise ValueError(f"{where}: expected 'rank' and 'parameters' beside 'leaf'")
    return line


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_bits(value: Any) -> bool:
    try:
        return type(value) is str and isinstance(float.fromhex(value), float)
    except (ValueError, OverflowError):
        return False


def _is_digests(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_sample(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(x, list) and len(x) == 3 and _is_text(x[0]) and _is_count(x[1]) and _is_text(x[2])
        for x in value
    )


def _is_scalars(value: Any) -> bool:
    return isinstance(value, dict) and not any(isinstance(x, dict | list) for x in value.values())


Kind = tuple[str, Callable[[Any], bool]]
COUNT: Kind = ("a whole number from 0", _is_count)
TEXT: Kind = ("text", _is_text)
BITS: Kind = ("a float in hexadecimal", _is_bits)
DIGESTS: Kind = ("an object of hashes", _is_digests)
KINDS: Mapping[str, Kind] = {
    "step": COUNT,
    "event": TEXT,
    "cursor": COUNT,
    "loss": BITS,
    "grad_norm": BITS,
    "skipped": TEXT,
    "sampled": ("a list of name, block and hash", _is_sample),
    "state_sha256": TEXT,
    "entries": DIGESTS,
    "world_size": COUNT,
    "placement": ("an object of sizes", lambda x: isinstance(x, dict) and all(map(_is_count, x.values()))),
    "strategy": TEXT,
    "restarts": COUNT,
    "fingerprint": TEXT,
    "canary": TEXT,
    "numerical": ("an object of settings", _is_scalars),
    "differences": ("a list of text", lambda x: isinstance(x, list) and all(map(_is_text, x))),
}
LEAF_KINDS: Mapping[str, Kind] = {
    "step": COUNT,
    "leaf": COUNT,
    "rank": COUNT,
    "parameters": DIGESTS,
    "reduced": DIGESTS,
}
