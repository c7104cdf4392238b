"""``steps.jsonl``: a line has every bit of its step, and is read back, also of a killed run or an odd one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from instep.recipes import text_config
from instep.record.directory import CONFIG, RECORD, command_again
from instep.record.jsonl import EVENTS, JsonLines, to_json
from instep.record.step_lines import (
    Made,
    RecordedMicroBatch,
    accepted,
    evaluated,
    part_begins,
    read_run,
    started,
    starts,
    step_line,
)
from instep.run.settings import ScriptConfig
from instep.run.toml import to_toml

ONE = {"world_size": 1, "placement": {"dp": 1}, "strategy": "bucketed", "parallel": {}}
START = {"restarts": 0, "fingerprint": "f", "numerical": {"seed": 0}}
STEP = {"step": 1, "cursor": 4, "loss": 3.0, "norm": 1.0, "sampled": [["w", 0, "ab"]]}


def record(path: Path, *lines: object, end: str = "\n") -> Path:
    text = "\n".join(line if isinstance(line, str) else to_json(line) for line in lines)
    (path / RECORD).write_text(text + end)
    return path


def strict(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_a_step_is_one_line_with_every_bit_and_no_more() -> None:
    made = Made(loss=0.1, norm=1 / 3, step_ms=2.0, skipped="spike", logged={"tokens_per_s": 7.0})
    whole = ("ab", {"w": "cd"})
    line = step_line(3, made, cursor=96, sampled=[("w", 2, "0badcafe")], whole=whole, held_out_loss=2.0)
    assert json.loads(to_json(line)) == {
        "step": 3,
        "cursor": 96,
        "skipped": "spike",
        "loss": 0.1,
        "norm": 1 / 3,
        "step_ms": 2.0,
        "exposed_ms": 0.0,
        "waiting_ms": 0.0,
        "tokens_per_s": 7.0,
        "held_out_loss": 2.0,
        "sampled": [["w", 2, "0badcafe"]],
        "state_sha256": "ab",
        "entries": {"w": "cd"},
    }
    bare = step_line(3, Made(), cursor=96, sampled=[])
    assert not {"loss", "norm", "rate", "skipped", "state_sha256", "entries", "leaves"} & set(bare)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.0])
def test_every_float_comes_back_from_a_file_that_any_reader_takes(tmp_path: Path, value: float) -> None:
    """Files had NaN and Infinity in them, which strict readers of JSON refuse."""
    made = Made(loss=value, norm=value, logged={"extra": value})
    record(tmp_path, step_line(0, made, cursor=1, sampled=[]))
    json.loads((tmp_path / RECORD).read_text(), parse_constant=strict)
    read = read_run(tmp_path).steps[0]
    assert (read.loss, read.norm) == (repr(value), repr(value))
    back = Made.from_json(json.loads(json.dumps(made.to_json()), parse_constant=strict))
    assert repr(back) == repr(made)


def test_events_are_read_back(tmp_path: Path) -> None:
    begin = started(0, ONE, **START, state=("ab", {"w": "c"}))
    change = accepted(2, ["threads: 1 in the checkpoint, 2 now"])
    again = started(2, ONE, **START)
    run = read_run(record(tmp_path, begin, evaluated(5.5), {**STEP, "step": 0}, STEP, change, again))
    assert (run.starts, run.accepted, run.numerical) == ([begin, again], [change], {"seed": 0})
    assert (run.whole(-1), run.whole(0), run.whole(1)) == (("ab", {"w": "c"}), None, None)
    assert starts(tmp_path) == [begin, again]


def start(step: int, generation: int = 1, ranks: int = 2, **parallel: object) -> dict[str, object]:
    layout = {"world_size": ranks, "placement": {"dp": ranks}, "strategy": "flat", "parallel": parallel}
    return {"step": step, "generation": generation, **layout}


@pytest.mark.parametrize(
    ("starts", "step"),
    [
        ([], 0),
        ([start(0)], 0),
        ([start(0), start(12)], 12),  # resumed, even if on as many ranks
        ([start(0), start(5, 2), start(9, 3)], 0),  # ranks were replaced
        ([start(0), start(5, 2, ranks=1), start(6, 3, ranks=1)], 5),  # one was not
        ([start(0), start(5, 2, ranks=1), start(6, 3)], 6),  # for some steps
        ([start(0), start(12), start(15, 2), start(14, 3)], 12),  # which may go back
        ([start(0, shard_stage=3), start(12, 2, shard_stage=1)], 12),  # the first ranks wrote no start
        ([{}], 0),
        ([{"step": "x"}], 0),
        ([{"generation": "x"}, {"generation": None}], 0),
    ],
)
def test_a_part_is_what_one_command_has_made_in_one_layout(
    starts: list[dict[str, object]], step: int
) -> None:
    assert part_begins(starts) == step


def test_a_line_that_was_being_written_when_the_run_was_killed_is_left_out(tmp_path: Path) -> None:
    run = read_run(record(tmp_path, STEP, json.dumps(STEP)[:30], end=""))
    assert list(run.steps) == [1]
    assert run.notes == [f"{tmp_path / RECORD}, line 2: torn, and left out"]


def test_leaves_are_read_by_number_with_the_rank_of_each_stage(tmp_path: Path) -> None:
    leaves = [{"leaf": 3, "rank": 3 - i, "parameters": {name: "ab"}} for i, name in enumerate("wv", 1)]
    step = read_run(record(tmp_path, {**STEP, "leaves": leaves, "reduced": {"w": "cd"}})).steps[1]
    assert step.leaves == {3: RecordedMicroBatch({"w": "ab", "v": "ab"}, {"w": 2, "v": 1})}
    assert (step.reduced, step.leaves[3].rank_of("v")) == ({"w": "cd"}, 1)


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
        ({"step": 1, "loss": "three"}, r"loss: expected a number, got 'three'"),
        ({"step": 1, "sampled": [["w", 0]]}, r"sampled: expected list\[tuple\[str, int, str\]\]"),
        ({"step": 1, "entries": {"w": 1}}, r"entries: expected dict\[str, str\], got"),
        ({"step": 1, "event": []}, r"event: expected text, got \[\]"),
        ({"step": 1, "placement": {"dp": "2"}}, r"placement: expected dict\[str, int\]"),
        (
            {"step": 1, "numerical": {"seed": [1]}},
            r"numerical: expected dict\[str, str \| float",
        ),
        ({"step": 1, "leaves": [{"leaf": 0}]}, r"leaves: expected list\[.*Leaf\]"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_cannot_be_understood_is_named(tmp_path: Path, line: object, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        read_run(record(tmp_path, line, STEP))


def test_a_directory_that_is_none_or_holds_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, error in (("nowhere", "got none"), ("file", "got a file"), ("", f"has no {RECORD}: expected")):
        with pytest.raises(ValueError, match=error):
            read_run(tmp_path / path)


def test_a_run_that_continues_keeps_its_events_and_drops_the_steps_to_make_again(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [started(0, ONE, **START), {**STEP, "step": 0}, STEP, accepted(2, [])]
    record(tmp_path, *lines)
    JsonLines(tmp_path / RECORD, before_step=1).close()
    kept = [json.loads(line) for line in (tmp_path / RECORD).read_text().splitlines()]
    assert kept == [lines[0], lines[1], lines[3]] and EVENTS.problem(kept[0]) == ""


LEAVES = ("--stop-after", "3", "--record.leaves")
SCRIPT = ScriptConfig(script="my train.py", arguments=("--lr", "1e-3"))


MODULE = ScriptConfig(script="/a/mine/train.py", module="mine.train")


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        (text_config.tiny(), "instep train --config {path}/config.toml -n 3 --run-dir again {leaves}"),
        (SCRIPT, "instep run -n 3 --run-dir again {leaves} 'my train.py' --lr 1e-3"),
        (MODULE, "instep run -n 3 --run-dir again {leaves} -m mine.train"),
        (ScriptConfig(), ""),
    ],
    ids=["recipe", "script", "module", "notebook"],
)
def test_it_is_in_the_words_of_what_has_made_the_run(settings: object, command: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(to_toml(settings))
    leaves = " ".join(LEAVES)
    starts = [{"world_size": 3}, {"world_size": 2}]  # a rank was lost
    again = command_again(tmp_path, Path("again"), starts, LEAVES)
    assert again == command.format(path=tmp_path, leaves=leaves)
