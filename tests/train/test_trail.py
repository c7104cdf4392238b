"""Reading a run's books: of a killed one, of an odd one, of no run at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instep.train.ledger import LEAVES, LEDGER
from instep.train.trail import Leaf, placement, read_run

STEP = {"step": 1, "cursor": 4, "loss": "0x1.8p+1", "grad_norm": "0x1p+0", "sampled": [["w", 0, "ab"]]}


def book(path: Path, *lines: object, name: str = LEDGER, end: str = "\n") -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (path / name).write_text(text + end)
    return path


def test_a_line_that_was_being_written_when_the_run_was_killed_is_left_out(tmp_path: Path) -> None:
    run = read_run(book(tmp_path, STEP, json.dumps(STEP)[:30], end=""))
    assert list(run.steps) == [1]
    assert run.notes == [f"{tmp_path / LEDGER}, line 2: torn, and left out"]


def test_of_a_step_that_was_made_twice_the_last_line_counts(tmp_path: Path) -> None:
    again = {**STEP, "step": 2}
    run = read_run(book(tmp_path, STEP, {**again, "loss": "0x0p+0"}, again, STEP))
    assert run.steps[2].loss == STEP["loss"]
    assert run.remade == [2]  # with other bits than before, which step 1 was not


def test_events_go_where_they_belong(tmp_path: Path) -> None:
    start = {
        "step": 0,
        "event": "started",
        "numerical": {"seed": 1},
        "state_sha256": "ab",
        "entries": {"w": "c"},
    }
    accepted = {"step": 1, "event": "contract accepted", "differences": ["x"]}
    run = read_run(book(tmp_path, start, STEP, accepted, {"step": 1, "event": "rank lost", "rank": 2}))
    assert (run.starts, run.accepted, run.numerical) == ([start], [accepted], {"seed": 1})
    assert [line["event"] for line in run.others] == ["rank lost"]
    assert (run.whole(0), run.whole(1)) == (("ab", {"w": "c"}), None)


def test_leaves_are_read_by_step_and_number(tmp_path: Path) -> None:
    book(tmp_path, STEP)
    leaf = {"step": 1, "leaf": 3, "rank": 2, "parameters": {"w": "ab"}}
    run = read_run(book(tmp_path, leaf, {"step": 1, "reduced": {"w": "cd"}}, name=LEAVES))
    assert run.leaves == {1: {3: Leaf(2, {"w": "ab"})}}
    assert run.reduced == {1: {"w": "cd"}}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{torn", r"line 1: expected JSON, got b'{torn"),
        ("[" * 100_000, r"line 1: expected JSON, got"),
        ("9" * 10_000, r"line 1: expected JSON, got"),
        ("\x00\xff", r"line 1: expected JSON"),
        ([1], r"line 1: expected a JSON object, got \[1\]"),
        ({"epoch": 1}, r"line 1: expected a field 'step', got 'epoch'"),
        ({}, r"line 1: expected a field 'step', got none"),
        ({"step": "1"}, r"line 1: step: expected a whole number from 0, got '1'"),
        ({"step": True}, r"step: expected a whole number from 0, got True"),
        ({"step": -1}, r"step: expected a whole number from 0, got -1"),
        ({"step": 1, "loss": 3.5}, r"loss: expected a float in hexadecimal, got 3.5"),
        ({"step": 1, "loss": "three"}, r"loss: expected a float in hexadecimal, got 'three'"),
        ({"step": 1, "loss": "0x1p99999"}, r"loss: expected a float in hexadecimal"),
        ({"step": 1, "sampled": [["w", 0]]}, r"sampled: expected a list of name, block and hash"),
        ({"step": 1, "entries": {"w": 1}}, r"entries: expected an object of hashes, got"),
        ({"step": 1, "event": []}, r"event: expected text, got \[\]"),
        ({"step": 1, "placement": {"dp": "2"}}, r"placement: expected an object of sizes"),
        ({"step": 1, "numerical": {"seed": [1]}}, r"numerical: expected an object of settings"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_cannot_be_understood_is_named(tmp_path: Path, line: object, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        read_run(book(tmp_path, line, STEP))


def test_a_leaf_without_its_rank_is_named(tmp_path: Path) -> None:
    book(tmp_path, STEP)
    with pytest.raises(ValueError, match=r"leaves.jsonl, line 1: expected 'rank' and 'parameters'"):
        read_run(book(tmp_path, {"step": 1, "leaf": 0}, name=LEAVES))


def test_a_directory_that_is_none_or_holds_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: expected the directory of a run, got none"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file: expected the directory of a run, got a file"):
        read_run(tmp_path / "file")
    with pytest.raises(ValueError, match=r"has no ledger.jsonl: expected the directory of a run of instep"):
        read_run(tmp_path)


def test_a_placement_in_words() -> None:
    assert placement({"placement": {"dp": 2, "pp": 3}, "strategy": "flat"}) == "dp=2, pp=3, flat"
    assert placement({"world_size": 4}) == "4 ranks"
    assert placement({}) == ""
