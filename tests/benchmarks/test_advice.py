"""The benchmark of the advice: what is planted, when it counts as named, and how gains are compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.advice.causes import CAUSES, HEALTHY, SHARE, Cause
from benchmarks.advice.run import HERE, compared, gains, is_named, lines, row_of, write
from benchmarks.advice.runs import Made
from instep.elastic.faults import parse

SLOW = next(cause for cause in CAUSES if cause.name == "forward-2")
GIANT = next(cause for cause in CAUSES if cause.name == "giant")
LINK = next(cause for cause in CAUSES if cause.name == "link")


def advice(cause: str, text: str, gain_ms: float = 30.0, try_: str = "") -> dict[str, Any]:
    return {"cause": cause, "text": text, "gain_ms": gain_ms, "try_": try_, "how": "by arithmetic."}


def made(step_ms: float, *pieces: dict[str, Any], samples: int = 32) -> Made:
    return Made(step_ms, samples, pieces, None)


def test_every_cause_has_a_name_of_its_own() -> None:
    assert len({cause.name for cause in CAUSES}) == len(CAUSES)


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause.sleeps], ids=lambda cause: cause.name)
def test_a_planted_rank_sleeps_for_its_share_of_a_healthy_step(cause: Cause) -> None:
    faults = [parse(spec) for spec in cause.faults(0.2)]
    assert [(fault.rank, fault.phase) for fault in faults] == list(cause.sleeps)
    assert all(fault.kind == "slow" and fault.rank < cause.ranks for fault in faults)
    assert all(fault.seconds == pytest.approx(0.2 * SHARE) for fault in faults)


def test_the_remedy_is_the_flags_of_the_advice_or_no_sleep() -> None:
    assert GIANT.remedy("--parallel.bucket-mb 4") == (*GIANT.words(0.1), "--parallel.bucket-mb", "4")
    assert "--fault" in SLOW.words(0.1)
    assert "--fault" not in SLOW.remedy("")


def test_a_cause_is_named_by_the_first_line_alone() -> None:
    right = advice("slow rank", "Rank 1 computes longer: look at its own compute on rank 1.")
    other_rank = advice("slow rank", "Rank 0 computes longer: look at its own compute on rank 0.")
    other_phase = advice("slow rank", "Rank 1 waits longer for its data: look at its data on rank 1.")
    assert is_named(SLOW, made(100, right, other_rank))
    assert not is_named(SLOW, made(100, other_rank, right))
    assert not is_named(SLOW, made(100, other_phase))
    assert not is_named(SLOW, made(100))


def test_on_a_healthy_run_nothing_may_be_said() -> None:
    assert is_named(HEALTHY, made(100))
    assert not is_named(HEALTHY, made(100, advice("loader", "Every rank waits.")))
    assert not is_named(HEALTHY, Made(100, 32, (), {"rank": 1}))


def test_gains_are_those_of_pairs() -> None:
    planted = [made(step_ms, advice("giant bucket", "x", gain_ms=30.0)) for step_ms in (130, 140, 150)]
    row = row_of(GIANT, planted, [made(step_ms) for step_ms in (100, 100, 125)])
    assert row["gains_ms"] == [30, 40, 25]
    assert (row["gain_ms"], row["ratio"], row["good"]) == (30, 1.0, True)
    far = compared({**row, "predicted": [50.0, 50.0, 50.0]})
    assert (far["ratio"], far["good"]) == (pytest.approx(0.6), False)


def test_a_larger_batch_gains_per_sample() -> None:
    planted = [made(200, advice("slow link", "x", gain_ms=40.0, try_="--batch.global-size 64"))]
    row = row_of(LINK, planted, [made(300, samples=64)])
    assert row["gain_ms"] == 50  # two steps of 200 became one of 300


def test_the_tables_have_their_places_in_the_readme(tmp_path: Path) -> None:
    planted = made(130, advice("giant bucket", "All in one bucket.", try_="--parallel.bucket-mb 4"))
    rows = [row_of(HEALTHY, [made(100)], []), row_of(GIANT, [planted], [made(100)])]
    environment = {"cores": 2, "cpu": "a", "torch": "2", "python": "3", "date": "2020-01-01"}
    found = {"environment": environment, "minutes": 7.6, "pairs": 1, "rows": rows}
    assert [row["planted"] for row in gains(found)] == [GIANT.text]
    assert [row["first line of the advice"] for row in lines(found)] == ["none", "All in one bucket."]
    write(found, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "1 of 1 are within a third." in text
    assert re.search(r"\| one bucket of 1000 MB .*\| `--parallel.bucket-mb 4` \|.*\| 30.0 \|", text)
    assert (tmp_path / "results.json").is_file() and tmp_path != HERE
