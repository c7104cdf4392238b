"""The ledger: the lines by which two runs are compared bit by bit, how they are written and read. Pure.

    {"step": 7, "cursor": 224, "loss": "0x1.2p+2", "grad_norm": "0x1.8p-1", "world_size": 2,
     "placement": {"dp": 2}, "strategy": "bucketed", "sampled": [["head.weight", 3, "9f0a51c2"], ...]}
    {"step": 7, "event": "started", "restarts": 1, ...}

``step`` is the number of steps done. Floats are written as hexadecimal: bits, not digits. ``sampled`` has the
blocks whose turn it is (``state.hash``); every so many steps there are ``state_sha256`` and the hash of
each of its ``entries`` too. After a crash a step may be there twice; the last line of it counts.

``leaves.jsonl`` has, if a run was asked for it, the hashes of each micro-batch's gradient, of a pipeline a
line of each stage, and of their sum:

    {"step": 7, "leaf": 3, "rank": 1, "parameters": {"head.weight": "9f0a51c2d4e6b870", ...}}
    {"step": 7, "reduced": {"head.weight": "51c2d4e6b8709f0a", ...}}

The files that are read may be of a run that was killed in the middle of a line, of one that still goes on, or
no ledger at all; what cannot be understood is a ``ValueError`` that names file, line and field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.run.jsonl import NOT_JSON, Fields, each_line
from instep.run.shape import COUNT, TEXT, Kind, Shape, is_count, is_text, short

LEDGER = "ledger.jsonl"
LEAVES = "leaves.jsonl"
SAMPLE_EVERY = 50  # steps until each block of the state has been sampled once
STARTED, ACCEPTED = "started", "contract accepted"
LAYOUT = ("world_size", "placement", "strategy", "parallel")  # of a start

Digests = Mapping[str, str]
"""Short hashes by name."""
StateDigests = tuple[str, Digests]
"""``state_sha256`` and the short hash of each entry: what ``state.hash.state_digests`` gives."""
Write = Callable[..., None]
"""Writes its keyword arguments down as one line."""


@dataclass(frozen=True)
class Placement:
    """Who does the work: the mesh's axes by name, and the strategy among the ranks of ``dp``.

    ``parallel`` has all that the run was told of it; only a start says so much.
    """

    axes: Mapping[str, int]
    strategy: str
    world_size: int
    parallel: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> Fields:
        """As it stands in a line."""
        return {"world_size": self.world_size, "placement": dict(self.axes), "strategy": self.strategy}

    def layout(self) -> Fields:
        """As it stands in the line of a start."""
        return {**self.fields(), "parallel": dict(self.parallel)}


def part_begins(starts: Sequence[Mapping[str, Any]]) -> int:
    """The step after which the last part of a run begins, of the lines of its ``starts``.

    A part is what one command has made in one layout. Ranks that are replaced go on with it; ``--resume``
    begins another, and so does another number of ranks.
    """
    part: list[Mapping[str, Any]] = []
    for start in reversed(starts):
        if part and not _goes_on(part[-1], start):
            break
        part.append(start)
    step = part[-1].get("step") if part else 0
    return step if isinstance(step, int) else 0


def _goes_on(start: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether ``start`` is of the command that has made ``before``, in the same layout."""
    earlier, later = before.get("generation", 1), start.get("generation", 1)
    is_next = isinstance(earlier, int) and isinstance(later, int) and earlier < later
    return is_next and all(before.get(name) == start.get(name) for name in LAYOUT)


class LedgerWriter:
    """Says what is worth a line; ``write`` puts it down. Only rank 0 has one.

    In time order: ``started``, with ``accepted`` before the first step if the contract is a new one; then
    ``step`` after every step. Other ranks begin with ``started`` again.
    """

    def __init__(self, write: Write, placement: Placement, *, every: int) -> None:
        """``every`` steps the whole state is hashed; 0: at the end only."""
        self._write = write
        self.placement = placement
        self.every = every

    def is_whole(self, step: int, *, last: bool) -> bool:
        """Whether the line of ``step`` shall have the hash of the whole state."""
        return last or (self.every > 0 and step % self.every == 0)

    def started(
        self,
        step: int,
        *,
        restarts: int,
        fingerprint: str,
        numerical: Mapping[str, Any],
        canary: str,
        state: StateDigests | None = None,
        generation: int = 1,
    ) -> None:
        """The run begins, or goes on, after ``step``; ``state`` is what it goes on from.

        ``generation`` counts the groups of ranks since the command was given.
        """
        self._event(
            STARTED,
            step,
            restarts=restarts,
            **self.placement.layout(),
            fingerprint=fingerprint,
            canary=canary,
            generation=generation,
            numerical=dict(numerical),
            **_state_fields(state),
        )

    def accepted(self, step: int, differences: Sequence[str]) -> None:
        """From ``step`` on the run is under another contract, because the user said so."""
        self._event(ACCEPTED, step, differences=list(differences))

    def step(
        self,
        step: int,
        *,
        cursor: int,
        loss: float,
        norm: float,
        sampled: Sequence[Sequence[Any]],
        whole: StateDigests | None = None,
        skipped: str = "",
    ) -> None:
        """Step number ``step`` is done, with samples up to ``cursor``; ``skipped`` says why not applied."""
        self._write(
            step=step,
            cursor=cursor,
            loss=float(loss).hex(),
            grad_norm=float(norm).hex(),
            **self.placement.fields(),
            sampled=[list(block) for block in sampled],
            **_state_fields(whole),
            **({"skipped": skipped} if skipped else {}),
        )

    def _event(self, name: str, step: int, **fields: Any) -> None:
        self._write(step=step, event=name, **fields)


def _state_fields(state: StateDigests | None) -> Fields:
    return {} if state is None else {"state_sha256": state[0], "entries": dict(state[1])}


@dataclass(frozen=True)
class RecordedStep:
    """One line of a step; a field that the line does not have is None or empty."""

    cursor: int | None
    loss: str | None
    norm: str | None
    skipped: str
    sampled: Mapping[tuple[str, int], str]
    whole: StateDigests | None
    placement: str


@dataclass(frozen=True)
class RecordedMicroBatch:
    """The hash of each parameter's gradient of a micro-batch, and which rank computed it: ``rank``, but where
    ``ranks`` says another, since stages of a pipeline are computed by one each."""

    rank: int
    parameters: Digests
    ranks: Mapping[str, int] = field(default_factory=dict)

    def rank_of(self, name: str) -> int:
        """Which rank computed the gradient of the parameter ``name``."""
        return self.ranks.get(name, self.rank)

    def taken(self, rank: int, parameters: Digests) -> RecordedMicroBatch:
        """This, and what a later line says that ``rank`` computed."""
        ranks = {**self.ranks, **dict.fromkeys(parameters, rank)}
        return RecordedMicroBatch(self.rank, {**self.parameters, **parameters}, ranks)


@dataclass
class RecordedRun:
    """Everything that was read, by steps done. ``remade``: steps made again, with other bits than before."""

    path: Path
    steps: dict[int, RecordedStep] = field(default_factory=dict)
    starts: list[Fields] = field(default_factory=list)
    accepted: list[Fields] = field(default_factory=list)
    others: list[Fields] = field(default_factory=list)
    remade: list[int] = field(default_factory=list)
    leaves: dict[int, dict[int, RecordedMicroBatch]] = field(default_factory=dict)
    reduced: dict[int, Digests] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def numerical(self) -> Mapping[str, Any]:
        """The numerical configuration that the run began under; empty if its ledger has none."""
        return self.starts[0].get("numerical", {}) if self.starts else {}

    def whole(self, step: int) -> StateDigests | None:
        """The hashes of the whole state after ``step``, from its line or from a start there."""
        if step in self.steps and self.steps[step].whole is not None:
            return self.steps[step].whole
        return next((_state_digests(line) for line in self.starts if line["step"] == step), None)


def read_run(path: Path) -> RecordedRun:
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
    run = RecordedRun(path)
    for line in _checked_lines(path / LEDGER, LINES, run.notes):
        _take(run, line)
    if (path / LEAVES).is_file():
        for line in _checked_lines(path / LEAVES, LEAF_LINES, run.notes):
            if "leaf" in line:
                computed = line["rank"], line["parameters"]
                its = run.leaves.setdefault(line["step"], {})
                known = its.get(line["leaf"])
                its[line["leaf"]] = known.taken(*computed) if known else RecordedMicroBatch(*computed)
            elif "reduced" in line:
                run.reduced[line["step"]] = line["reduced"]
    return run


def placement_text(line: Mapping[str, Any]) -> str:
    """Who did the work of a line, in words: ``dp=2, bucketed``."""
    axes = [f"{axis}={size}" for axis, size in line.get("placement", {}).items()]
    if not axes and "world_size" in line:
        axes = [f"{line['world_size']} ranks"]
    return ", ".join([*axes, *([line["strategy"]] if "strategy" in line else [])])


def _take(run: RecordedRun, line: Fields) -> None:
    """Put one line of the ledger where it belongs; the last line of a step counts."""
    if "event" in line:
        kinds = {STARTED: run.starts, ACCEPTED: run.accepted}
        kinds.get(line["event"], run.others).append(line)
        return
    number, step = line["step"], _recorded_step(line)
    before = run.steps.get(number)
    if before is not None and (before.loss, before.norm) != (step.loss, step.norm):
        run.remade.append(number)
    run.steps[number] = step


def _recorded_step(line: Fields) -> RecordedStep:
    return RecordedStep(
        cursor=line.get("cursor"),
        loss=line.get("loss"),
        norm=line.get("grad_norm"),
        skipped=line.get("skipped", ""),
        sampled={(name, block): digest for name, block, digest in line.get("sampled", ())},
        whole=_state_digests(line),
        placement=placement_text(line),
    )


def _state_digests(line: Fields) -> StateDigests | None:
    return (line["state_sha256"], line.get("entries", {})) if "state_sha256" in line else None


def _checked_lines(path: Path, shape: Shape, notes: list[str]) -> Iterator[Fields]:
    """The lines of a file; a last one without an end was being written when the run was killed."""
    for number, (data, line) in enumerate(each_line(path), start=1):
        where = f"{path}, line {number}"
        if line is NOT_JSON:
            if data.endswith(b"\n"):
                raise ValueError(f"{where}: expected JSON, got {short(data)}")
            notes.append(f"{where}: torn, and left out")
            return
        if problem := shape.problem(line):
            raise ValueError(f"{where}: {problem}")
        if "leaf" in line and not {"rank", "parameters"} <= line.keys():
            raise ValueError(f"{where}: expected 'rank' and 'parameters' beside 'leaf'")
        yield line


def _is_bits(value: Any) -> bool:
    try:
        return type(value) is str and isinstance(float.fromhex(value), float)
    except (ValueError, OverflowError):
        return False


def _is_digests(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_text, value.values()))


def _is_sample(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(x, list) and len(x) == 3 and is_text(x[0]) and is_count(x[1]) and is_text(x[2])
        for x in value
    )


def _is_scalars(value: Any) -> bool:
    return isinstance(value, dict) and not any(isinstance(x, dict | list) for x in value.values())


BITS: Kind = ("a float in hexadecimal", _is_bits)
DIGESTS: Kind = ("an object of hashes", _is_digests)
LINES = Shape(
    {
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
        "placement": ("an object of sizes", lambda x: isinstance(x, dict) and all(map(is_count, x.values()))),
        "strategy": TEXT,
        "restarts": COUNT,
        "fingerprint": TEXT,
        "canary": TEXT,
        "numerical": ("an object of settings", _is_scalars),
        "differences": ("a list of text", lambda x: isinstance(x, list) and all(map(is_text, x))),
    },
    required={"step"},
)
STARTS = Shape(LINES.kinds, required={"step", "fingerprint", "canary", "numerical"})
LEAF_LINES = Shape(
    {"step": COUNT, "leaf": COUNT, "rank": COUNT, "parameters": DIGESTS, "reduced": DIGESTS},
    required={"step"},
)
