"""The fault matrix: its judgement, its tables, and a recovery in which whoever unpickles is caught."""

import secrets
import sys
from dataclasses import replace

import pytest

from benchmarks.faults import campaign, command, pipelines
from benchmarks.faults.acts import Inside
from benchmarks.faults.bench import Bench
from benchmarks.faults.command import run
from benchmarks.faults.judge import SENTINEL, Expect, Found, judge
from benchmarks.faults.matrix import Row, Run, injected, lost, matrix
from benchmarks.faults.programs import PROGRAMS
from instep.elastic.faults import KINDS, parse
from instep.elastic.heartbeat import PHASES, UNLIMITED

SECOND = 10**9
FAILURE = {"event": "failure", "rank": 1, "step": 4, "how": "was killed by SIGKILL"}
RECOVERY = {
    "event": "recovery",
    "noticed_ns": 11 * SECOND,
    "stepped_ns": 12 * SECOND,
    "seconds": {"ready": 0.25, "join": 0.25, "state": 0.25, "step": 0.25, "total": 1.0},
    "step": 5,
    "source": "a survivor",
}
EXPECT = Expect(SENTINEL, (0,), (1, 1), (1,), "SIGKILL", redone=1, source="survivor")
FOUND = Found(
    codes=(0,),
    said="rank 1 was killed by SIGKILL",
    events=[FAILURE, RECOVERY],
    moments=[10 * SECOND],
    same=True,
    steps=[(step, 16 * (step + 1)) for step in range(8)],
)


def wrong(found: Found, expect: Expect = EXPECT) -> list[str]:
    return judge(expect, found, num_steps=8, global_size=16)


def test_nothing_is_wrong_where_all_is_as_expected():
    assert wrong(FOUND) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codes": (1,)}, "expected exit codes (0,), got (1,)"),
        ({"events": []}, "expected 1 to 1 failures, got 0"),
        ({"events": [FAILURE, FAILURE, RECOVERY]}, "expected 1 to 1 failures, got 2"),
        ({"events": [{**FAILURE, "rank": 0}, RECOVERY]}, "expected rank [1] to be named, got [0]"),
        ({"events": [{**FAILURE, "how": "was stopped for 1.1 s"}, RECOVERY]}, "state of the process"),
        ({"events": [FAILURE, {**RECOVERY, "source": "the memory copy"}]}, "the memory copy"),
        ({"events": [FAILURE, {**RECOVERY, "step": 3}]}, "expected at most 1 steps to be made twice, got 2"),
        ({"redone_by_resume": 2}, "expected at most 1 steps to be made twice, got 2"),
        ({"said": "it ended"}, "expected 'SIGKILL' among what it says"),
        ({"same": False}, "expected the hash of the undisturbed run"),
        ({"left": ["process 7"]}, "left behind: process 7"),
        ({"steps": FOUND.steps[:-1]}, "every sample once, but step 7 has cursor None"),
        ({"steps": [*FOUND.steps, (3, 16)]}, "every sample once, but step 3 has cursor 16"),
        ({"skipped": 1}, "expected 0 skipped steps, got 1"),
        ({"problems": ["it did not end"]}, "it did not end"),
    ],
)
def test_whatever_is_not_as_expected_is_named(change, said):
    assert [text for text in wrong(replace(FOUND, **change)) if said in text]


def test_a_recovery_is_timed_from_the_fault_and_without_its_moment_from_its_notice():
    assert FOUND.seconds == [{"detect": 1.0, **RECOVERY["seconds"], "total": 2.0}]
    unknown = replace(FOUND, moments=[])
    assert unknown.seconds == [RECOVERY["seconds"]]
    told = replace(unknown, events=[{**FAILURE, "injected_ns": 10 * SECOND}, RECOVERY])
    assert told.seconds == FOUND.seconds
    twice = replace(told, events=[*told.events, FAILURE, RECOVERY])
    assert twice.seconds == [*FOUND.seconds, RECOVERY["seconds"]]


def test_every_kind_of_fault_is_in_the_matrix_and_every_phase_of_a_step_has_a_kill():
    faults = [parse(fault) for row in matrix() for run in row.runs for fault in run.faults]
    signals = {"kill", "segv", "abort", "term", "usr1", "int", "stop"}  # they are sent from outside
    assert set(KINDS) - signals <= {fault.kind for fault in faults}
    killed = {fault.phase for fault in faults if fault.kind == "kill"}
    phases = set(PHASES[PHASES.index("join") : PHASES.index("summary")])
    assert phases - UNLIMITED <= killed  # the campaign's runs are no scripts
    assert {row.program for row in matrix() if row.program} == set(PROGRAMS)


def test_what_a_command_leaves_behind_is_named_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LEAVE_S", 0.1)
    words = ["sh", "-c", 'sleep 60 & touch "$TMPDIR/forgotten"']
    ended = run(words, tmp_path, tmp_path / "run")
    left = [name for name in ended.left if not name.startswith("/dev/shm/")]  # other tests have some
    assert [name.split()[0] for name in left] == ["process", "temporary"]
    assert left[1] == "temporary forgotten"


@pytest.fixture
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """In a folder with a short name: the path of a socket in it has at most 107 bytes."""
    return Bench(tmp_path_factory.mktemp("bench"), ["no-pickle"])


@pytest.mark.slow
def test_a_rank_is_replaced_where_whoever_unpickles_is_caught(bench):
    run = Run(("--checkpoint.every", "4"), (injected("kill", step=6),), pauses=False)
    made = bench.make(Row("", "", "", lost(1), (run,), steps=8))
    assert made.wrong == [], made.found.said
    assert len(made.found.recoveries) == 1


@pytest.mark.slow
def test_in_a_rank_whoever_unpickles_is_caught_indeed(bench):
    words = [sys.executable, "-m", "instep", "train", "-n", "1", "--run-dir", str(bench.directory / "run")]
    words += ["--config", str(bench.directory / "recipe.toml"), "--steps", "2"]
    place = bench.directory
    ended = run(Inside(("no-pickle", "unpickle"))(words, place), place, place / "run")
    assert ended.code == 1
    assert "pickle.loads was called" in ended.said


def layouts(seed: int) -> list[campaign.Layout]:
    return [campaign.layout(seed, number) for number in range(100)]


def test_a_campaign_draws_every_fault_strategy_and_stage_and_the_command_can_read_them():
    drawn = layouts(3)
    faults = [parse(spec) for one in drawn for spec in one.inside]
    assert {*campaign.INSIDE, "flip"} == {fault.kind for fault in faults}
    assert {*campaign.PHASES, *campaign.SOMETIMES, "join"} == {fault.phase for fault in faults}
    assert {*campaign.OUTSIDE, "term"} == {blow.what for one in drawn for blow in one.blows}
    words = {word for one in drawn for word in one.args}
    assert {*campaign.STRATEGIES, "1", "2", "3", "shm", "gloo", "--min-ranks"} <= words
    assert {one.ranks for one in drawn} == {1, 2, 3, 4}


def test_kills_are_drawn_at_every_point_of_a_pipeline_and_the_command_can_read_them():
    numbers = range(len(pipelines.LAYOUTS))
    drawn = [pipelines.pipelined(seed, number) for seed in range(8) for number in numbers]
    assert drawn[0] == pipelines.pipelined(0, 0) != pipelines.pipelined(1, 0)
    kills = [parse(spec) for one in drawn for spec in one.inside]
    points = {*pipelines.PHASES, *pipelines.ONCE, *pipelines.SOMETIMES, *pipelines.RECOVERING}
    assert points == {kill.phase for kill in kills} <= set(PHASES)
    assert {kill.rank for kill in kills} == {0, 1, 2, 3}
    assert 8 < max(kill.entry for kill in kills if kill.phase == "forward") <= 16  # 8, in two stages
    assert all(len(one.inside) + len(one.blows) >= 8 for one in drawn)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_faults_in_four_layouts_leave_the_bits_and_nothing_else(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    found = campaign.measure_campaign(Bench(folder), secrets.randbelow(1_000_000), range(4))
    assert not found["wrong"], found["wrong"]
