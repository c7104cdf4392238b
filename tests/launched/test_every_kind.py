"""Every kind of run through the command, killed, resized and resumed: the run that nothing disturbed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from instep.checkpoint.load import newest, verify
from instep.elastic.faults import parse_all
from instep.record.directory import CHECKPOINTS
from tests.launched.command import assert_same_run, events, faults, summary, train
from tests.launched.conftest import STEPS

SLOW = pytest.mark.slow
STAGE, ROWS = "--parallel.shard-stage", "--parallel.shard"
PP, SCHEDULE, CUTS = "--parallel.pp", "--parallel.schedule", "--parallel.cuts"
STOPPED = 75


@dataclass(frozen=True)
class Leg:
    """One command: its flags, the faults in it, its exit code, and what it prints."""

    flags: str
    faults: str = ""
    code: int = 0
    says: tuple[str, ...] = ()


OFTEN = "-n 2 --checkpoint.every 2 --record.hash-every 1"
KILLS = """
kill:rank=1,step=2,phase=exchange kill:rank=1,step=3,phase=backward kill:rank=0,step=4,phase=update
kill:rank=1,step=5,phase=hash kill:rank=0,step=6,phase=snapshot
"""
# Before the first step; in the third micro-batch's forward; between two, where messages are sent; in the
# weights' part of the second one's backward; at the end of the step; while the ranks recover from that one.
PIPELINE_KILLS = """
kill:rank=0,step=-1,phase=agree kill:rank=1,step=1,phase=forward,entry=3
kill:rank=0,step=2,phase=script,entry=8 kill:rank=1,step=3,phase=backward,entry=4
kill:rank=0,step=4,phase=exchange,entry=4 kill:rank=1,step=4,phase=join
"""
ALL_BUT_ONE = "kill:rank=0,step=5,phase=exchange kill:rank=2,step=5,phase=exchange"
ROW_FAULTS = "kill:rank=3,step=2,phase=exchange resize:ranks=3,step=4"
CUT = f"{PP} 2 {SCHEDULE} zb-v {CUTS} cost -n 2 --stop-after 4"
CUT_OTHERWISE = f"{PP} 2 {SCHEDULE} 1f1b {CUTS} 1 {STAGE} 1 -n 4 --resume"
PIPES = ("strategy bucketed, pipelines of 2 ranks (zb-v); ", " x 1 pipeline of 2 ranks\n")
OTHER_PIPES = ("strategy bucketed, stage 1 of sharding, pipelines of 2 ranks (1f1b); ",)
IN_ROWS = (
    "stage 3 of sharding in shard groups of 2 ranks; ",
    "3 ranks are no multiple of the shard group of 2: ",
)
BACKEND = "--parallel.backend"
# The legs, and how often ranks were started again, where that is certain.
RUNS: dict[str, tuple[list[Leg], int | None]] = {
    "stage 3, killed": ([Leg(f"{STAGE} 3 {OFTEN}", KILLS)], 5),
    "stage 1, all but one killed": ([Leg(f"{STAGE} 1 -n 3", ALL_BUT_ONE)], None),
    "stage 1, killed while all save": ([Leg(f"{STAGE} 1 {OFTEN}", "kill:rank=1,step=4,phase=save")], 1),
    "pipeline, then cut otherwise": (
        [
            Leg(CUT, "kill:rank=1,step=2,phase=backward", STOPPED, PIPES),
            Leg(CUT_OTHERWISE, "kill:rank=2,step=5,phase=update", says=OTHER_PIPES),
        ],
        3,
    ),
}
SLOW_RUNS: dict[str, tuple[list[Leg], int | None]] = {
    "stage 1 over gloo, killed": ([Leg(f"{STAGE} 1 {BACKEND} gloo {OFTEN}", KILLS)], 5),
    "stage 1, rank 0 killed in the first copy": (
        [Leg(f"{STAGE} 1 -n 3", "kill:rank=0,step=1,phase=snapshot")],
        1,
    ),
    "shard groups": (
        [
            Leg(f"{STAGE} 3 {ROWS} 2 -n 4 --stop-after 6", ROW_FAULTS, STOPPED, IN_ROWS),
            Leg(f"{STAGE} 2 {ROWS} 2 -n 4 --resume"),
        ],
        3,
    ),
    "pipeline, killed everywhere": (
        [Leg(f"{PP} 2 {SCHEDULE} zb-h1 {BACKEND} gloo -n 2", PIPELINE_KILLS)],
        None,
    ),
}


@pytest.mark.parametrize(
    ("legs", "restarts"),
    [
        *(pytest.param(*case, id=name) for name, case in RUNS.items()),
        *(pytest.param(*case, id=name, marks=SLOW) for name, case in SLOW_RUNS.items()),
    ],
)
def test_a_disturbed_run_is_the_run_that_nothing_disturbed(
    legs: list[Leg], restarts: int | None, recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    for leg in legs:
        flags = (*leg.flags.split(), *faults(*leg.faults.split()))
        ended = train(*recipe, "--run-dir", "run", *flags, cwd=tmp_path)
        assert ended.code == leg.code, ended.err
        assert all(text in ended.err for text in leg.says), ended.err
    assert_same_run(path, undisturbed)
    assert restarts in (None, summary(path)["restarts"])
    if "resize" not in legs[-1].faults:
        assert f"-n {summary(path)['world_size']}" in legs[-1].flags
    planned = sorted((x.rank, x.step, x.phase) for x in parse_all(legs[-1].faults.split()) if x.ranks == 0)
    died = [(x["rank"], x["step"], x["phase"]) for x in events(path, "failure")]
    assert sorted(died[len(died) - len(planned) :]) == planned
    found = newest(path / CHECKPOINTS)
    assert found is not None and found.manifest.step == STEPS
    assert found.manifest.state_sha256 == summary(undisturbed)["state_sha256"]
    for each in (path / CHECKPOINTS).iterdir():
        assert not each.name.startswith(".")
        verify(each)


def test_resumed_again_and_again_with_the_state_divided_otherwise(
    recipe: tuple[str, ...], undisturbed: Path, half_way: Callable[[], Path], tmp_path: Path
) -> None:
    """From a state that two ranks had whole."""
    path, legs = half_way(), [(2, "-n", 3), (1, "-n", 2), (0, "-n", 1)]
    for step, leg in enumerate(legs, start=STEPS // 2 + 1):
        last = step - STEPS // 2 == len(legs)
        # The settings are the run's own, until others are given.
        stop = ("--stop-after", 0 if last else step)
        ended = train(*recipe, "--run-dir", path, "--resume", STAGE, *leg, *stop, cwd=tmp_path)
        assert ended.code == (0 if last else STOPPED), ended.err
    assert_same_run(path, undisturbed)
    found, made = summary(path), STEPS // 2 + 1 - len(legs)
    assert found["first_step"] == STEPS - made
    ranks = "1 rank" if found["world_size"] == 1 else f"{found['world_size']} ranks"
    shown = f"steps  {STEPS}; the last {made} on {ranks}, {found['strategy']}"
    assert shown in ended.out
    # No figure of the ranks and the stages before: neither their steps, nor that weights were gathered.
    assert [row["steps"] for row in found["breakdown"]] == [made] * found["world_size"]
    assert all(row["gathers_s"] == 0 for row in found["breakdown"])
