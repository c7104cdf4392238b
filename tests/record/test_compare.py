"""Where runs part: the step, the parameter and the cause are found; equal runs are equal on any placement."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from instep.mesh.mesh import Mesh
from instep.record.compare import (
    BEFORE,
    COMPUTING,
    INITIAL,
    REDUCING,
    UPDATING,
    Comparison,
    DifferingMicroBatch,
    FirstDifference,
    compare,
)
from instep.record.step_lines import RecordedRun, RecordedStep, read_run
from tests.parity import world_of_one
from tests.record.recorded import Plan, one_ulp, record
from tests.world import world


def updated(step: int, name: str, by: float = 0.0) -> Callable[[int, dict[str, Tensor]], None]:
    """After ``step`` one element of ``name`` moves by one ulp, or all of them ``by`` so much."""

    def fault(now: int, tensors: dict[str, Tensor]) -> None:
        if now == step and by:
            tensors[name].data.add_(by)
        elif now == step:
            one_ulp(tensors[name])

    return fault


def miscomputed(now: int, leaf: int, name: str, x: Tensor) -> Tensor:
    """In step 1 the gradient that micro-batch 3 has for one layer's weight is off by one ulp."""
    x = x.clone()
    if (now, leaf, name) == (1, 3, "2.weight"):
        one_ulp(x)
    return x


def compared(tmp_path: Path, mesh: Mesh, a: Plan, b: Plan) -> Comparison | None:
    """Run ``a`` on one rank, ``b`` on all of ``mesh``; on rank 0, how they compare."""
    for name in ("a", "b") if mesh.rank == 0 else ():
        (tmp_path / name).mkdir()
    if mesh.rank == 0:
        record(tmp_path / "a", world_of_one(), a)
    record(tmp_path / "b", mesh, b)
    return compare(read_run(tmp_path / "a"), read_run(tmp_path / "b")) if mesh.rank == 0 else None


SAME: dict[str, Any] = {"sample": 1000, "every": 0}
CAUSES: dict[str, tuple[Plan, Plan, tuple[object, ...], Callable[[FirstDifference], object]]] = {
    "a plain all-reduce": (
        Plan(ordered=False),
        Plan(ordered=False),
        (0, REDUCING),
        lambda first: "0.weight" in first.cause.parameters and next(iter(first.fields)) == "reduced gradient",
    ),
    "a rank that computes otherwise": (
        Plan(),
        Plan(gradient=miscomputed),
        (1, COMPUTING),
        lambda first: list(first.cause.leaves) == [DifferingMicroBatch(3, (0, 2), ["2.weight"])],
    ),
    "an update that goes wrong": (
        Plan(),
        Plan(updated=updated(1, "exp_avg/2.weight")),
        (1, UPDATING),
        lambda first: (
            first.parameters == ["exp_avg/2.weight"]
            and first.last_whole == INITIAL
            and not {"loss", "leaves", "reduced gradient", "gradient norm"} & set(first.fields)
            and "at the start" in first.cause.what  # the state after step 0 is not known in whole
        ),
    ),
    # No sample and no whole hash saw them after the step; every micro-batch of the next one does.
    "weights that were changed unseen": (
        Plan(**SAME),
        Plan(**SAME, updated=updated(0, "0.weight", by=0.01)),
        (1, BEFORE),
        lambda first: first.last_whole == INITIAL,
    ),
    "unknown, without leaves": (
        Plan(leaves=False),
        Plan(leaves=False, updated=updated(1, "2.bias")),
        (1, None),
        lambda first: first.parameters == ["2.bias"],
    ),
    # A moment moves no gradient at once; only a whole hash at every step can tell when it was changed.
    **{
        f"a moment, with a hash every {every}": (
            Plan(sample=1000, every=every),
            Plan(sample=1000, every=every, updated=updated(0, "exp_avg_sq/2.weight", by=1e-3)),
            (every - 1, UPDATING),
            lambda first, every=every: ("at the start" in first.cause.what) == (every == 2),
        )
        for every in (1, 2)
    },
}


@pytest.mark.parametrize("name", CAUSES)
@world(3)  # two would add as the tree does
def test_where_runs_part_and_why_is_found(mesh: Mesh, tmp_path: Path, name: str) -> None:
    one, other, (step, part), holds = CAUSES[name]
    found = compared(tmp_path, mesh, one, other)
    if found is not None:
        first = found.first
        assert first is not None and first.step == step
        assert (first.cause.part if first.cause else None) == part
        assert holds(first), first


@world(2)
def test_one_rank_and_two_have_the_same_bits(mesh: Mesh, tmp_path: Path) -> None:
    found = compared(tmp_path, mesh, Plan(), Plan())
    if found is not None:
        assert (found.same, found.first, found.num_common) == (True, None, 3)
        assert not any([found.contract, *found.troubles.values()])


def run(name: str, steps: dict[int, dict], numerical: dict | None = None) -> RecordedRun:
    """A run that was never trained."""
    made = RecordedRun(Path(name), steps={n: RecordedStep(**fields) for n, fields in steps.items()})
    made.starts.append({"step": 0, "numerical": numerical or {}})
    return made


same = functools.partial(dict, loss="1.0", norm="1.0")


@pytest.mark.parametrize(
    ("other", "field"),
    [({"loss": "2.0"}, "loss"), ({"norm": "nan"}, "gradient norm"), ({"skipped": "spike"}, "skipped")],
)
def test_the_first_of_many_steps_that_differ_is_found(other: dict, field: str) -> None:
    a = run("a", {n: same() for n in range(1, 9)})
    b = run("b", {n: same(**other) if n >= 5 else same() for n in range(1, 12)})
    first = compare(a, b).first
    assert first is not None and (first.step, list(first.fields)) == (5, [field])


def test_hashes_of_the_whole_state_name_the_parameter_where_no_sample_does() -> None:
    whole = [("aa", {"w": "1", "v": "2"}), ("bb", {"w": "1", "v": "3"})]
    a, b = (
        run(n, {1: same(), 2: same(loss=loss), 9: same(whole=w)})
        for n, loss, w in zip("ab", ["1.0", "2.0"], whole, strict=True)
    )
    first = compare(a, b).first
    assert first is not None
    assert (first.step, first.parameters, first.parameters_step, first.num_compared) == (
        2,
        ["v"],
        9,
        2,
    )


def test_other_samples_are_the_cause_before_anything_computed() -> None:
    a, b = (run(name, {1: same(cursor=cursor, reduced={})}) for name, cursor in (("a", 8), ("b", 9)))
    first = compare(a, b).first
    assert first is not None and first.cause is not None
    assert (first.cause.part, first.cause.what) == (BEFORE, "the runs read different samples")


def test_a_run_s_own_troubles_are_told() -> None:
    steps = {0: same(cursor=8), 1: same(cursor=16), 3: same(cursor=40), 4: same(cursor=48)}
    a = run("a", steps, {"batch.global_size": 8})
    assert compare(a, a).troubles["a"] == [
        "no line for 1 steps, the first of them 2",
        "after step 3 the data cursor is 40, expected 4 * 8 = 32: samples were left out or read twice",
    ]


def test_the_contracts_of_runs_that_are_the_same_may_differ_and_rates_come_first() -> None:
    names = "optimizer.groups.0.initial_lr", "optimizer.groups.0.lr", "seed"
    a, b = (run(name, {0: same()}, dict.fromkeys(names, value)) for name, value in (("a", 1), ("b", 2)))
    found = compare(a, b)
    assert found.same and found.contract == [f"{name}: 1 in A, 2 in B" for name in (*names[1:], names[0])]
    assert json.loads(json.dumps(found.as_json()))["same"]
    with pytest.raises(ValueError, match="a and b have no step in common"):
        compare(run("a", {1: same()}), run("b", {2: same()}))
