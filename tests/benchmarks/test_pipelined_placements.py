"""Which pipelines the benchmark compares with one rank, and when it is content."""

from benchmarks.placement.pipelines import PipelinedRun, as_promised, pipelined_runs
from instep.pipeline.schedules import NAMES


def test_every_schedule_is_on_two_ranks_and_on_four():
    runs = list(pipelined_runs())
    assert runs[0] == PipelinedRun()
    assert {run.schedule for run in runs if run.column == "2" and not run.control} == set(NAMES)
    assert {run.schedule for run in runs if run.column == "2 x 2"} == set(NAMES)
    deep = {run.schedule for run in runs if run.column in ("4", "2 → 4")}
    assert deep == set(NAMES) - {"interleaved", "zb-v"}  # which have more stages than the recipe layers


def test_what_is_resumed_is_another_pipeline():
    begun, resumed = PipelinedRun("gpipe", 2, 2, 4).configs
    assert (begun.parallel.pp, begun.ranks) == (2, 2)
    assert resumed is not None and (resumed.parallel.pp, resumed.ranks) == (4, 4)
    assert PipelinedRun("gpipe", 2, 4).configs[1] is None


def test_a_control_that_does_not_differ_breaks_the_promise():
    same, other = {"control": "", "same": True}, {"control": "--seed 1", "same": False}
    assert as_promised([same, other])
    assert not as_promised([same, {**other, "same": True}])
    assert not as_promised([{**same, "same": False}, other])
