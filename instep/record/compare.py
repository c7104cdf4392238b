"""Where two runs diverge: the first step, then the parameter, then what did it. Pure.

A step computes a gradient per micro-batch, reduces them to one, and updates the state with it. Each of the
three leaves bits behind:

    samples -> loss, gradient of each micro-batch                         computing
                     gradient of each micro-batch -> sum                  reducing
                                                     sum -> norm, state   updating

The first of these that differs while everything before it is the same is the cause. Only runs that were
asked for it (``--record.leaves``) have hashes of the micro-batches' gradients; without them the step and the
parameter are known, and which command finds the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from instep.checkpoint.manifest import differences
from instep.record.step_lines import Digests, RecordedRun, RecordedStep

COMPUTING, REDUCING, UPDATING, BEFORE = "computing", "reducing", "updating", "before"
INITIAL = -1  # in the place of a step: the state before step 0


@dataclass(frozen=True)
class DifferingMicroBatch:
    """A micro-batch whose gradient differs between the two runs."""

    leaf: int
    ranks: tuple[int, int]  # that computed it, or the first of ``parameters`` of it, in A and in B
    parameters: Sequence[str]  # in registration order


@dataclass(frozen=True)
class Cause:
    """The part of a step that differs first, and how it shows; BEFORE: something that the step was given."""

    part: str
    what: str
    leaves: Sequence[DifferingMicroBatch] = ()
    parameters: Sequence[str] = ()


@dataclass(frozen=True)
class FirstDifference:
    """The first step that differs, or INITIAL, and what is known of it."""

    step: int
    fields: Mapping[str, tuple[str, str]]  # what differs, with both values, in the order of a step
    last_whole: int | None  # the last step before it after which the whole state was the same, or INITIAL
    parameters: Sequence[str]  # whose state differs
    parameters_step: int | None  # the step that says so
    num_compared: int  # how many parameters, moments and buffers that step has hashes of
    cause: Cause | None  # None: one run has no hashes of the step's micro-batches


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common."""

    contract: Sequence[str]  # fields that differ
    num_common: int  # steps that both have
    first: FirstDifference | None  # None: every common step has the same bits
    logged: list[str]  # figures whose last values differ, in words
    troubles: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by run, what is wrong in it alone

    @property
    def same(self) -> bool:
        """Whether no recorded bit differs."""
        return self.first is None

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {"same": self.same, **asdict(self)}


def compare(a: RecordedRun, b: RecordedRun) -> Comparison:
    """Compare two runs over the steps that both have.

    Raises:
        ValueError: they have none in common.
    """
    common = sorted(a.steps.keys() & b.steps.keys())
    if not common:
        raise ValueError(f"{a.path} and {b.path} have no step in common, so there is nothing to compare")
    both = a.numerical and b.numerical
    lines = differences(a.numerical, b.numerical, ("in A", "in B")) if both else []
    first = next((step for step in [INITIAL, *common] if fields_that_differ(a, b, step)), None)
    return Comparison(
        contract=sorted(lines, key=lambda line: "initial_lr" in line),  # what follows from the rate, after it
        num_common=len(common),
        first=None if first is None else _first(a, b, first, common),
        logged=_logged(a, b),
        troubles={str(run.path): troubles(run) for run in (a, b)},
    )


def _logged(a: RecordedRun, b: RecordedRun) -> list[str]:
    """Of what the scripts have logged in both runs, the last values that differ. They may be times."""
    last: list[dict[str, float]] = [{}, {}]
    for found, run in zip(last, (a, b), strict=True):
        for _, step in sorted(run.steps.items()):
            found |= step.logged
    both = [(name, x, last[1][name]) for name, x in last[0].items() if last[1].get(name, x) != x]
    said = [(name, f"{x:.5g}", f"{y:.5g}", x, y) for name, x, y in both]
    return [f"{name}: {x if p == q else p} in A, {y if p == q else q} in B" for name, p, q, x, y in said]


def fields_that_differ(a: RecordedRun, b: RecordedRun, step: int) -> dict[str, tuple[str, str]]:
    """What differs in the lines of ``step``, in the order in which a step makes it; of INITIAL, the state."""
    found: dict[str, tuple[Any, Any]] = {}
    x, y = a.steps.get(step), b.steps.get(step)
    if x is not None and y is not None:
        found |= {"cursor": (x.cursor, y.cursor), "loss": (x.loss, y.loss)}
        if x.reduced is not None and y.reduced is not None:
            odd, names = differing_micro_batches(x, y), _unequal(x.reduced, y.reduced)
            found["leaves"] = ("", f"{len(odd)} differ" if odd else "")
            found["reduced gradient"] = ("", f"{len(names)} parameters differ" if names else "")
        both = x.sampled.keys() & y.sampled.keys()
        num_blocks = sum(x.sampled[block] != y.sampled[block] for block in both)
        found |= {"gradient norm": (x.norm, y.norm), "skipped": (x.skipped, y.skipped)}
        found["sampled blocks"] = ("", f"{num_blocks} differ" if num_blocks else "")
    whole = a.whole(step), b.whole(step)
    if whole[0] is not None and whole[1] is not None:
        found["state_sha256"] = (whole[0][0], whole[1][0])
    return {
        name: (str(left), str(right))
        for name, (left, right) in found.items()
        if left != right and left is not None and right is not None
    }


def troubles(run: RecordedRun) -> list[str]:
    """What a run's own lines show to be wrong: gaps, samples that were left out or read twice."""
    missing = [step for step in range(max(run.steps, default=0)) if step not in run.steps]
    lines = [f"no line for {len(missing)} steps, the first of them {missing[0]}"] if missing else []
    size = run.numerical.get("batch.global_size")
    for step, line in sorted(run.steps.items()):
        if type(size) is int and line.cursor is not None and line.cursor != (step + 1) * size:
            lines.append(
                f"after step {step} the data cursor is {line.cursor}, expected {step + 1} * {size} = "
                f"{(step + 1) * size}: samples were left out or read twice"
            )
            break
    return lines


def differing_micro_batches(a: RecordedStep, b: RecordedStep) -> list[DifferingMicroBatch]:
    """The micro-batches whose gradients differ, of those that both runs have."""
    found = []
    for leaf in sorted(a.leaves.keys() & b.leaves.keys()):
        x, y = a.leaves[leaf], b.leaves[leaf]
        if names := _unequal(x.parameters, y.parameters):
            found.append(DifferingMicroBatch(leaf, (x.rank_of(names[0]), y.rank_of(names[0])), names))
    return found


def _first(a: RecordedRun, b: RecordedRun, step: int, common: Sequence[int]) -> FirstDifference:
    wholes = [t for t in [INITIAL, *common] if a.whole(t) is not None and b.whole(t) is not None]
    names, at, compared = _parameters(a, b, step, [t for t in common if t >= step])
    x, y = a.steps.get(step), b.steps.get(step)
    has_hashes = x is not None and y is not None and x.reduced is not None and y.reduced is not None
    return FirstDifference(
        step=step,
        fields=fields_that_differ(a, b, step),
        last_whole=max((t for t in wholes if t < step), default=None),
        parameters=names,
        parameters_step=at,
        num_compared=compared,
        cause=_cause(a.steps[step], b.steps[step], step, wholes) if has_hashes else None,
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


def _cause(a: RecordedStep, b: RecordedStep, step: int, wholes: Sequence[int]) -> Cause:
    if a.cursor != b.cursor:
        return Cause(BEFORE, "the runs read different samples")
    if a.leaves.keys() != b.leaves.keys():
        return Cause(BEFORE, f"the step has {len(a.leaves)} micro-batches in A and {len(b.leaves)} in B")
    odd = differing_micro_batches(a, b)
    same_before = step - 1 in wholes
    if odd and len(odd) == len(a.leaves) and not same_before:
        what = "the gradient of every micro-batch differs, so the weights probably differed before the step"
        return Cause(BEFORE, what, leaves=odd)
    if odd:
        return Cause(COMPUTING, "gradients of micro-batches differ, before any was added to another", odd)
    if names := _unequal(a.reduced or {}, b.reduced or {}):
        what = "the gradient of every micro-batch is the same, their sum is not"
        return Cause(REDUCING, what, parameters=names)
    what = "the reduced gradient is the same, what was made of it is not"
    if not same_before:
        seen = max((t for t in wholes if t < step), default=None)
        since = "at no step" if seen is None else after(seen)
        what += f"; in this step, or in an earlier one: the whole state was last the same {since}"
    return Cause(UPDATING, what)


def after(step: int) -> str:
    """The moment after ``step``, in words."""
    return "at the start" if step == INITIAL else f"after step {step}"


def _unequal(a: Digests, b: Digests) -> list[str]:
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]
