"""What the fuzzer draws, and which pipelines the placement benchmark compares with one rank."""

import json

import pytest
import torch

from benchmarks.placement.fuzz import programs, run
from benchmarks.placement.fuzz.trial import REFUSED, judged
from benchmarks.placement.pipelines import PipelinedRun, pipelined_runs
from benchmarks.placement.run import controls_differ as as_promised
from instep.pipeline.schedules import NAMES
from instep.replicate.strategies import find

MODELS = range(600)
DRAWN = [programs.program(5, model) for model in MODELS]


def test_the_same_seed_gives_the_same_programs_and_placements():
    again = [programs.program(5, model) for model in MODELS]
    assert again == DRAWN
    assert [programs.program(6, model) for model in MODELS] != DRAWN
    assert programs.placements(5, 3, 1) == programs.placements(5, 3, 1)


def test_everything_that_is_known_is_drawn():
    words = {word for one in DRAWN for word in one.words}
    known = (programs.KINDS, programs.WRAPS, programs.DTYPES, programs.MEMORY, programs.OPTIMIZERS)
    assert {word for table in known for word in table} - {""} <= words
    forms = {one.form for model in MODELS for one in programs.placements(5, model, 0)}
    assert forms == set(programs.FORMS)


def test_an_error_that_torch_raises_inside_of_instep_is_no_refusal():
    with pytest.raises(ValueError) as ours:
        find("unknown")
    assert judged(ours.value).kind == REFUSED
    with pytest.raises(RuntimeError) as torchs:
        torch.ones(2) @ torch.ones(3)
    assert judged(torchs.value).kind == "crash"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_minutes_of_random_models_without_a_finding(tmp_path):
    code = run.main(["--minutes", "3", "--json", str(tmp_path / "results.json")])
    assert code == 0, json.loads((tmp_path / "results.json").read_text())["findings"]


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
