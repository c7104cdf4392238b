"""``instep bench steps`` from options to files, in a setting of some milliseconds."""

import csv
import json

import pytest

from instep.bench import link, steps
from instep.bench.contestants import LINK, Contestant
from instep.bench.options import Steps
from instep.bench.peak import columns
from instep.bench.settings import Setting
from tests.lab import why_not

TINY = "200K"


def test_a_run_prints_its_table_and_writes_what_it_found(tmp_path, capsys):
    options = Steps(
        setting="communication", strategies=("bucketed-gloo", "unordered-gloo"), samples=1, params=TINY,
        memory=False, json=tmp_path / "steps.json", csv=tmp_path / "steps.csv", chart=tmp_path / "steps.svg",
    )  # fmt: skip
    assert steps.run(options) == 0
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


def test_contestants_that_memory_cannot_hold_are_refused_before_any_process_starts():
    with pytest.raises(ValueError, match="pass fewer --strategies, or smaller --params"):
        steps.run(Steps(params="1000G"))


def test_the_rank_that_needs_most_is_told_and_shared_pages_count_once():
    setting = Setting("tiny", 200_000, batch=1, what="tiny", tokens=8)
    held = {"parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 0, "buffers": 0, "scratch": 0}
    process = {"peak": 30_000_000, "now": 30_000_000, "private": 10_000_000, "pss": 15_000_000}
    server = {"held": {**held, "scratch": 7_000_000}, "activations": 2_000_000, "resident": process}
    worker = {"held": held, "activations": 1_000_000, "resident": {**process, "peak": 32_000_000}}
    idle = {"held": None, "activations": None, "resident": None}
    found = columns([server, worker, idle], setting)
    assert (found["state(MB)"], found["scratch(MB)"], found["activations(MB)"]) == (8, 7, 2)
    assert (found["peak(MB)"], found["host(MB)"]) == (32, 10 + 10 + 20 + 2)
    assert found["formula(MB)"] * 1e6 == 2 * setting.gradient_bytes
    assert set(columns([idle], setting).values()) == {None, found["formula(MB)"], 0}


@pytest.mark.parametrize(
    ("strategy", "each"),
    [("bucketed", 16), ("stage1", 12), ("stage2", 10), ("stage3", 8), ("stage1-one-copy", 10)],
)
def test_the_formula_beside_a_contestant_is_that_of_its_stage_and_its_ranks(strategy, each):
    setting = Setting("tiny", 200_000, batch=1, what="tiny", tokens=8, optimizer="adamw")
    idle = {"held": None, "activations": None, "resident": None}
    found = columns([idle, idle], setting, Contestant(strategy, "shm"))
    assert found["formula(MB)"] * 1e6 == pytest.approx(each * setting.gradient_bytes / 4)
    assert (found["gathered(MB)"] > 0) is (strategy == "stage3")


def test_a_run_over_a_link_counts_the_bytes_of_the_gradients():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    tiny = Setting("tiny", 200_000, batch=1, what="tiny", tokens=8)
    found = link.measure(tiny, 2, ("bucketed-gloo", "server"), samples=1)
    rows = {row["strategy"]: row for row in found.rows}
    assert list(rows) == ["none", "DDP", "bucketed", "server"]
    for strategy in ("DDP", "bucketed", "server"):
        assert rows[strategy]["into rank 0(MB)"] * 1e6 == pytest.approx(tiny.gradient_bytes, rel=0.05)
    assert rows["none"]["into rank 0(MB)"] < 0.01
    assert found.link.wire_s > found.link.line_rate_s(tiny.gradient_bytes) / 2


@pytest.mark.parametrize(
    "one", [one for one in LINK if one.backend and "-" in one.name], ids=lambda one: one.name
)
def test_buckets_have_all_gradients_once(one):
    if one.strategy in ("wire", "latency"):
        return
    setting = Setting("small", 2_000_000, batch=1, what="small")
    assert sum(link.bucket_bytes(one, setting)) == setting.gradient_bytes


def test_a_link_needs_two_ranks():
    with pytest.raises(ValueError, match="a link has two ends, got 1 rank"):
        steps.run(Steps(link=True, ranks=1))


def test_a_machine_that_cannot_have_hosts_says_why(monkeypatch):
    monkeypatch.setattr(link, "obstacle", lambda: "tc not found: install iproute2")
    with pytest.raises(RuntimeError, match="no second host to be had: tc not found"):
        steps.run(Steps(link=True))
