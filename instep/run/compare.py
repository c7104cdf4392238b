"""Where two runs diverge: the first step, then the parameter, then what did it. Pure.

A step computes a gradient per micro-batch, reduces them to one, and updates the state with it, and each of
the three leaves bits behind:

    samples -> loss, gradient of each micro-batch                         computing
                     gradient of each micro-batch -> sum                  reducing
                                                     sum -> norm, state   updating

The first of these that differs while everything before it is the same is the cause. The hashes of the
micro-batches' gradients are only there for runs that wrote them (``--record.leaves``); without, the step and
the parameter are known, and how to learn the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from instep.checkpoint.manifest import differences
from instep.run.ledger import Digests, RecordedRun

COMPUTING, REDUCING, UPDATING, BEFORE = "computing", "reducing", "updating", "before"


@dataclass(frozen=True)
class DifferingMicroBatch:
    """A micro-batch whose gradient is another in the two runs."""

    leaf: int
    ranks: tuple[int, int]  # that computed it, or the first of ``parameters`` of it, in A and in B
    parameters: Sequence[str]  # in registration order


@dataclass(frozen=True)
class Cause:
    """Which part of a step did it, and why it must have been; BEFORE: something that came into the step."""

    part: str
    what: str
    leaves: Sequence[DifferingMicroBatch] = ()
    parameters: Sequence[str] = ()


@dataclass(frozen=True)
class FirstDifference:
    """The first step, counted in steps done, that is not the same in both runs, and what is known of it."""

    step: int
    fields: Mapping[str, tuple[str, str]]  # what differs, with both values, in the order of a step
    last_whole: int | None  # the last step before it after which the whole state was the same
    parameters: Sequence[str]  # whose state differs
    parameters_step: int | None  # the step that says so
    num_compared: int  # how many parameters, moments and buffers that step could tell of
    cause: Cause | None  # None: a run has no hashes of the step's micro-batches


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common."""

    contract: Sequence[str]  # fields that differ
    canaries: tuple[str, str] | None  # where they differ
    num_common: int  # steps that both have
    parting: FirstDifference | None  # None: every common step has the same bits
    troubles: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by run, what is wrong inside of it

    @property
    def same(self) -> bool:
        """Whether no bit that was written down differs."""
        return self.parting is None

    def as_json(self) -> dict[str, Any]:
        """Everything, in what JSON has."""
        return {"same": self.same, **asdict(self)}


def compare(a: RecordedRun, b: RecordedRun) -> Comparison:
    """Compare two runs over the steps that both have.

    Raises:
        ValueError: they have none in common.
    """
    common = sorted(a.steps.keys() & b.steps.keys())
    if not common:
        raise ValueError(f"{a.path} and {b.path} have no step in common, so there is nothing to compare")
    canaries = tuple(run.starts[0].get("canary", "") if run.starts else "" for run in (a, b))
    first = next((step for step in [0, *common] if fields_that_differ(a, b, step)), None)
    return Comparison(
        contract=differences(a.numerical, b.numerical, ("in A", "in B"))
        if a.numerical and b.numerical
        else [],
        canaries=(canaries[0], canaries[1]) if all(canaries) and canaries[0] != canaries[1] else None,
        num_common=len(common),
        parting=None if first is None else _parting(a, b, first, common),
        troubles={str(run.path): troubles(run) for run in (a, b)},
    )


def fields_that_differ(a: RecordedRun, b: RecordedRun, step: int) -> dict[str, tuple[str, str]]:
    """What is not the same in the lines of ``step``, in the order in which a step makes it."""
    found: dict[str, tuple[Any, Any]] = {}
    x, y = a.steps.get(step), b.steps.get(step)
    if x is not None and y is not None:
        found |= {"cursor": (x.cursor, y.cursor), "loss": (x.loss, y.loss)}
    if _has_hashes(a, b, step):
        odd = differing_micro_batches(a, b, step)
        found["leaves"] = ("", f"{len(odd)} differ") if odd else ("", "")
        names = _unequal(a.reduced[step], b.reduced[step])
        found["reduced gradient"] = ("", f"{len(names)} parameters differ") if names else ("", "")
    if x is not None and y is not None:
        blocks = [
            block for block in x.sampled.keys() & y.sampled.keys() if x.sampled[block] != y.sampled[block]
        ]
        found |= {"gradient norm": (x.norm, y.norm), "skipped": (x.skipped, y.skipped)}
        found["sampled blocks"] = ("", f"{len(blocks)} differ") if blocks else ("", "")
    whole = a.whole(step), b.whole(step)
    if whole[0] is not None and whole[1] is not None:
        found["state_sha256"] = (whole[0][0], whole[1][0])
    return {
        name: (str(left), str(right))
        for name, (left, right) in found.items()
        if left != right and left is not None and right is not None
    }


def troubles(run: RecordedRun) -> list[str]:
    """What a run's own ledger shows to be wrong: gaps, samples not read once, steps with two results."""
    lines = [f"step {step} was made again with other bits" for step in sorted(set(run.remade))]
    missing = [step for step in range(1, max(run.steps, default=0)) if step not in run.steps]
    if missing:
        lines.append(f"no line for {len(missing)} steps, the first of them {missing[0]}")
    size = run.numerical.get("batch.global_size")
    for step, line in sorted(run.steps.items()):
        if type(size) is int and line.cursor is not None and line.cursor != step * size:
            lines.append(
                f"after step {step} the data cursor is {line.cursor}, expected {step} * {size} = "
                f"{step * size}: samples were left out or read twice"
            )
            break
    return lines


def differing_micro_batches(a: RecordedRun, b: RecordedRun, step: int) -> list[DifferingMicroBatch]:
    """The micro-batches of ``step`` whose gradients differ, of those that both runs have."""
    ours, theirs = a.leaves[step], b.leaves[step]
    found = []
    for leaf in sorted(ours.keys() & theirs.keys()):
        names = _unequal(ours[leaf].parameters, theirs[leaf].parameters)
        if names:
            ranks = ours[leaf].rank_of(names[0]), theirs[leaf].rank_of(names[0])
            found.append(DifferingMicroBatch(leaf, ranks, names))
    return found


def _parting(a: RecordedRun, b: RecordedRun, step: int, common: Sequence[int]) -> FirstDifference:
    wholes = [t for t in [0, *common] if a.whole(t) is not None and b.whole(t) is not None]
    names, at, compared = _parameters(a, b, step, [t for t in common if t >= step])
    return FirstDifference(
        step=step,
        fields=fields_that_differ(a, b, step),
        last_whole=max((t for t in wholes if t < step), default=None),
        parameters=names,
        parameters_step=at,
        num_compared=compared,
        cause=_cause(a, b, step, wholes) if _has_hashes(a, b, step) else None,
    )


def _parameters(
    a: RecordedRun, b: RecordedRun, step: int, later: Sequence[int]
) -> tuple[list[str], int | None, int]:
    """The entries of the state that differ, by the first line from ``step`` on that names any."""
    for t in sorted({step, *later}):
        known: list[tuple[Mapping[Any, str], Mapping[Any, str]]] = []
        x, y = a.whole(t), b.whole(t)
        if x is not None and y is not None:
            known.append((x[1], y[1]))
        if t in a.steps and t in b.steps:
            known.append((a.steps[t].sampled, b.steps[t].sampled))
        for left, right in known:
            odd = [key for key in left if key in right and left[key] != right[key]]
            if odd:
                return _names(odd), t, len(_names(left.keys() & right.keys()))
    return [], None, 0


def _names(keys: Any) -> list[str]:
    """The entries' names, each once; of sampled blocks, those they lie in."""
    return list(dict.fromkeys(key if isinstance(key, str) else key[0] for key in keys))


def _cause(a: RecordedRun, b: RecordedRun, step: int, wholes: Sequence[int]) -> Cause:
    x, y = a.steps.get(step), b.steps.get(step)
    if x is not None and y is not None and x.cursor != y.cursor:
        return Cause(BEFORE, "the runs read other samples")
    if a.leaves[step].keys() != b.leaves[step].keys():
        numbers = len(a.leaves[step]), len(b.leaves[step])
        return Cause(BEFORE, f"the step has {numbers[0]} micro-batches in A and {numbers[1]} in B")
    odd = differing_micro_batches(a, b, step)
    same_before = step - 1 in wholes
    if odd and len(odd) == len(a.leaves[step]) and not same_before:
        what = (
            "the gradient of every micro-batch differs, so probably the weights before the step did already"
        )
        return Cause(BEFORE, what, leaves=odd)
    if odd:
        return Cause(COMPUTING, "gradients of micro-batches differ, before any was added to another", odd)
    names = _unequal(a.reduced[step], b.reduced[step])
    if names:
        what = "the gradient of every micro-batch is the same, their sum is not"
        return Cause(REDUCING, what, parameters=names)
    what = "the reduced gradient is the same, what was made of it is not"
    if not same_before:
        seen = max((t for t in wholes if t < step), default=None)
        since = f"after step {seen}" if seen is not None else "nowhere"
        what += f"; here, or in a step before: the whole state was last seen to be the same {since}"
    return Cause(UPDATING, what)


def _has_hashes(a: RecordedRun, b: RecordedRun, step: int) -> bool:
    """Whether both runs have all hashes of ``step``; that of the sum comes last, so the others are there."""
    return all(step in run.leaves and step in run.reduced for run in (a, b))


def _unequal(a: Digests, b: Digests) -> list[str]:
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]
