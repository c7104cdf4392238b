"""Where runs part: the step, the parameter and the cause are found; equal runs are equal on any placement."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
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
    compare,
)
from instep.record.directory import RECORD
from instep.record.jsonl import JsonLines
from instep.record.step_lines import Made, RecordedRun, RecordedStep, read_run, step_line
from tests.parity import world_of_one
from tests.record.recorded import Plan, one_ulp, record
from tests.state_oracle import sampled_blocks
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


@world(2)
def test_one_rank_and_two_have_the_same_bits(mesh: Mesh, tmp_path: Path) -> None:
    found = compared(tmp_path, mesh, Plan(), Plan())
    if found is not None:
        assert (found.same, found.first, found.num_common) == (True, None, 3)
        assert not any([found.contract, *found.troubles.values()])


@world(3)  # two would add as the tree does
def test_a_plain_all_reduce_parts_by_reducing(mesh: Mesh, tmp_path: Path) -> None:
    found = compared(tmp_path, mesh, Plan(ordered=False), Plan(ordered=False))
    if found is not None:
        assert found.first is not None and found.first.cause is not None
        assert (found.first.step, found.first.cause.part) == (0, REDUCING)
        assert "0.weight" in found.first.cause.parameters
        assert next(iter(found.first.fields)) == "reduced gradient"


@world(2)
def test_a_rank_that_computes_otherwise_is_named_with_micro_batch_and_parameter(
    mesh: Mesh, tmp_path: Path
) -> None:
    found = compared(tmp_path, mesh, Plan(), Plan(gradient=miscomputed))
    if found is not None:
        assert found.first is not None and found.first.cause is not None
        assert (found.first.step, found.first.cause.part) == (1, COMPUTING)
        assert list(found.first.cause.leaves) == [DifferingMicroBatch(3, (0, 1), ["2.weight"])]


@world(2)
def test_an_update_that_goes_wrong_is_told_from_its_gradient(mesh: Mesh, tmp_path: Path) -> None:
    found = compared(tmp_path, mesh, Plan(), Plan(updated=updated(1, "exp_avg/2.weight")))
    if found is not None:
        assert found.first is not None and found.first.cause is not None
        assert (found.first.step, found.first.cause.part) == (1, UPDATING)
        assert found.first.parameters == ["exp_avg/2.weight"]
        assert not {"loss", "leaves", "reduced gradient", "gradient norm"} & set(found.first.fields)
        assert "at the start" in found.first.cause.what  # the state after step 0 is not known in whole


@world(2)
def test_weights_that_were_changed_unseen_come_into_the_next_step(mesh: Mesh, tmp_path: Path) -> None:
    """No sample and no whole hash saw them after the step; every micro-batch of the next one does."""
    plan = Plan(sample=1000, every=0, updated=updated(0, "0.weight", by=0.01))
    found = compared(tmp_path, mesh, Plan(sample=1000, every=0), plan)
    if found is not None:
        assert found.first is not None and found.first.cause is not None
        assert (found.first.step, found.first.cause.part) == (1, BEFORE)
        assert found.first.last_whole == INITIAL


@world(2)
def test_without_leaves_the_cause_is_unknown_and_the_parameter_is_not(mesh: Mesh, tmp_path: Path) -> None:
    fault = updated(1, "2.bias")
    found = compared(tmp_path, mesh, Plan(leaves=False), Plan(leaves=False, updated=fault))
    if found is not None:
        assert found.first is not None
        assert (found.first.cause, found.first.parameters) == (None, ["2.bias"])


def write_lines(path: Path, entries: list[tuple[str, Tensor]], steps: int, every: int) -> RecordedRun:
    """A run whose state never changes, sampled at every step."""
    path.mkdir()
    lines = JsonLines(path / RECORD, before_step=0)
    for step in range(steps):
        sampled = sampled_blocks(entries, step + 1, every)
        lines.write(**step_line(step, Made(loss=1.0, norm=1.0), cursor=step + 1, sampled=sampled))
    lines.close()
    return read_run(path)


@pytest.mark.parametrize("at", [0, 9000])
def test_one_ulp_that_changes_no_loss_is_found_within_a_round_and_named(tmp_path: Path, at: int) -> None:
    every, entries = 6, [("a", torch.randn(5000)), ("b", torch.randn(3, 4096)), ("c", torch.randn(2))]
    changed = [(name, x.clone()) for name, x in entries]
    one_ulp(changed[1][1].view(-1)[at:])
    runs = [write_lines(tmp_path / n, e, every, every) for n, e in (("x", entries), ("y", changed))]
    first = compare(*runs).first
    assert first is not None
    assert (list(first.fields), first.parameters) == (["sampled blocks"], ["b"])
    assert first.step == first.parameters_step < every


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


def test_runs_under_other_contracts_are_told_the_fields() -> None:
    a = run("a", {1: same()}, {"seed": 0, "threads": 1})
    b = run("b", {1: same()}, {"seed": 0, "threads": 2})
    found = compare(a, b)
    assert (found.same, found.contract) == (True, ["threads: 1 in A, 2 in B"])


def test_other_samples_are_the_cause_before_anything_computed() -> None:
    a, b = (run(name, {1: same(cursor=cursor, reduced={})}) for name, cursor in (("a", 8), ("b", 9)))
    first = compare(a, b).first
    assert first is not None and first.cause is not None
    assert (first.cause.part, first.cause.what) == (BEFORE, "the runs read different samples")


@pytest.mark.parametrize("every", [1, 2])
@world(2)
def test_what_parted_unseen_is_not_put_down_to_the_step_that_shows_it(
    mesh: Mesh, tmp_path: Path, every: int
) -> None:
    """A moment moves no gradient at once; only a whole hash at every step can tell when it was changed."""
    plan = Plan(sample=1000, every=every, updated=updated(0, "exp_avg_sq/2.weight", by=1e-3))
    found = compared(tmp_path, mesh, Plan(sample=1000, every=every), plan)
    if found is not None:
        assert found.first is not None and found.first.cause is not None
        assert (found.first.step, found.first.cause.part) == (every - 1, UPDATING)
        assert ("at the start" in found.first.cause.what) == (every == 2)


def test_a_run_s_own_troubles_are_told() -> None:
    steps = {0: same(cursor=8), 1: same(cursor=16), 3: same(cursor=40), 4: same(cursor=48)}
    a = run("a", steps, {"batch.global_size": 8})
    assert compare(a, a).troubles["a"] == [
        "no line for 1 steps, the first of them 2",
        "after step 3 the data cursor is 40, expected 4 * 8 = 32: samples were left out or read twice",
    ]


def test_a_rate_stands_before_what_a_schedule_keeps_of_it() -> None:
    names = "optimizer.groups.0.initial_lr", "optimizer.groups.0.lr", "seed"
    a, b = (run(name, {0: same()}, dict.fromkeys(names, value)) for name, value in (("a", 1), ("b", 2)))
    assert [line.partition(":")[0] for line in compare(a, b).contract] == [*names[1:], names[0]]


def test_runs_without_a_common_step_are_refused() -> None:
    with pytest.raises(ValueError, match="a and b have no step in common"):
        compare(run("a", {1: same()}), run("b", {2: same()}))


def test_what_was_found_is_json() -> None:
    found = compare(run("a", {1: same()}), run("b", {1: same(loss="0.0")}))
    back = json.loads(json.dumps(found.as_json()))
    assert (back["same"], back["first"]["step"]) == (False, 1)
    assert back["first"]["fields"] == {"loss": ["1.0", "0.0"]}
