"""What was planted is in the first line of a run's advice; where nothing was, nobody is named.

Faults last long against a step, so that a busy machine does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from instep.elastic.faults import Fault
from tests.lab import two_hosts
from tests.launched.command import started_warm, summary, train

STEPS = 12
SLEEP_S = 0.4  # a step has some 0.02, and several times that on a busy machine
EVERY_STEP = {"step": 1, "steps": STEPS, "seconds": SLEEP_S}
# 3.2 MB of gradients: 0.08 s at 300 Mbit/s, about as long as the backward that could hide them.
OVER_LINK = (
    *("--model.dropout", 0, "--model.layers", 4, "--model.width", 128, "--model.context", 64),
    *("--batch.global-size", 32, "--batch.micro-size", 8, "--parallel.backend", "gloo"),
)


def run(recipe: Sequence[str], faults: Sequence[Fault], path: Path) -> tuple[list[str], dict[str, Any]]:
    """A run on two ranks: the lines that it ends with, and its figures."""
    words = [f"--fault={fault}" for fault in faults]
    ended = train(*recipe, "--steps", STEPS, *words, "-n", 2, "--run-dir", "run", cwd=path)
    assert ended.code == 0, ended.err
    return ended.out.splitlines(), summary(path / "run")


def on_two_hosts(recipe: Sequence[str], path: Path, *flags: object, rate: str) -> dict[str, Any]:
    """The figures of a run whose ranks have a link of ``rate`` between them."""
    words = ("train", *recipe, "--steps", STEPS // 2, *OVER_LINK, *flags, "--run-dir", path / "run")
    with two_hosts(rate) as network, ExitStack() as ranks:
        commands = [
            ranks.enter_context(started_warm(*words, cwd=path, env=env, host=host.name))
            for host, env in zip(network, network.environments(), strict=True)
        ]
        for command in commands:
            _, err = command.communicate()
            assert command.returncode == 0, err
    return summary(path / "run")


@pytest.mark.parametrize(
    ("phase", "slow_in", "words_for_it"),
    [
        ("forward", "its own compute", "computes longer"),
        ("data", "its data", "waits longer for its data"),
        pytest.param(
            "ledger", "its host code", "spends longer than the others in host code", marks=pytest.mark.slow
        ),
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


@pytest.mark.slow
def test_a_loader_that_is_slow_everywhere_is_nobody_s_fault(recipe: tuple[str, ...], tmp_path: Path) -> None:
    both = [Fault("slow", rank=rank, phase="data", **EVERY_STEP) for rank in range(2)]
    _, found = run(recipe, both, tmp_path)
    assert found["slow_rank"] is None
    assert found["advice"][0]["cause"] == "loader"


@pytest.mark.slow
def test_one_giant_bucket_over_a_link_is_named(recipe: tuple[str, ...], tmp_path: Path) -> None:
    # One micro-batch per rank, so that all of the backward can hide something.
    large = ("--model.width", 256, "--batch.global-size", 16, "--parallel.bucket-mb", 1000)
    found = on_two_hosts(recipe, tmp_path, *large, rate="1gbit")
    first = found["advice"][0]
    assert first["cause"] == "giant bucket"
    assert "leave in one bucket" in first["text"]
    assert first["try_"].startswith("--parallel.bucket-mb ")


@pytest.mark.slow
def test_tiny_buckets_over_a_link_are_named(recipe: tuple[str, ...], tmp_path: Path) -> None:
    found = on_two_hosts(recipe, tmp_path, "--parallel.bucket-mb", 0.001, rate="1gbit")
    first = found["advice"][0]
    assert first["cause"] == "tiny buckets"
    assert float(first["try_"].split()[-1]) >= 1
