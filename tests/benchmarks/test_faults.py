"""The fault matrix: its judgement, its tables, and a recovery in which whoever unpickles is caught."""

import secrets
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.faults import campaign, command, copy_cost, kills, pipelines, report
from benchmarks.faults.acts import Inside
from benchmarks.faults.bench import Bench
from benchmarks.faults.command import run
from benchmarks.faults.inside import HOOKS
from benchmarks.faults.judge import SENTINEL, Expect, Found, judge, way
from benchmarks.faults.matrix import Row, Run, injected, lost, matrix
from benchmarks.faults.programs import PROGRAMS
from instep.elastic.faults import KINDS, parse
from instep.elastic.heartbeat import PHASES, UNLIMITED
from instep.launch.rank_exit import Exit, describe_exit

FOLDER = Path(report.__file__).parent
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


def test_what_may_be_left_behind_may_be():
    found = replace(FOUND, left=["temporary instep-abc"])
    assert wrong(found, replace(EXPECT, left="temporary instep-")) == []
    assert wrong(replace(FOUND, left=["process 7"]), replace(EXPECT, left="temporary instep-")) != []


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGSEGV, 0, 1])
def test_the_end_of_a_process_is_noticed_as_such(code):
    assert way({"how": describe_exit(Exit(1, 7, code))}) == SENTINEL


def test_a_recovery_is_timed_from_the_fault_and_without_its_moment_from_its_notice():
    assert FOUND.seconds == [{"detect": 1.0, **RECOVERY["seconds"], "total": 2.0}]
    unknown = replace(FOUND, moments=[])
    assert unknown.seconds == [RECOVERY["seconds"]]
    told = replace(unknown, events=[{**FAILURE, "injected_ns": 10 * SECOND}, RECOVERY])
    assert told.seconds == FOUND.seconds
    twice = replace(told, events=[*told.events, FAILURE, RECOVERY])
    assert twice.seconds == [*FOUND.seconds, RECOVERY["seconds"]]


def test_of_kills_in_a_row_each_recovery_belongs_to_the_first_since_the_one_before():
    again = {**RECOVERY, "noticed_ns": 21 * SECOND, "stepped_ns": 22 * SECOND}
    moments = [int(at * SECOND) for at in (10.5, 11.5, 20)]
    found = kills.recoveries(Found((0,), "", [FAILURE, RECOVERY, FAILURE, again], moments))
    assert [one["detect"] for one in found] == [0.5, 1.0]
    assert [one["kills_during"] for one in found] == [1, 0]
    assert [one["step"] for one in found] == [0.25, 0.25]


def test_every_kind_of_fault_is_in_the_matrix_and_every_phase_of_a_step_has_a_kill():
    faults = [parse(fault) for row in matrix() for run in row.runs for fault in run.faults]
    signals = {"kill", "segv", "abort", "term", "usr1", "int", "stop"}  # they are sent from outside
    assert set(KINDS) - signals <= {fault.kind for fault in faults}
    killed = {fault.phase for fault in faults if fault.kind == "kill"}
    phases = set(PHASES[PHASES.index("join") : PHASES.index("summary")])
    assert phases - UNLIMITED <= killed  # the campaign's runs are no scripts
    assert {row.program for row in matrix() if row.program} == set(PROGRAMS)


def test_rows_have_names_of_their_own_and_hooks_that_exist():
    names = [(row.group, row.name) for row in matrix()]
    assert len(set(names)) == len(names)
    through = [run.through for row in matrix() for run in row.runs if isinstance(run.through, Inside)]
    assert {hook.partition("=")[0] for inside in through for hook in inside.hooks} <= set(HOOKS)


ROW = Row("a group", "a fault", "what happens", lost(1), headline=True)
MADE = {
    "wrong": [],
    "codes": [75, 0],
    "same": True,
    "redone": 1,
    "seconds": FOUND.seconds,
    "named": [1],
    "left": [],
    "sources": ["a survivor"],
}


def cells(made: list[dict], skipped: str = "") -> dict[str, str]:
    """The one row of the table, by column."""
    found = {(ROW.group, ROW.name): {"skipped": skipped, "made": made}}
    names, _, values = (line.strip("| ").split(" | ") for line in report.table([ROW], found).splitlines())
    return dict(zip(names, values, strict=False))


def test_the_table_has_medians_and_maxima_and_what_was_as_expected():
    slower = {**MADE, "seconds": [{**MADE["seconds"][0], "detect": 3.0, "total": 4.0}]}
    shown = cells([MADE, slower, MADE])
    assert shown["detect(s)"] == "1.00 (3.00)"
    assert shown["first new step(s)"] == "2.00 (4.00)"
    assert (shown["exit"], shown["same bits"], shown["as expected"]) == ("75 → 0", "same", "yes")


def test_the_table_says_what_was_not_as_expected_and_what_was_not_made():
    assert cells([MADE, {**MADE, "wrong": ["it hung"]}])["as expected"] == "**no**, 1 of 2: it hung"
    found = {(ROW.group, ROW.name): {"skipped": "needs mounts", "made": []}}
    assert "needs mounts" in report.table([ROW], found)
    assert report.not_green({"rows": [{"group": "g", "name": "n", "made": [{"wrong": ["it hung"]}]}]}) == [
        ("g: n", "it hung")
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("faults table", "faults rows", "kills table", "copy table", "campaign table", "pipelines table"),
        "environment",
    ],
)
def test_the_readme_has_a_place_for_each_table(name, tmp_path):
    readme = Path(shutil.copy(FOLDER / "README.md", tmp_path))
    report.write_between(readme, name, "what was measured")
    assert readme.read_text().count("what was measured") == 1


def test_the_cost_of_the_memory_copy_is_its_time_in_that_of_the_steps():
    block, copy_ms = 10, 2
    lines = [
        {"step": step, "copied": on, "on": on, "copy_ns": 10**6 * copy_ms * on, "ns": 10**6 * at}
        for step, on, at in steps_of_ms(block, plain_ms=20, copy_ms=copy_ms)
    ]
    paired = copy_cost.as_paired(lines)
    assert paired["paired"]["median"] == pytest.approx(22 / 20)
    on = [{**line, "copied": True, "copy_ns": 10**6, "ns": 10**7 * line["step"]} for line in lines]
    assert copy_cost.as_told(on)["share"] == pytest.approx(0.1)
    assert copy_cost.as_told(on)["interval"] == 1


def steps_of_ms(block: int, *, plain_ms: int, copy_ms: int):
    """Steps with whether they are copied and when they end, by blocks in turn."""
    at = 0
    for step in range(10 * block):
        on = step // block % 2 == 0
        at += plain_ms + copy_ms * on
        yield step, on, at


def test_what_a_command_leaves_behind_is_named_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LEAVE_S", 0.1)
    words = ["sh", "-c", 'sleep 60 & touch "$TMPDIR/forgotten"']
    ended = run(words, tmp_path, tmp_path / "run")
    assert [name.split()[0] for name in ended.left] == ["process", "temporary"]
    assert ended.left[1] == "temporary forgotten"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, ["no-pickle"])


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


def test_the_same_seed_gives_the_same_campaign():
    assert layouts(3) == layouts(3) != layouts(4)


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


def test_a_layout_that_is_stopped_is_resumed():
    stopped = next(one for one in layouts(3) if one.is_stopped)
    assert stopped.row.expect.codes == (75, 0)
    assert len(stopped.row.runs) == 2


def test_from_a_kill_to_the_next_step_is_from_the_fault_before_the_first_death():
    first = {**FAILURE, "noticed_ns": 11 * SECOND}
    second = {**FAILURE, "noticed_ns": 11.5 * SECOND, "injected_ns": 11.4 * SECOND}
    spare = 8 * SECOND  # nobody is seated after it
    found = replace(FOUND, events=[first, second, RECOVERY], moments=[spare, 10 * SECOND, 20 * SECOND])
    assert campaign.kill_to_step(found) == [2.0]
    stopped = {**FAILURE, "noticed_ns": 11 * SECOND, "how": "was stopped for 1.1 s"}
    assert campaign.kill_to_step(replace(found, events=[stopped, second, RECOVERY])) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_faults_in_four_layouts_leave_the_bits_and_nothing_else(tmp_path):
    found = campaign.measure_campaign(Bench(tmp_path), secrets.randbelow(1_000_000), range(4))
    assert not found["wrong"], found["wrong"]
