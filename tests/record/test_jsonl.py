"""What of a run's records survives a run that was torn off, and what is said of the rest."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from instep.record.directory import RECORD
from instep.record.jsonl import OF_STEPS, JsonLines, read_last_lines, read_lines, read_object, replace_text


def written(path: Path, *steps: int) -> Path:
    lines = JsonLines(path, before_step=0)
    for step in steps:
        lines.write(step=step, loss=0.5)
    lines.close()
    return path


def steps_in(path: Path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


@pytest.mark.parametrize(
    "torn", [b"{", b'{"step"', b'{"step": 3, "loss": 0.', b"\0\0\0\n", b'{"step\xff\xfe']
)
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = written(tmp_path / RECORD, 1, 2, 3)
    whole = path.read_text()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole.removesuffix(last).encode() + torn)
    assert steps_in(path) == [1, 2]
    resumed = JsonLines(path, before_step=3)
    resumed.write(step=3, loss=0.5)
    resumed.close()
    assert path.read_text() == whole


def test_a_last_line_that_only_lacks_its_end_is_kept_and_ended(tmp_path):
    path = written(tmp_path / RECORD, 1, 2)
    path.write_text(path.read_text().removesuffix("\n"))
    resumed = JsonLines(path, before_step=3)
    resumed.write(step=3)
    resumed.close()
    assert steps_in(path) == [1, 2, 3]


def test_what_is_left_out_is_noted_for_those_who_ask(tmp_path):
    path = written(tmp_path / RECORD, 1, 2)
    for text, problem in {
        "{": " is torn at line 3",
        "[1]\n": ", line 3: expected a JSON object, got [1]",
        '{"step": "3"}\n': ", line 3: step: expected a whole number from 0, got '3'",
    }.items():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]) + text)
        notes: list[str] = []
        assert [line["step"] for line in read_lines(path, notes, OF_STEPS)] == [1, 2]
        assert notes == [f"{RECORD}{problem}: the rest is left out"]


def test_a_file_that_cannot_be_read_is_noted_or_an_error_but_not_an_empty_one(tmp_path):
    notes: list[str] = []
    assert read_lines(tmp_path, notes) == [] and notes == [f"{tmp_path.name} cannot be read: left out"]
    with pytest.raises(OSError, match="directory"):
        read_lines(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "[" * 100_000])
def test_an_object_that_cannot_be_read_is_empty_and_noted(tmp_path, text):
    path = tmp_path / "summary.json"
    notes: list[str] = []
    assert read_object(path, notes) == {} and notes == []
    path.write_text(text)
    assert read_object(path, notes) == read_object(path) == {}
    assert notes == ["summary.json cannot be read: left out"]
    path.write_text(json.dumps({"steps": 3}))
    assert read_object(path) == {"steps": 3}


def test_the_last_lines_have_one_of_a_step_however_long_the_events_after_it_are(tmp_path):
    path = written(tmp_path / RECORD, 1, 2)
    assert read_last_lines(path)[-1]["step"] == 2 and read_last_lines(tmp_path / "none") == []
    lines = JsonLines(path, before_step=3)
    lines.write(step=2, event="started", much="x" * (1 << 19))
    lines.close()
    assert [line["step"] for line in read_last_lines(path) if "event" not in line] == [1, 2]


@pytest.mark.parametrize("lost", [Path.unlink, lambda path: path.rename(path.with_name("elsewhere"))])
def test_a_line_that_goes_to_a_file_which_is_gone_is_an_error(tmp_path, lost):
    path = tmp_path / RECORD
    lines = JsonLines(path, before_step=0)
    lines.write(step=1)
    lost(path)
    for _ in range(2):
        with pytest.raises(OSError, match=r"removed or replaced while it was in use.*steps\.jsonl"):
            lines.write(step=2)
        path.write_text("")  # of another run
    lines.close()


def test_two_writers_of_one_file_do_not_meet_and_nothing_else_is_left(tmp_path, monkeypatch):
    path, replace = tmp_path / "report.json", os.replace

    def another_first(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        replace_text(path, "the other's")
        replace(source, target)

    monkeypatch.setattr(os, "replace", another_first)
    replace_text(path, "ours")
    assert path.read_text() == "ours"
    monkeypatch.setattr(os, "replace", lambda source, target: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replace_text(path, "half")
    assert os.listdir(tmp_path) == ["report.json"]
