"""Tables of small steps and of a link are made of what was measured, on times that were made up."""

import pytest

from benchmarks.link import formats
from benchmarks.small_steps import run as small_steps
from instep.bench.steps import HostResults, StepResults
from instep.bench.variants import DDP, NONE, Variant
from instep.bench.workloads import WORKLOADS, workload

BUCKETED = Variant("bucketed", "shm")
DECLARED = Variant("bucketed", "shm", declared=True)


def measured(steps_ms, sent=0):
    times = [ms / 1e3 for ms in steps_ms]
    known = {"step_s": times, "sent_bytes": [sent] * len(times), "received_bytes": [sent] * len(times)}
    zeros = {name: [0.0] * len(times) for name in ("busy_s", "guard_s", "forward_s")}
    return {**known, **zeros, "agree_s": [[]] * len(times)}


def results(**by_name):
    rank = {name.replace("_", "-"): figures for name, figures in by_name.items()}
    return StepResults([rank, rank])


def test_a_small_step_is_told_beside_no_exchange_and_beside_the_plain_loop():
    steps = results(
        none=measured([1.0, 1.0, 2.0]),
        DDP_gloo=measured([4.0, 5.0, 6.0]),
        bucketed_shm=measured([2.0, 2.0, 3.0]),
        bucketed_shm_declared=measured([2.0, 2.0, 3.0]),
    )
    rows = [{"setting": "mlp-0.53M", **steps.row(one)} for one in (NONE, DDP, BUCKETED, DECLARED)]
    none, ddp, bucketed, declared = small_steps.table(rows)
    assert {row["parameters"] for row in (none, ddp, bucketed, declared)} == {"0.53 M"}
    assert (none["x none"], none["more than none(ms)"]) == ("1.00 (1.00 to 1.00)", None)
    assert (ddp["x DDP over gloo"], ddp["x none"]) == ("1.00 (1.00 to 1.00)", "4.00 (3.50 to 4.50)")
    assert bucketed["more than none(ms)"] == "1.00 (1.00 to 1.00)"
    assert declared["strategy"] == "bucketed declared"
    times = {name: [1e3 * s for s in steps.steps(name)] for name in steps.names}
    [row] = small_steps.declared([HostResults(WORKLOADS["mlp-0.53M"], rows, [], times)])
    assert row == {
        "strategy": "bucketed",
        "over": "shm",
        "an MLP of 0.53 M parameters": "1.000 (1.000 to 1.000)",
    }


def test_bytes_on_a_link_are_those_of_the_first_host_beside_the_gradients():
    chosen = workload("link", 1_000_000)
    steps = results(
        none=measured([10.0]),
        DDP_gloo=measured([20.0], sent=2 * chosen.gradient_bytes),
        DDP_gloo_float16=measured([16.0], sent=chosen.gradient_bytes),
    )
    names = {"DDP": "DDP-gloo", "DDP float16": "DDP-gloo-float16"}
    assert {name: one.name for name, one in zip(names, formats.CONTESTANTS, strict=False)} == names
    rows = [
        formats.none_row(steps, "DDP-gloo", 2),
        *(formats.row_of(chosen, steps, names, label, 25.0, 2) for label in names),
    ]
    none, ddp, hook = formats.shown(rows)
    assert (none["x DDP"], none["x DDP float16"], none["a host sends(S)"]) == (
        "0.50 (0.50 to 0.50)",
        None,
        None,
    )
    assert (ddp["a host sends(S)"], ddp["exposed(ms)"]) == (2, pytest.approx(10))
    assert (hook["a host sends(S)"], hook["x DDP"]) == (1, "0.80 (0.80 to 0.80)")
    assert ddp["x DDP float16"] == "1.25 (1.25 to 1.25)"


def test_ddp_comes_with_the_size_that_is_its_own_where_that_is_among_the_sizes():
    ddp, *_, ours = formats.CONTESTANTS
    assert [formats.of_size(ddp, size).bucket_mb for size in formats.SIZES_MB] == [1, 4, 10, None]
    assert [formats.of_size(ours, size).bucket_mb for size in formats.SIZES_MB] == [1, 4, 10, 25]
