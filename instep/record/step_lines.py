"""``steps.jsonl``: one line per step, from which runs are plotted, summed up, and compared bit by bit. Pure.

    {"event": "started", "step": 0, "restarts": 0, "world_size": 2, "placement": {"dp": 2}, ...}
    {"event": "evaluated", "step": 0, "held_out_loss": 5.56}
    {"step": 0, "cursor": 32, "loss": 5.5, "norm": 0.75, "rate": 0.001, "step_ms": 71.2, ...,
     "sampled": [["head.weight", 3, "9f0a51c2"], ...]}

Steps are numbered from 0. An event stands before its ``step``; a step's line says what the step computed, and
its hashes are those of the state after it: ``sampled`` the blocks whose turn it is (``state.hash``), every so
many steps ``state_sha256`` with the hash of each of its ``entries``. JSON numbers have all bits of a float.
A run that was asked for it has the hash of each micro-batch's gradient, the leaves of the sum tree, and of
their sum, by parameter (of a pipeline each stage computes some of the parameters):

    "leaves": [{"leaf": 3, "rank": 1, "parameters": {"head.weight": "9f0a51c2d4e6b870", ...}}, ...],
    "reduced": {"head.weight": "51c2d4e6b8709f0a", ...}

The run may have been killed in the middle of a line, or go on while it is read; what cannot be understood is
a ``ValueError`` that names file, line and field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from instep.record.directory import RECORD
from instep.record.jsonl import NOT_JSON, Fields, each_line, finite, numbers_of, read_last_lines, read_lines
from instep.record.shape import Shape, short

SAMPLE_EVERY = 50  # steps until each block of the state has been sampled once
STARTED, ACCEPTED, EVALUATED = "started", "contract accepted", "evaluated"
LAYOUT = ("world_size", "placement", "strategy", "parallel")  # of a start
FIGURES = ("loss", "norm", "rate", "step_ms", "exposed_ms", "waiting_ms")
BUBBLE_MS = "bubble_ms"  # among what is logged of a pipeline: waited for other stages

Digests = Mapping[str, str]
"""Short hashes by name."""
StateDigests = tuple[str, Digests]
"""``state_sha256`` and the short hash of each entry: the result of ``state.hash.state_digests``."""


@dataclass
class Made:
    """The figures of one step, the same on every rank but for the times; None for one that is not known.

    Among ``logged`` is the throughput, whose name ends in ``_per_s``: ``tokens_per_s``, ``samples_per_s``.
    """

    loss: float | None = None
    rate: float | None = None
    norm: float | None = None
    step_ms: float = 0.0
    exposed_ms: float = 0.0  # waited while messages travelled
    waiting_ms: float = 0.0  # waited for a slower rank
    skipped: str = ""  # why, if the step was skipped
    logged: dict[str, float] = field(default_factory=dict)  # figures that the training adds
    stop: bool = False  # a rank has been asked to end the run
    finish: bool = False  # the script has asked for no more steps
    regroup: bool = False  # a rank has been asked to leave the group
    copy: bool = False  # it is time for a snapshot

    @property
    def figures(self) -> dict[str, float]:
        """All known numbers by name, those of the training included."""
        return {name: x for name in FIGURES if (x := getattr(self, name)) is not None} | self.logged

    def to_json(self) -> Fields:
        """For a checkpoint, or another process."""
        fields: Fields = finite(asdict(self))
        return fields

    @classmethod
    def from_json(cls, fields: Fields) -> Made:
        """What ``to_json`` was made of."""
        return cls(**{**numbers_of(fields), "logged": numbers_of(fields["logged"])})


def started(step: int, layout: Fields, *, state: StateDigests | None = None, **fields: Any) -> Fields:
    """The line of a run that begins, or goes on, with ``step``, from ``state``.

    ``layout`` has the fields of ``LAYOUT``; ``fields`` are the contract's ``fingerprint`` and ``numerical``,
    how many ``restarts`` there were before, and the ``generation``, which counts the groups of ranks since
    the command was given.
    """
    return {"event": STARTED, "step": step, **fields, **layout, **_state_fields(state)}


def accepted(step: int, differences: Sequence[str]) -> Fields:
    """The line of a run that goes on with ``step`` under another contract, because the user said so."""
    return {"event": ACCEPTED, "step": step, "differences": list(differences)}


def evaluated(held_out_loss: float) -> Fields:
    """The line of the initial weights."""
    return {"event": EVALUATED, "step": 0, "held_out_loss": held_out_loss}


def step_line(
    step: int,
    made: Made,
    *,
    cursor: int,
    sampled: Sequence[Sequence[Any]],
    whole: StateDigests | None = None,
    **more: Any,
) -> Fields:
    """The line of ``step``, which has read the samples up to ``cursor``; ``whole`` is the state after it."""
    skipped = {"skipped": made.skipped} if made.skipped else {}
    blocks = [list(block) for block in sampled]
    own = {"step": step, "cursor": cursor, **skipped, **made.figures, **more}
    return {**own, "sampled": blocks, **_state_fields(whole)}


def _state_fields(state: StateDigests | None) -> Fields:
    return {} if state is None else {"state_sha256": state[0], "entries": dict(state[1])}


def steps_recorded(path: Path) -> int:
    """How many steps ``path`` has lines of; -1 if there is not even one of the initial weights."""
    lines = read_last_lines(path / RECORD, LINES)
    done = [line["step"] + 1 for line in lines if "event" not in line]
    return max(done) if done else 0 if any(line["event"] == EVALUATED for line in lines) else -1


def starts(path: Path) -> list[Fields]:
    """The starts of the run in ``path`` so far."""
    return _events(path, STARTED, STARTS)


def is_of_another_contract(path: Path, step: int) -> bool:
    """Whether the run has gone on with ``step`` under a new contract."""
    return any(line["step"] == step for line in _events(path, ACCEPTED, LINES))


def _events(path: Path, name: str, shape: Shape) -> list[Fields]:
    return read_lines(path / RECORD, shape=shape, mark=f'{{"event": "{name}"'.encode())


def part_begins(starts: Sequence[Mapping[str, Any]]) -> int:
    """The first step of the last part of a run, from its ``starts``.

    A part is what one command has made in one layout. Replaced ranks continue it; ``--resume`` begins
    another, and so does another number of ranks.
    """
    part: list[Mapping[str, Any]] = []
    for start in reversed(starts):
        if part and not _continues(part[-1], start):
            break
        part.append(start)
    step = part[-1].get("step") if part else 0
    return step if isinstance(step, int) else 0


def _continues(start: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether ``start`` is of the command that has made ``before``, in the same layout."""
    earlier, later = before.get("generation", 1), start.get("generation", 1)
    is_next = isinstance(earlier, int) and isinstance(later, int) and earlier < later
    return is_next and all(before.get(name) == start.get(name) for name in LAYOUT)


@dataclass(frozen=True)
class RecordedMicroBatch:
    """The hash of each parameter's gradient of a micro-batch, and the ``ranks`` that computed them: stages of
    a pipeline compute some each."""

    parameters: Digests
    ranks: Mapping[str, int]

    def rank_of(self, name: str) -> int:
        """The rank that computed the gradient of ``name``; of a parameter without one, of any other."""
        return self.ranks.get(name, next(iter(self.ranks.values()), -1))


@dataclass(frozen=True)
class RecordedStep:
    """The line of a step; a field that the line does not have is None or empty. Floats are text here: two are
    the same if their digits are, NaN and -0.0 included."""

    cursor: int | None = None
    loss: str | None = None
    norm: str | None = None
    skipped: str = ""
    sampled: Mapping[tuple[str, int], str] = field(default_factory=dict)
    whole: StateDigests | None = None
    logged: Mapping[str, float] = field(default_factory=dict)  # by the script
    leaves: Mapping[int, RecordedMicroBatch] = field(default_factory=dict)
    reduced: Digests | None = None  # None: the run was not asked for hashes of gradients


@dataclass
class RecordedRun:
    """All lines of a run."""

    path: Path
    steps: dict[int, RecordedStep] = field(default_factory=dict)
    starts: list[Fields] = field(default_factory=list)
    accepted: list[Fields] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def numerical(self) -> Mapping[str, Any]:
        """The numerical configuration that the run began under; empty if there is no start."""
        return self.starts[0].get("numerical", {}) if self.starts else {}

    def whole(self, step: int) -> StateDigests | None:
        """The hashes of the whole state after ``step``, from its line or from the start after it; -1: those
        of the initial state."""
        if step in self.steps and self.steps[step].whole is not None:
            return self.steps[step].whole
        return next((_state_digests(line) for line in self.starts if line["step"] == step + 1), None)


def read_run(path: Path) -> RecordedRun:
    """The run in directory ``path``.

    Raises:
        ValueError: it is no run, or its lines cannot be understood.
    """
    if not path.is_dir():
        got = "a file" if path.exists() else "none"
        raise ValueError(f"{path}: expected the directory of a run, got {got}")
    if not (path / RECORD).is_file():
        raise ValueError(f"{path} has no {RECORD}: expected the directory of a run")
    run = RecordedRun(path)
    for number, data, line in each_line(path / RECORD):
        where = f"{path / RECORD}, line {number}"
        if line is NOT_JSON and not data.endswith(b"\n"):  # it was being written when the run was killed
            run.notes.append(f"{where}: torn, and left out")
            break
        problem = f"expected JSON, got {short(data)}" if line is NOT_JSON else LINES.problem(line)
        if problem:
            raise ValueError(f"{where}: {problem}")
        if "event" not in line:
            run.steps[line["step"]] = _recorded_step(line)
        elif line["event"] in (STARTED, ACCEPTED):
            (run.starts if line["event"] == STARTED else run.accepted).append(line)
    return run


def placement_text(line: Mapping[str, Any]) -> str:
    """The placement that a start names, in words: ``dp=2, bucketed``."""
    axes = [f"{axis}={size}" for axis, size in line.get("placement", {}).items()]
    if not axes and "world_size" in line:
        axes = [f"{line['world_size']} ranks"]
    return ", ".join([*axes, *([line["strategy"]] if "strategy" in line else [])])


def _recorded_step(line: Fields) -> RecordedStep:
    leaves: dict[int, RecordedMicroBatch] = {}
    for each in line.get("leaves", ()):
        known = leaves.get(each["leaf"], RecordedMicroBatch({}, {}))
        parameters = {**known.parameters, **each["parameters"]}
        ranks = {**known.ranks, **dict.fromkeys(each["parameters"], each["rank"])}
        leaves[each["leaf"]] = RecordedMicroBatch(parameters, ranks)
    return RecordedStep(
        cursor=line.get("cursor"),
        loss=repr(float(line["loss"])) if "loss" in line else None,
        norm=repr(float(line["norm"])) if "norm" in line else None,
        skipped=line.get("skipped", ""),
        sampled={(name, block): digest for name, block, digest in line.get("sampled", ())},
        whole=_state_digests(line),
        logged=of_script(line),
        leaves=leaves,
        reduced=line.get("reduced"),
    )


def _state_digests(line: Fields) -> StateDigests | None:
    return (line["state_sha256"], line.get("entries", {})) if "state_sha256" in line else None


class Leaf(TypedDict):
    """The gradient of a micro-batch, or of some of its parameters."""

    leaf: int
    rank: int
    parameters: dict[str, str]


EVENT_FIELDS: Mapping[str, Any] = {
    "event": str,
    "world_size": int,
    "placement": dict[str, int],
    "strategy": str,
    "parallel": dict[str, Any],
    "restarts": int,
    "generation": int,
    "fingerprint": str,
    "numerical": dict[str, str | float | bool | None],
    "differences": list[str],
}
STEP_FIELDS: Mapping[str, Any] = {
    "step": int,
    "cursor": int,
    "skipped": str,
    "sampled": list[tuple[str, int, str]],
    "state_sha256": str,
    "entries": dict[str, str],
    "leaves": list[Leaf],
    "reduced": dict[str, str],
}
LINES = Shape({**EVENT_FIELDS, **STEP_FIELDS}, required={"step"}, others=float)
STARTS = Shape(LINES.kinds, required={"step", "fingerprint", "numerical"}, others=float)
# Names of figures that the run writes itself; a script logs others, and the loss.
RESERVED = {*LINES.kinds, *FIGURES, "held_out_loss"} - {"loss"}
PER_S = "_per_s"  # ends the name of the throughput


def of_script(line: Mapping[str, Any]) -> dict[str, float]:
    """The figures in the line of a step that the script has logged, but for the loss."""
    names = (name for name in line if name not in RESERVED and name not in ("loss", BUBBLE_MS))
    return {name: line[name] for name in names if not name.endswith(PER_S)}
