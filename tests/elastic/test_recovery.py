"""What a recovery took: parts that add up to the whole, as a sentence and as JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from instep.elastic.failures import Failure
from instep.elastic.recovery import Recovery

FAILURE = Failure(1, 4711, 1, 12, "exchange", "was killed by SIGKILL")
MS = 10**6


def message(**at_ms: float) -> dict[str, Any]:
    told = {"step": 13, "source": "a survivor", "generation": 2, "world_size": 3}
    return {**told, **{f"{name}_ns": int(ms * MS) for name, ms in at_ms.items()}}


@pytest.fixture
def recovery(monkeypatch: pytest.MonkeyPatch) -> Recovery:
    """Noticed at 100 ms, seated at 140, joined at 200, agreed at 210, stepped at 350."""
    now = iter([100 * MS, 140 * MS])
    monkeypatch.setattr(time, "monotonic_ns", now.__next__)
    recovery = Recovery(FAILURE)
    recovery.seated()
    recovery.stepped(message(joined=200, agreed=210, stepped=350))
    return recovery


def test_it_is_made_of_parts_that_add_up(recovery: Recovery) -> None:
    seconds = recovery.seconds
    assert {name: round(part * 1e3) for name, part in seconds.items()} == {
        "ready": 40,
        "join": 60,
        "state": 10,
        "step": 140,
        "total": 250,
    }
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total)


def test_it_is_told_in_a_sentence(recovery: Recovery) -> None:
    assert str(recovery) == (
        "going on with 3 rank(s) after step 12, from a survivor: first new step after 0.250 s "
        "(ready 0.040, join 0.060, state 0.010, step 0.140)"
    )


def test_it_is_written_down(recovery: Recovery) -> None:
    fields = recovery.fields()
    assert json.loads(json.dumps(fields)) == fields
    assert fields["event"] == "recovery"
    assert (fields["step"], fields["source"], fields["generation"]) == (13, "a survivor", 2)
    assert (fields["stepped_ns"] - fields["noticed_ns"]) / 1e9 == fields["seconds"]["total"]
