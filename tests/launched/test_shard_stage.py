"""Every stage of sharding through the command, and one copy of the weights: always the undisturbed run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instep.run.folder import SUMMARY
from instep.run.jsonl import read_lines
from instep.run.ledger import LEDGER
from tests.launched.command import steps_of, train
from tests.launched.conftest import STEPS

SLOW = pytest.mark.slow
STAGE = "--parallel.shard-stage"
ONE_COPY = "--parallel.one-copy"


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / SUMMARY).read_text())


def hashes_of(run_dir: Path) -> dict[int, tuple[Any, ...]]:
    """By step, what the ledger's last line of it says of the state."""
    lines = [line for line in read_lines(run_dir / LEDGER) if "cursor" in line]
    return {line["step"]: tuple(map(line.get, ("sampled", "state_sha256", "entries"))) for line in lines}


def assert_same_run(run_dir: Path, reference: Path) -> None:
    """Equal weights, moments and step, and on the way there equal losses, gradients, data and samples."""
    assert steps_of(run_dir) == steps_of(reference)
    for field in ("state_sha256", "fingerprint", "loss_first", "loss_last", "held_out_loss"):
        assert summary(run_dir)[field] == summary(reference)[field], field
    ours, theirs = hashes_of(run_dir), hashes_of(reference)
    assert ours.keys() == theirs.keys()
    for step, (sampled, whole, entries) in ours.items():
        assert sampled == theirs[step][0]
        assert None in (whole, theirs[step][1]) or (whole, entries) == theirs[step][1:]  # hashed in both


def test_three_ranks_give_the_run_of_one_that_has_all_of_the_state(
    recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    words = (*recipe, STAGE, 3, "-n", 3, "--parallel.backend", "shm", "--run-dir", "run")
    ended = train(*words, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "stage 3 of sharding; " in ended.err
    assert_same_run(tmp_path / "run", undisturbed)
    found = summary(tmp_path / "run")
    assert (found["world_size"], found["parallel"]["shard_stage"]) == (3, 3)
    moments = sum(row["optimizer"] for row in found["memory"]["ranks"])
    alone = summary(undisturbed)["memory"]["ranks"][0]["optimizer"]
    assert moments == pytest.approx(alone, rel=0.05)


def test_a_fault_in_what_one_rank_holds_is_seen_in_the_hashes_of_all(
    recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    """The first weight is in the first rank's part, from which all get it."""
    flags = (*recipe, STAGE, 1, "-n", 2, "--run-dir", "run", "--fault", "flip:rank=0,step=5,phase=update")
    ended = train(*flags, cwd=tmp_path)
    assert ended.code == 0, ended.err
    ours, theirs = hashes_of(tmp_path / "run"), hashes_of(undisturbed)
    assert [ours[step] == theirs[step] for step in range(1, 6)] == [True] * 5
    assert ours[STEPS][1] != theirs[STEPS][1]


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([(1, "-n", 3), (3, "-n", 2), (2, "-n", 4, ONE_COPY), (3, "-n", 3)], marks=SLOW),
        [(2, "-n", 3), (1, "-n", 2), (0, "-n", 1)],
    ],
)
def test_resumed_again_and_again_with_the_state_divided_otherwise_is_the_run_that_nothing_disturbed(
    legs: list[tuple[object, ...]],
    recipe: tuple[str, ...],
    undisturbed: Path,
    half_way: Callable[[], Path],
    tmp_path: Path,
) -> None:
    """From a state that two ranks had whole. Each from each: tests/checkpoint/test_stages.py."""
    run = (*recipe, "--run-dir", half_way(), "--resume")
    for step, leg in enumerate(legs, start=STEPS // 2 + 1):
        last = step - STEPS // 2 == len(legs)
        # The settings are the run's own, until others are given.
        flags = leg if ONE_COPY in leg else (*leg, "--parallel.no-one-copy")
        ended = train(*run, STAGE, *flags, "--stop-after", 0 if last else step, cwd=tmp_path)
        assert ended.code == (0 if last else 75), ended.err
    assert_same_run(Path(str(run[-2])), undisturbed)
    found, made = summary(Path(str(run[-2]))), STEPS // 2 + 1 - len(legs)
    assert found["first_step"] == STEPS - made
    assert (
        f"steps  {STEPS}; the last {made} on {found['world_size']} rank(s), {found['strategy']}" in ended.out
    )
    # No figure of the ranks and the stages before: neither their steps, nor that weights were gathered.
    assert [row["steps"] for row in found["breakdown"]] == [made] * found["world_size"]
    assert all((row["gathers_s"] > 0) is (legs[-1][0] == 3) for row in found["breakdown"])


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((1, "--parallel.backend", "gloo"), marks=SLOW),
        (3,),
        pytest.param((2, ONE_COPY), marks=SLOW),
    ],
)
def test_ranks_that_are_killed_take_no_part_of_the_state_with_them(
    flags: tuple[object, ...], recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    specs = (
        "kill:rank=1,step=2,phase=exchange",
        "kill:rank=1,step=3,phase=backward",
        "kill:rank=0,step=4,phase=update",
        "kill:rank=1,step=5,phase=hash",
        "kill:rank=0,step=6,phase=snapshot",
    )
    faults = [word for spec in specs for word in ("--fault", spec)]
    often = ("--checkpoint.every", 2, "--ledger.every", 1)
    ended = train(*recipe, STAGE, *flags, "-n", 2, *often, "--run-dir", "run", *faults, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "run", undisturbed)
    assert summary(tmp_path / "run")["restarts"] == len(specs)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((3, ONE_COPY), "parallel.one_copy with parallel.shard_stage 3"),
        ((2, ONE_COPY, "--parallel.backend", "gloo"), "parallel.one_copy with parallel.backend gloo"),
        ((2, "--parallel.strategy", "flat"), "parallel.shard_stage 2 with parallel.strategy flat"),
    ],
)
def test_what_a_stage_does_not_go_with_is_refused_before_anything_starts(
    flags: tuple[object, ...], said: str, recipe: tuple[str, ...], tmp_path: Path
) -> None:
    ended = train(*recipe, STAGE, *flags, "-n", 2, "--run-dir", "run", cwd=tmp_path)
    ended.assert_failed(2, said)
    assert not (tmp_path / "run").exists()
