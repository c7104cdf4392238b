"""What is told of a run, whatever is left of it: finite figures of bounded size, and notes on faults."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instep.net.peers import Peer, own_peer
from instep.recipes import text_config
from instep.record.directory import CONFIG, FAULTS, RECORD, SUMMARY, WORKERS
from instep.record.report_data import MOST_POINTS, PAGE, report_data, to_json, write_report
from instep.record.step_lines import STARTED
from instep.run.toml import to_toml
from instep.timeline.breakdown import BUBBLE, PARTS
from instep.timeline.report import render
from instep.timeline.trace_files import FOLDER
from tests.timeline.made_up_run import DATA, FLIGHT, HOST, UPDATE, MadeUpRun, name
from tests.timeline.test_trace_files import json_values

STEPS = 12
Files = Callable[[Path], object]


def run_of(path: Path, world_size: int = 3, steps: int = STEPS, **how: Any) -> Path:
    """The directory of a run whose ranks computed as ``how`` says, finished."""
    path.mkdir(parents=True, exist_ok=True)
    MadeUpRun(path / FOLDER, world_size, **how).steps(0, steps)
    config = to_toml(text_config.tiny()).replace(f"steps = {text_config.tiny().steps}", f"steps = {steps}", 1)
    (path / CONFIG).write_text(config)
    write_lines(path / RECORD, [started(world_size), *steps_of(steps)])
    (path / SUMMARY).write_text(json.dumps({"steps": steps, "tokens_per_s": 9.5, "strategy": "bucketed"}))
    return path


def steps_of(num: int) -> list[dict[str, Any]]:
    return [{"step": s, **figures(s)} for s in range(num)]


def figures(step: int) -> dict[str, float]:
    return {"loss": 5.0 - step / 100, "step_ms": 38.0, "tokens_per_s": 1e4}


def started(world_size: int, step: int = 0) -> dict[str, object]:
    return {"step": step, "event": STARTED, "restarts": 0, "world_size": world_size, "numerical": {"seed": 3}}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def notes_of(path: Path, *steps: int) -> list[str]:
    """Of what can be shown."""
    report, _, _ = report_data(path, steps)
    assert_can_be_shown(report)
    return report["run"]["notes"]


def assert_can_be_shown(report: Mapping[str, Any]) -> None:
    text = to_json(report)
    assert json.loads(text, parse_constant=pytest.fail) == report
    text.encode()
    assert render(report).encode()
    assert [*report] == ["format", "run", "advice", "slow", "breakdown", "over_time", "buckets", "curves",
                        "timeline", "contract", "starts", "faults"]  # fmt: skip


def values(found: object) -> Iterator[object]:
    if isinstance(found, dict):
        yield from (value for each in found.values() for value in values(each))
    elif isinstance(found, list):
        yield from (value for each in found for value in values(each))
    else:
        yield found


def test_a_finished_run_has_every_section_and_nothing_to_note(tmp_path):
    report, _, _ = report_data(run_of(tmp_path, slower=lambda rank: 1.5 if rank == 2 else 1.0))
    assert_can_be_shown(report)
    run = report["run"]
    assert (run["state"], run["notes"], run["world_size"], run["threads"]) == ("finished", [], 3, 1)
    assert (run["name"], run["strategy"], run["backend"]) == (tmp_path.name, "bucketed", "gloo")
    assert run["summary"]["tokens_per_s"] == 9.5 and run["command"].startswith("instep train --config ")
    assert run["command"].endswith("-again")
    assert report["slow"]["rank"] == 2 and report["slow"]["excess_ms"] == pytest.approx(9)
    assert report["advice"][0]["cause"] == "slow rank" and "try" in report["advice"][0]
    wall = 2 * DATA + 27 + 2 * FLIGHT + UPDATE + HOST
    for row in report["breakdown"]["ranks"]:
        assert sum(row["parts"].values()) == pytest.approx(row["wall_ms"]) == pytest.approx(wall)
    assert [*report["breakdown"]["parts"]] == [name for name in PARTS if name != BUBBLE]  # of pipelines
    assert report["buckets"][1]["mb"] == pytest.approx(1.048576) and sorted(
        report["buckets"][0]["ready_ms"]
    ) == ["0", "1", "2"]
    assert (
        report["over_time"]["steps"] == [*range(STEPS)]
        and report["over_time"]["ranks"][1]["wall"] == [wall] * STEPS
    )
    assert report["curves"]["steps"] == [*range(STEPS)] and report["curves"]["loss"][3] == figures(3)["loss"]
    assert report["contract"] == {"seed": 3} and report["starts"][0]["world_size"] == 3


def test_the_chosen_steps_are_each_there_once_with_a_reason(tmp_path):
    run = MadeUpRun(tmp_path / FOLDER, 2)
    for step in range(11):
        run.slower = lambda rank, step=step: {0: 9.0, 4: 3.0, 6: 0.5}.get(step, 1.0 + step / 100)
        run.step(step)
    shown = {step["why"]: step["step"] for step in report_data(tmp_path)[0]["timeline"]["steps"]}
    assert shown == {"median": 7, "slowest": 4, "fastest": 6}


def test_steps_that_are_asked_for_are_shown_once_and_those_that_are_not_kept_are_noted(tmp_path):
    run_of(tmp_path)
    report, _, _ = report_data(tmp_path, [7, 3, 7, 99, -1])
    assert [step["step"] for step in report["timeline"]["steps"]] == [7, 3]
    assert report["run"]["notes"] == ["step 99, -1 is not in the trace, which keeps the last ones: 0 to 11"]


def remove(*names: str) -> Files:
    return lambda path: [(path / each).unlink() for each in names]


def text(file: str, content: str | bytes) -> Files:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda path: (path / file).write_bytes(data)


def append(file: str, content: str) -> Files:
    return lambda path: (path / file).write_text((path / file).read_text() + content)


def directory(file: str) -> Files:
    return lambda path: ((path / file).unlink(), (path / file).mkdir())


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        (text(SUMMARY, "{"), "summary.json cannot be read"),
        (text(SUMMARY, b"\xff\xfe"), "summary.json cannot be read"),
        (directory(SUMMARY), "summary.json cannot be read"),
        (append(RECORD, '{"step": 1'), "steps.jsonl is torn at line 14"),
        (append(RECORD, '{"step": []}\n'), "steps.jsonl, line 14: step: expected a whole number"),
        (directory(RECORD), "steps.jsonl cannot be read"),
        (text(FAULTS, '{"event": "x"}\n{'), "faults.jsonl is torn at line 2"),
        (lambda path: shutil.rmtree(path / FOLDER), "there is no trace in trace/: the run kept none (--rec"),
        (lambda path: [(path / FOLDER / name(r)).unlink() for r in range(3)], "there is no trace in trace/"),
        (lambda path: [text(name(r), "")(path / FOLDER) for r in range(3)], "no trace in trace/ can be read"),
        (lambda path: (path / FOLDER / name(1)).unlink(), "no trace of rank 1"),
        (lambda path: text(name(0), os.urandom(99_999))(path / FOLDER), "no trace of rank 0"),
        (lambda path: os.truncate(path / FOLDER / name(2), 30_000), "rank-00002.ring is truncated"),
        (remove(RECORD), "the run ended early, after 0 of 12 steps"),
        (remove(SUMMARY), "the run ended early, after 12 of 12 steps"),
        (text(SUMMARY, '{"steps": 4}'), "summary.json is of the first 4 steps"),
    ],
)  # fmt: skip
def test_what_is_lost_or_nonsense_is_noted_and_the_rest_is_told(tmp_path, damage, note):
    damage(run_of(tmp_path))
    assert any(told.startswith(note) for told in notes_of(tmp_path)), notes_of(tmp_path)


@pytest.mark.parametrize("setting", ["x", [1], None, {"strategy": 7}])
def test_a_trace_that_does_not_tell_its_setting_is_shown_without(tmp_path, setting):
    report, _, _ = report_data(run_of(tmp_path, 2, head={"setting": setting}))
    assert_can_be_shown(report)
    assert (report["run"]["strategy"], report["run"]["notes"], report["advice"]) == (None, [], [])
    assert len(report["breakdown"]["ranks"]) == 2


def test_a_run_of_no_step_is_its_config_and_a_note(tmp_path):
    (tmp_path / CONFIG).write_text(to_toml(text_config.tiny()))
    notes = notes_of(tmp_path)
    assert [note.split(":")[0] for note in notes] == [
        f"the run ended early, after 0 of {text_config.tiny().steps} steps", "there is no trace in trace/",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "state", "note"),
    [
        (own_peer(0), "running", "the run is still going: 12 of 40 steps so far"),
        (Peer(0, "another host", 1, 1), "ended early", "or is still going on another host"),
        (Peer(0, own_peer(0).host, 1 << 30, 5, own_peer(0).pid_space), "ended early", "after 12 of 40 steps"),
    ],
)  # fmt: skip
def test_whether_a_run_goes_on_is_asked_of_its_processes(tmp_path, peer, state, note):
    run_of(tmp_path)
    (tmp_path / CONFIG).write_text("steps = 40\n")
    (tmp_path / WORKERS).write_text(json.dumps({"0": asdict(peer)}))
    report, _, _ = report_data(tmp_path)
    assert report["run"]["state"] == state and any(note in told for told in report["run"]["notes"])


def test_ranks_of_an_earlier_world_are_noted_and_counted_no_more(tmp_path):
    run_of(tmp_path, 4)
    run = MadeUpRun(tmp_path / FOLDER, 2, begin_ms=60_000)
    run.steps(10, 20)
    write_lines(tmp_path / RECORD, [started(4), started(2, 10), *steps_of(20)])
    report, tapes, _ = report_data(tmp_path, [8, 10, 15])
    assert [step["ranks"] for step in report["timeline"]["steps"]] == [[0, 1, 2, 3], [0, 1], [0, 1]]
    assert [row["rank"] for row in report["breakdown"]["ranks"]] == [0, 1] and report["run"][
        "world_size"
    ] == 2
    assert "rank 3 took part until step 11: the run went on without it" in report["run"]["notes"]
    assert report["over_time"]["ranks"][3]["wall"][15] is None and len(tapes.steps) == 20


def test_figures_of_a_run_that_went_on_otherwise_are_those_of_its_last_part(tmp_path):
    """On two ranks, then the last four again on one that computes thrice as long; then a start, no step."""
    run_of(tmp_path, 2)
    MadeUpRun(tmp_path / FOLDER, 1, begin_ms=60_000, slower=lambda rank: 3.0).steps(8, STEPS)
    write_lines(tmp_path / RECORD, [started(2), started(1, 8), started(2, STEPS), *steps_of(STEPS)])
    report, _, insight = report_data(tmp_path)
    assert report["run"]["first_step"] == 8
    assert report["run"]["notes"][0] == (
        "only curves and the time by step are of the whole run, all else is of its last part: steps 8 to 11"
    )
    (row,) = report["breakdown"]["ranks"]
    assert (row["rank"], row["steps"]) == (0, 4)
    assert row["parts"]["compute"] == pytest.approx(3 * 2 * (3 + 6)) and insight.breakdowns[0].steps == 4
    assert {step["step"] for step in report["timeline"]["steps"]} <= {8, 9, 10, 11}
    assert report["over_time"]["steps"] == [*range(STEPS)]
    assert report["curves"]["steps"] == [*range(STEPS)]


@pytest.mark.parametrize("what", ["nothing", "a file", "an empty directory", "other files"])
def test_what_is_no_run_is_refused(tmp_path, what):
    path = tmp_path / "run"
    if what == "a file":
        path.write_text("")
    elif what != "nothing":
        path.mkdir()
        (path / "x").write_text("") if what == "other files" else None
    words = (
        "does not exist: pass the directory of a run, or a file"
        if what == "nothing"
        else "expected the directory of a run"
    )
    with pytest.raises(ValueError, match=words):
        report_data(path)


def test_long_runs_are_thinned_to_the_last_step(tmp_path):
    run_of(tmp_path, 1, steps=1000, micro_batches=1, buckets=1, capacity=1 << 15)
    write_lines(tmp_path / RECORD, [{**line, "held_out_loss": 1.0} for line in steps_of(3000)])
    report, _, _ = report_data(tmp_path)
    for steps, last in ((report["over_time"]["steps"], 999), (report["curves"]["steps"], 2999)):
        assert len(steps) == MOST_POINTS and steps[-1] == last and steps == sorted(set(steps))
    assert len(report["curves"]["held_out"]) == MOST_POINTS


def test_a_page_of_many_ranks_has_a_bounded_size(tmp_path):
    MadeUpRun(tmp_path / FOLDER, 48, micro_batches=20, buckets=30).steps(0, 6)
    assert [*write_report(tmp_path, None, [5, 3], 0)]
    report, _, _ = report_data(tmp_path, [5, 3])
    assert [step["ranks"] for step in report["timeline"]["steps"]] == [[*range(16)]] * 2
    assert report["run"]["notes"] == ["pictures of steps show the first 16 of 48 ranks"]
    assert (tmp_path / PAGE).stat().st_size < 2_000_000


def test_names_that_no_file_can_hold_are_told_as_well_as_can_be(tmp_path):
    run_of(tmp_path / os.fsdecode(b"a\xffb<script>"), head={"host": "h\ud800"}, slower=lambda rank: 1.0)
    report, _, _ = report_data(tmp_path / os.fsdecode(b"a\xffb<script>"))
    assert_can_be_shown(report)
    assert report["run"]["name"] == "a?b<script>"


words = st.sampled_from(
    ["step", "event", "loss", "step_ms", "held_out_loss", "world_size", "numerical", "steps", "0"]
)
fields = st.dictionaries(words, json_values | st.just(STARTED), max_size=5)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(fields, max_size=3),
    summary=fields,
    workers=fields,
    file=st.sampled_from([RECORD, FAULTS]),
)
def test_whatever_the_files_hold_every_number_told_is_finite(tmp_path, lines, summary, workers, file):
    if not (tmp_path / CONFIG).exists():
        run_of(tmp_path, 1, steps=3)
    write_lines(tmp_path / file, lines)
    (tmp_path / SUMMARY).write_text(json.dumps(summary))
    (tmp_path / WORKERS).write_text(json.dumps(workers))
    report, _, _ = report_data(tmp_path)
    assert_can_be_shown(report)
    assert all(abs(x) < 1 << 63 for x in values(report) if isinstance(x, int))
