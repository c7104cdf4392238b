"""The ledger's lines have the bits of a step, not its digits, and say where a run moved or was changed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from instep.train.ledger import Ledger, Placement, part_begins

ONE = Placement({"dp": 1}, "bucketed", 1)


def written(every: int = 5) -> tuple[Ledger, list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []
    return Ledger(lambda **fields: lines.append(fields), ONE, every=every), lines


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
