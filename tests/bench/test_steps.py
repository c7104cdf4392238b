"""``instep bench steps`` from options to files; and from times to answers, on times that were made up."""

import csv
import json

import pytest

from instep.bench import hosts, link, steps
from instep.bench.options import StepsOptions
from instep.bench.steps import StepResults
from instep.bench.steps_rank import memory_columns
from instep.bench.variants import ALONE, DDP, NONE, Variant
from instep.bench.workloads import Workload
from instep.net import device
from tests.lab import why_not

BUCKETED = Variant("bucketed", "gloo")


def measured(steps, busy=0.0, agree=(), guard=0.0, received=0):
    return {
        "step_s": steps,
        "busy_s": [busy] * len(steps),
        "agree_s": [list(agree)] * len(steps),
        "guard_s": [guard] * len(steps),
        "received_bytes": [received] * len(steps),
    }


@pytest.fixture
def answers():
    """DDP waits one second more than the floor of two; bucketed a quarter. Rank 1 is slower in round 0."""
    rank_0 = {
        NONE.name: measured([1.5, 2.0, 2.0]),
        ALONE.name: measured([1.8, 1.8, 1.8]),
        DDP.name: measured([3.0, 3.0, 3.0]),
        BUCKETED.name: measured([2.0, 2.25, 2.25], busy=0.9, agree=[0.1, 0.5], guard=0.05, received=7),
    }
    rank_1 = {
        NONE.name: measured([2.0, 1.9, 1.9]),
        ALONE.name: measured([0.0, 0.0, 0.0]),
        DDP.name: measured([3.0, 3.0, 3.0]),
        BUCKETED.name: measured([2.25, 2.0, 2.0], busy=1.0, agree=[0.4, 0.025], guard=0.1, received=9),
    }
    return StepResults([rank_0, rank_1])


def test_a_strategy_that_waits_a_quarter_as_long_as_ddp_closes_three_quarters_of_the_gap(answers):
    assert answers.exposed(BUCKETED.name) == [0.25] * 3
    assert answers.gap_closed(BUCKETED.name).median == 0.75
    assert answers.gap_closed(DDP.name).median == 0
    assert answers.gap_closed(NONE.name) == (1, 1, 1)


def test_a_declared_step_is_held_against_the_same_in_the_plain_loop():
    times = {"flat-shm": [1.0, 2.0, 4.0], "flat-shm-declared": [2.0, 2.0, 2.0], "flat-gloo-declared": [1.0]}
    [row] = steps.declared_rows(times)
    assert row == {
        "strategy": "flat",
        "over": "shm",
        "x undeclared": 1,
        "x undeclared q25": 0.75,
        "x undeclared q75": 1.5,
    }


def test_a_row_has_shares_of_the_step(answers):
    row = answers.row(BUCKETED)
    assert row["busy(%)"] == pytest.approx(100 * 1.0 / 2.25)
    assert row["exposed(%)"] == pytest.approx(100 * 0.25 / 2.25)
    assert row["efficiency(%)"] == pytest.approx(80)
    assert row["x DDP"] == 0.75


TINY = "200K"


def test_a_run_prints_its_table_and_writes_what_it_found(tmp_path, capsys):
    options = StepsOptions(
        setting="communication", strategies=("bucketed-gloo", "unordered-gloo"), samples=1, params=TINY,
        memory=False, json=tmp_path / "steps.json", csv=tmp_path / "steps.csv", chart=tmp_path / "steps.svg",
    )  # fmt: skip
    steps.run(options)
    out = capsys.readouterr().out
    assert "bucketed unordered" in out
    assert "the fixed order of sums over gloo" in out
    [found] = json.loads((tmp_path / "steps.json").read_text())["settings"]
    assert set(found["ms"]) == {"none", "alone", "DDP-gloo", "bucketed-gloo", "unordered-gloo"}
    with (tmp_path / "steps.csv").open() as file:
        assert [row["strategy"] for row in csv.DictReader(file)] == [row["strategy"] for row in found["rows"]]
    assert (tmp_path / "steps.svg").stat().st_size > 1000
    assert (tmp_path / "steps.png").stat().st_size > 1000
    assert "| bucketed | gloo |" in steps.report(found)


def test_variants_that_memory_cannot_hold_are_refused_before_any_process_starts():
    with pytest.raises(ValueError, match="pass fewer --strategies, or a smaller --preset, --params or"):
        steps.run(StepsOptions(params="1000G"))
    with pytest.raises(ValueError, match=r"2 ranks need about \d+\.\d GB of memory"):
        steps.run(StepsOptions(preset="2.7B", batch=10_000, context=1024))


def test_gpus_that_are_not_there_are_told_before_any_process_starts(monkeypatch):
    monkeypatch.setattr(device, "num_gpus", lambda: 1)
    with pytest.raises(ValueError, match=r"expected a GPU for each of 2 rank\(s\) on this host, got 1 GPU"):
        steps.run(StepsOptions(backend="nccl"))


@pytest.mark.parametrize(
    ("strategy", "each"),
    [("bucketed", 16), ("stage1", 12), ("stage2", 10), ("stage3", 8)],
)
def test_the_formula_beside_a_variant_is_that_of_its_stage_and_its_ranks(strategy, each):
    workload = Workload("tiny", 200_000, batch=1, what="tiny", tokens=8, optimizer="adamw")
    idle = {"held": None, "activations": None, "resident": None}
    found = memory_columns([idle, idle], workload, Variant(strategy, "shm"))
    assert found["formula(MB)"] * 1e6 == pytest.approx(each * workload.gradient_bytes / 4)
    assert (found["gathered(MB)"] > 0) is (strategy == "stage3")


@pytest.mark.slow
def test_a_run_over_a_link_counts_the_bytes_of_the_gradients():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    tiny = Workload("tiny", 200_000, batch=1, what="tiny", tokens=8)
    found = link.measure(tiny, 2, ("bucketed-gloo", "server"), samples=1)
    rows = {row["strategy"]: row for row in found.rows}
    assert list(rows) == ["none", "DDP", "bucketed", "server"]
    for strategy in ("DDP", "bucketed", "server"):
        assert rows[strategy]["into rank 0(MB)"] * 1e6 == pytest.approx(tiny.gradient_bytes, rel=0.05)
    assert rows["none"]["into rank 0(MB)"] < 0.01
    assert found.cost.flight.s_per_byte > 8e-9 / 2  # 1 Gbit/s, but for what a burst lets through


def test_a_link_needs_two_ranks():
    with pytest.raises(ValueError, match="a link has two ends, got 1 rank"):
        link.run(StepsOptions(link=True, ranks=1))


def test_a_machine_that_cannot_have_hosts_says_why(monkeypatch):
    monkeypatch.setattr(hosts, "obstacle", lambda: "tc not found: install iproute2")
    with pytest.raises(RuntimeError, match="no second host to be had: tc not found"):
        link.run(StepsOptions(link=True))
