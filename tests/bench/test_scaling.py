"""``instep bench scaling``: from times that were made up to rows, and from the command line to its files."""

import json
from dataclasses import asdict

import pytest

from instep.bench.options import ScalingOptions
from instep.bench.scaling import Arm, crowded, plan_of, rows_of
from instep.bench.steps import StepResults
from instep.bench.steps_rank import measure_scaling
from instep.bench.variants import NONE, Variant
from instep.bench.workloads import Workload
from instep.bench.worlds import World
from tests.launched.command import instep
from tests.world import world

BUCKETED = Variant("bucketed", "gloo")


@pytest.fixture
def plan():
    return plan_of(ScalingOptions(ranks=(4, 1, 2), batch=8), "gloo")


def test_one_rank_exchanges_nothing_and_is_measured_once(plan):
    of_one = [one for one in plan.arms.values() if one.ranks == 1]
    assert of_one == [Arm(1, 8, NONE)]
    assert len(plan.arms) == 1 + 2 * 2 * 2  # then: two numbers of ranks, two kinds of work, none and bucketed


def test_strong_work_is_divided_and_weak_work_is_not(plan):
    assert [plan.arm("strong", BUCKETED, ranks).batch for ranks in plan.ranks] == [8, 4, 2]
    assert [plan.arm("weak", BUCKETED, ranks).batch for ranks in plan.ranks] == [8, 8, 8]


def test_without_one_rank_the_least_number_is_what_others_are_held_against():
    plan = plan_of(ScalingOptions(ranks=(2, 4), batch=8), "gloo")
    assert plan.arm("strong", BUCKETED, 2) == plan.arm("weak", BUCKETED, 2) == Arm(2, 8, BUCKETED)
    assert plan.arm("strong", BUCKETED, 4).batch == 4


def test_an_unknown_strategy_is_named_beside_those_there_are():
    with pytest.raises(ValueError, match="strategy 'ring': expected one of naive, flat"):
        plan_of(ScalingOptions(strategies=("ring",)), "gloo")


@pytest.fixture
def rows(plan):
    """One rank takes 8 s, nothing sent is ideal, what is sent takes 1 s of strong steps, 2 s of weak ones."""

    def steps(one: Arm) -> float:
        sent = 0 if one.variant == NONE else 1 + (one.batch == 8)
        return one.batch + sent

    times = {name: {"step_s": [float(steps(one))] * 3} for name, one in plan.arms.items()}
    idle = {name: {"step_s": [0.0] * 3} for name in plan.arms}
    found = rows_of(plan, StepResults([idle, times]))
    return {(row["work"], row["ranks"], row["strategy"]): row for row in found}


def test_what_sends_nothing_is_ideal_here_and_what_sends_less_so(rows):
    efficiency = {key: row["efficiency(%)"] for key, row in rows.items()}
    assert efficiency["strong", 1, "one rank"] == efficiency["weak", 1, "one rank"] == 100
    assert efficiency["strong", 4, "none"] == efficiency["weak", 4, "none"] == pytest.approx(100)
    assert efficiency["strong", 4, "bucketed"] == pytest.approx(100 * 8 / (4 * 3))
    assert efficiency["weak", 4, "bucketed"] == pytest.approx(100 * 8 / 10)


def test_rates_are_of_all_ranks_together(rows):
    strong, weak = rows["strong", 2, "bucketed"], rows["weak", 2, "bucketed"]
    assert strong["steps/s"] == pytest.approx(1 / 5)
    assert strong["tokens/s"] == pytest.approx(8 * 128 / 5)
    assert weak["tokens/s"] == pytest.approx(2 * 8 * 128 / 10)
    assert weak["speed-up"] == pytest.approx(2 * 8 / 10)


def test_ranks_that_outnumber_the_cores_are_told_so():
    [said] = crowded({"cores": 2, "ranks": [1, 2, 4]})
    assert said.startswith("4 ranks on 2 cores: ranks outnumber cores, so at most 50 % is possible")
    assert crowded({"cores": 4, "ranks": [1, 2, 4]}) == crowded({"cores": None, "ranks": [1, 8]}) == []


@pytest.mark.slow
@world(3, by="process")
def test_the_first_two_of_three_ranks_exchange_among_themselves(mesh):
    one = Workload("tiny", 200_000, batch=2, what="tiny", tokens=8)
    arms = [Arm(1, 2, NONE), Arm(2, 1, BUCKETED), Arm(2, 2, BUCKETED), Arm(3, 2, BUCKETED)]
    task = {"workload": asdict(one), "arms": {arm.name: asdict(arm) for arm in arms}, "samples": 1}
    found = measure_scaling(World(), task)
    assert list(found) == [arm.name for arm in arms]
    for arm in arms:
        took_part = found[arm.name]["forward_s"][0] > 0
        assert took_part == (mesh.rank < arm.ranks), arm
        assert bool(found[arm.name]["agree_s"][0]) == (took_part and arm.ranks > 1), arm


@pytest.mark.slow
def test_the_command_writes_a_row_for_each_number_of_ranks(tmp_path):
    small = "-n 1 2 --params 200K --tokens 8 --batch 2 --samples 2 --json a.json --chart a.svg"
    ended = instep("bench", "scaling", *small.split(), cwd=tmp_path)
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "a.json").read_text())
    assert [(row["work"], row["ranks"], row["strategy"]) for row in found["rows"]] == [
        (work, *rest)
        for work in ("strong", "weak")
        for rest in ((1, "one rank"), (2, "none"), (2, "bucketed"))
    ]
    assert "efficiency" in ended.out
    assert (tmp_path / "a.png").stat().st_size > 1000
