"""What ``instep report`` makes of its arguments, what it writes, and how it ends."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from instep.cli.exit_codes import DONE, USAGE
from instep.cli.report import main
from instep.record.directory import CONFIG
from instep.timeline.trace_files import FOLDER
from tests.timeline.made_up_run import MadeUpRun

WRITTEN = {"report.html", "report.json"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    MadeUpRun(tmp_path / "run" / FOLDER, 2).steps(0, 8)
    return tmp_path / "run"


def files(path: Path) -> set[str]:
    return {str(each.relative_to(path)) for each in path.rglob("*") if each.is_file()}


def test_page_figures_traces_and_picture_are_written_and_named(run, capsys):
    before = files(run)
    assert main([str(run)]) == DONE
    said = capsys.readouterr()
    lines = [line.split(maxsplit=1) for line in said.out.splitlines()]
    written = {str(Path(line[1]).relative_to(run)) for line in lines if line[0] == "wrote"}
    assert written == files(run) - before == WRITTEN | {
        "trace/trace.json.gz", "trace/hta/rank-0.json.gz", "trace/hta/rank-1.json.gz", "trace/step.svg",
        "trace/step.png",
    }  # fmt: skip
    assert lines[0] == ["run", f"{run}: recorded"] and lines[1][0] == "time" and said.err == ""
    story = json.loads((run / "report.json").read_text())
    assert len(story["breakdown"]["ranks"]) == 2 and "</html>" in (run / "report.html").read_text()
    with gzip.open(run / "trace" / "hta" / "rank-1.json.gz") as file:
        assert json.load(file)["distributedInfo"] == {"backend": "gloo", "rank": 1, "world_size": 2}


def test_a_run_of_no_step_has_a_page_and_a_note(tmp_path, capsys):
    (tmp_path / CONFIG).write_text("steps = 3\n")
    assert main([str(tmp_path)]) == DONE
    assert files(tmp_path) == {CONFIG, *WRITTEN}
    assert "note   the run ended early, after 0 of 3 steps" in capsys.readouterr().out


def test_a_name_that_is_half_a_formula_is_only_a_name(tmp_path):
    path = tmp_path / r"a$b_{\x$ {{ 7*7 }} <script>"
    MadeUpRun(path / FOLDER, 1).steps(0, 3)
    assert main([str(path)]) == DONE
    assert r"a$b_{\x$ {{ 7*7 }} &lt;script&gt;" in (path / "report.html").read_text()


@pytest.mark.parametrize(
    ("prepare", "code"),
    [
        (lambda path: None, USAGE),
        (lambda path: path.mkdir(), USAGE),
        (lambda path: path.write_text("x"), USAGE),
        (lambda path: (path.mkdir(), (path / CONFIG).mkdir()), USAGE),
        (lambda path: (path.mkdir(), (path / CONFIG).write_text(""), (path / "trace").write_text("")), USAGE),
        (lambda path: (path / "report.html").mkdir(parents=True) or (path / CONFIG).write_text(""), USAGE),
    ],
)  # fmt: skip
def test_where_there_is_no_run_or_no_way_to_write_a_sentence_says_so(tmp_path, capsys, prepare, code):
    prepare(tmp_path / "run")
    assert main([str(tmp_path / "run")]) == code
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("instep report: error: ") and str(tmp_path / "run") in line


@pytest.mark.slow
def test_eight_ranks_and_a_thousand_steps_fit_into_memory_and_onto_a_page(tmp_path):
    """How long that takes is measured by benchmarks; what it may take of memory is 1 GB."""
    MadeUpRun(tmp_path / FOLDER, 8, micro_batches=8, buckets=8, capacity=1 << 16).steps(0, 1000)
    process = subprocess.Popen(
        [sys.executable, "-m", "instep", "report", tmp_path], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == DONE
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    story = json.loads((tmp_path / "report.json").read_text())
    assert [row["steps"] for row in story["breakdown"]["ranks"]] == [998] * 8
    assert usage.ru_maxrss < 1_000_000  # kB
