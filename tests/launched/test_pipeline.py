"""Pipelines through the command: whichever ranks have which layers, it is the run that one rank makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.elastic.faults import parse_all
from tests.launched.command import train
from tests.launched.test_failover import events
from tests.launched.test_shard_stage import assert_same_run, summary

PP, SCHEDULE, CUTS = "--parallel.pp", "--parallel.schedule", "--parallel.cuts"


def test_a_pipeline_that_loses_a_rank_stops_and_goes_on_cut_otherwise_is_the_run_that_nothing_disturbed(
    recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    run = (*recipe, "--run-dir", "run")
    fault = ("--fault", "kill:rank=1,step=2,phase=backward")
    cut = (PP, 2, SCHEDULE, "zb-v", CUTS, "cost")
    ended = train(*run, *cut, "-n", 2, *fault, "--stop-after", 4, cwd=tmp_path)
    assert ended.code == 75, ended.err
    assert "strategy bucketed, pipelines of 2 ranks (zb-v); " in ended.err
    assert " x 1 pipeline of 2 ranks\n" in ended.err
    fault = ("--fault", "kill:rank=2,step=5,phase=update")
    other = (PP, 2, SCHEDULE, "1f1b", CUTS, "1", "--parallel.shard-stage", 1)
    ended = train(*run, *other, "-n", 4, *fault, "--resume", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "strategy bucketed, stage 1 of sharding, pipelines of 2 ranks (1f1b); " in ended.err
    assert_same_run(tmp_path / "run", undisturbed)
    assert summary(tmp_path / "run")["restarts"] == 3
    assert summary(tmp_path / "run")["parallel"]["cuts"] == [1]


@pytest.mark.slow
def test_kills_at_other_points_of_a_step_and_of_a_recovery_leave_the_run_that_nothing_disturbed(
    recipe: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    kills = (
        "kill:rank=0,step=-1,phase=agree",  # before the first step
        "kill:rank=1,step=1,phase=forward,entry=3",  # of the third micro-batch
        "kill:rank=0,step=2,phase=script,entry=8",  # between two, where messages are sent and taken
        "kill:rank=1,step=3,phase=backward,entry=4",  # the weights' part of the second one
        "kill:rank=0,step=4,phase=exchange,entry=4",  # at the end of the step
        "kill:rank=1,step=4,phase=join",  # while the ranks recover from that one
    )
    faults = (word for kill in kills for word in ("--fault", kill))
    pipeline = (PP, 2, SCHEDULE, "zb-h1", "--parallel.backend", "gloo")
    ended = train(*recipe, "--run-dir", "run", *pipeline, "-n", 2, *faults, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_run(tmp_path / "run", undisturbed)
    died = [(x["rank"], x["step"], x["phase"]) for x in events(tmp_path / "run", "failure")]
    assert died == [(x.rank, x.step, x.phase) for x in parse_all(kills)]


def test_what_a_pipeline_does_not_go_with_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    for words, message in (
        (
            (PP, 2, "--parallel.shard-stage", 3),
            "parallel.pp 2 with parallel.shard_stage 3: the ranks of a stage have all of its weights",
        ),
        ((PP, 2, SCHEDULE, "zb-v", "--model.layers", 1), "make 4 stages of a model that has 3 layers"),
        (
            (PP, 2, CUTS, "1,9"),
            "parallel.cuts 1,9: expected 1 of the layers 1 to 3, in order, the first layer of each of ",
        ),
        ((PP, 2, CUTS, "even"), "parallel.cuts 'even': expected one of layers, cost, or numbers"),
    ):
        ended = train("--steps", 1, "-n", 2, *words, cwd=tmp_path)
        assert ended.code == 2 and message in ended.err
    assert not list(tmp_path.iterdir())
