"""What was planted is in the first line of a run's advice; where nothing was, nobody is named.

Faults last long against a step, so that a busy machine does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from instep.elastic.faults import Fault
from tests.launched.command import summary, train

STEPS = 12
SLEEP_S = 0.4  # a step has some 0.02, and several times that on a busy machine
EVERY_STEP = {"step": 1, "steps": STEPS, "seconds": SLEEP_S}


def run(recipe: Sequence[str], faults: Sequence[Fault], path: Path) -> tuple[list[str], dict[str, Any]]:
    """A run on two ranks: the lines that it ends with, and its figures."""
    words = [f"--fault={fault}" for fault in faults]
    ended = train(*recipe, "--steps", STEPS, *words, "-n", 2, "--run-dir", "run", cwd=path)
    assert ended.code == 0, ended.err
    return ended.out.splitlines(), summary(path / "run")


@pytest.mark.parametrize(
    ("phase", "slow_in", "words_for_it"),
    [
        ("forward", "its own compute", "computes longer"),
        ("data", "its data", "waits longer for its data"),
    ],
)
def test_a_slow_rank_is_named_in_the_first_line_of_the_advice(
    phase: str, slow_in: str, words_for_it: str, recipe: tuple[str, ...], tmp_path: Path
) -> None:
    said, found = run(recipe, [Fault("slow", rank=1, phase=phase, **EVERY_STEP)], tmp_path)
    slow, first = found["slow_rank"], found["advice"][0]
    assert (slow["rank"], slow["phase"]) == (1, slow_in)
    assert first["cause"] == "slow rank"
    assert f"Rank 1 {words_for_it}" in first["text"]
    assert first["gain_ms"] == pytest.approx(1e3 * SLEEP_S, rel=1 / 3)
    line = next(line for line in said if line.startswith("advice "))
    assert first["text"] in line


@pytest.mark.slow
def test_where_all_are_equally_slow_nobody_is_named(recipe: tuple[str, ...], tmp_path: Path) -> None:
    both = [Fault("slow", rank=rank, **EVERY_STEP) for rank in range(2)]
    said, found = run(recipe, both, tmp_path)
    assert found["slow_rank"] is None
    assert found["advice"] == []
    assert not [line for line in said if line.startswith(("advice ", "slow "))]
