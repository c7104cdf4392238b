"""The ledger's lines have the bits of a step, not its digits, and say where a run moved or was changed.

They are read back: those of a killed run, of an odd one, of no run at all.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from instep.run.ledger import (
    LEAVES,
    LEDGER,
    LedgerWriter,
    Placement,
    RecordedMicroBatch,
    part_begins,
    placement_text,
    read_run,
)

ONE = Placement({"dp": 1}, "bucketed", 1)


def written(every: int = 5) -> tuple[LedgerWriter, list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []
    return LedgerWriter(lambda **fields: lines.append(fields), ONE, every=every), lines


def test_a_step_is_one_line_of_json_with_every_bit() -> None:
    ledger, lines = written()
    ledger.step(3, cursor=96, loss=0.1, norm=1 / 3, sampled=[("w", 2, "0badcafe")])
    assert json.loads(json.dumps(lines)) == [
        {
            "step": 3,
            "cursor": 96,
            "loss": (0.1).hex(),
            "grad_norm": (1 / 3).hex(),
            "world_size": 1,
            "placement": {"dp": 1},
            "strategy": "bucketed",
            "sampled": [["w", 2, "0badcafe"]],
        }
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, 5e-324, 1.0])
def test_every_float_comes_back(value: float) -> None:
    ledger, lines = written()
    ledger.step(1, cursor=1, loss=value, norm=value, sampled=[])
    back = float.fromhex(json.loads(json.dumps(lines[0]))["loss"])
    assert (repr(back), math.copysign(1, back)) == (repr(value), math.copysign(1, value))


def test_the_whole_state_and_the_reason_of_a_skip_are_there_when_there_are_any() -> None:
    ledger, lines = written()
    ledger.step(1, cursor=1, loss=1.0, norm=1.0, sampled=[], whole=("ab", {"w": "cd"}), skipped="not finite")
    assert (lines[0]["state_sha256"], lines[0]["entries"]) == ("ab", {"w": "cd"})
    assert lines[0]["skipped"] == "not finite"
    ledger.step(2, cursor=2, loss=1.0, norm=1.0, sampled=[])
    assert not {"state_sha256", "entries", "skipped"} & set(lines[1])


@pytest.mark.parametrize(
    ("every", "last", "expected"), [(3, False, [3, 6]), (0, False, []), (0, True, [1, 2, 3, 4, 5, 6])]
)
def test_the_whole_state_is_due_every_so_many_steps_and_at_the_last(
    every: int, last: bool, expected: list[int]
) -> None:
    ledger, _ = written(every)
    assert [step for step in range(1, 7) if ledger.is_whole(step, last=last)] == expected


def test_a_start_has_the_contract_and_the_canary() -> None:
    ledger, lines = written()
    ledger.started(0, restarts=0, fingerprint="f", numerical={"seed": 0}, canary="c", state=("ab", {}))
    expected = {
        "step": 0,
        "event": "started",
        "restarts": 0,
        "fingerprint": "f",
        "canary": "c",
        "generation": 1,
    }
    assert lines == [
        {**expected, "numerical": {"seed": 0}, **ONE.layout(), "state_sha256": "ab", "entries": {}}
    ]


def start(step: int, generation: int = 1, ranks: int = 2, **parallel: object) -> dict[str, object]:
    return {
        "step": step,
        "generation": generation,
        **Placement({"dp": ranks}, "flat", ranks, parallel).layout(),
    }


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
        ([start(0, shard_stage=3), start(12, 2, shard_stage=1)], 12),  # the first ranks came to no start
    ],
)
def test_a_part_is_what_one_command_has_made_in_one_layout(
    starts: list[dict[str, object]], step: int
) -> None:
    assert part_begins(starts) == step


@pytest.mark.parametrize("starts", [[{}], [{"step": "x"}], [{"generation": "x"}, {"generation": None}]])
def test_starts_that_make_no_sense_begin_at_0(starts: list[dict[str, object]]) -> None:
    assert part_begins(starts) == 0


def test_an_accepted_contract_says_what_has_changed() -> None:
    ledger, lines = written()
    ledger.accepted(4, ["threads: 1 in the checkpoint, 2 now"])
    assert [(line["step"], line["event"], line["differences"]) for line in lines] == [
        (4, "contract accepted", ["threads: 1 in the checkpoint, 2 now"])
    ]


STEP = {"step": 1, "cursor": 4, "loss": "0x1.8p+1", "grad_norm": "0x1p+0", "sampled": [["w", 0, "ab"]]}


def ledger_of(path: Path, *lines: object, name: str = LEDGER, end: str = "\n") -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (path / name).write_text(text + end)
    return path


def test_a_line_that_was_being_written_when_the_run_was_killed_is_left_out(tmp_path: Path) -> None:
    run = read_run(ledger_of(tmp_path, STEP, json.dumps(STEP)[:30], end=""))
    assert list(run.steps) == [1]
    assert run.notes == [f"{tmp_path / LEDGER}, line 2: torn, and left out"]


def test_of_a_step_that_was_made_twice_the_last_line_counts(tmp_path: Path) -> None:
    again = {**STEP, "step": 2}
    run = read_run(ledger_of(tmp_path, STEP, {**again, "loss": "0x0p+0"}, again, STEP))
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
    run = read_run(ledger_of(tmp_path, start, STEP, accepted, {"step": 1, "event": "rank lost", "rank": 2}))
    assert (run.starts, run.accepted, run.numerical) == ([start], [accepted], {"seed": 1})
    assert [line["event"] for line in run.others] == ["rank lost"]
    assert (run.whole(0), run.whole(1)) == (("ab", {"w": "c"}), None)


def test_leaves_are_read_by_step_and_number(tmp_path: Path) -> None:
    ledger_of(tmp_path, STEP)
    leaf = {"step": 1, "leaf": 3, "rank": 2, "parameters": {"w": "ab"}}
    run = read_run(ledger_of(tmp_path, leaf, {"step": 1, "reduced": {"w": "cd"}}, name=LEAVES))
    assert run.leaves == {1: {3: RecordedMicroBatch(2, {"w": "ab"})}}
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
        read_run(ledger_of(tmp_path, line, STEP))


def test_a_leaf_without_its_rank_is_named(tmp_path: Path) -> None:
    ledger_of(tmp_path, STEP)
    with pytest.raises(ValueError, match=r"leaves.jsonl, line 1: expected 'rank' and 'parameters'"):
        read_run(ledger_of(tmp_path, {"step": 1, "leaf": 0}, name=LEAVES))


def test_a_directory_that_is_none_or_holds_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: expected the directory of a run, got none"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file: expected the directory of a run, got a file"):
        read_run(tmp_path / "file")
    with pytest.raises(ValueError, match=r"has no ledger.jsonl: expected the directory of a run of instep"):
        read_run(tmp_path)


def test_a_placement_in_words() -> None:
    assert placement_text({"placement": {"dp": 2, "pp": 3}, "strategy": "flat"}) == "dp=2, pp=3, flat"
    assert placement_text({"world_size": 4}) == "4 ranks"
    assert placement_text({}) == ""
