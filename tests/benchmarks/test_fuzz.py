"""The fuzzer draws the same programs from the same seed, all that it knows, and finds what is broken."""

import json

import pytest
import torch

from benchmarks.fuzz import programs, run
from benchmarks.fuzz.layers import LAYERS
from benchmarks.fuzz.trial import MISMATCH, REFUSED, SAME, by_hand, compared, judged, placed, reference
from instep.replicate.strategies import find

MODELS = range(600)
DRAWN = [programs.program(5, model) for model in MODELS]
PLAIN = programs.Program(
    width=4,
    length=2,
    layers=(programs.Layer("linear"), programs.Layer("layernorm", "checkpoint")),
    outputs="tensor",
    inputs="positional",
    loss="square",
    optimizer="AdamW",
    options=(),
    groups="one",
    clip=1.0,
    scheduled=False,
    sizes=(1, 2, 1),
    weights="sum",
    stops=(1, 2),
)


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


def test_every_kind_has_a_layer():
    assert set(LAYERS) == set(programs.KINDS)


def test_a_placement_has_a_part_for_each_stop_and_threads_draw_no_random_numbers():
    for model, one in zip(MODELS, DRAWN, strict=True):
        parts = programs.placements(5, model, 0)
        assert len(parts) == len(one.stops)
        assert not one.draws or all(part.by == "process" or part.world == 1 for part in parts)


def test_layers_that_are_left_out_change_nothing_else():
    whole = next(one for one in DRAWN if len(one.layers) == 4)
    fewer = programs.program(5, DRAWN.index(whole), (1, 3))
    assert fewer.layers == (whole.layers[1], whole.layers[3])
    assert (fewer.sizes, fewer.optimizer, fewer.stops) == (whole.sizes, whole.optimizer, whole.stops)


@pytest.mark.parametrize("form", ["bucketed", "stage3"])
def test_a_program_saved_on_two_ranks_and_loaded_on_three_has_the_bits_of_one(form, tmp_path):
    found, expected = reference(PLAIN)
    assert found.kind == SAME
    parts = (programs.Placement(form, 2), programs.Placement(form, 3))
    assert placed(PLAIN, parts, expected, tmp_path).kind == SAME


def test_other_bits_are_a_mismatch_that_is_named():
    state = by_hand(PLAIN)
    found = compared(state | {"out.bias": "0"}, state, "here")
    assert found.kind == MISMATCH
    assert found.text.startswith("here: 1 of ")
    assert "out.bias (0, not " in found.text


def test_an_error_that_torch_raises_inside_of_instep_is_no_refusal():
    with pytest.raises(ValueError) as ours:
        find("unknown")
    assert judged(ours.value).kind == REFUSED
    with pytest.raises(RuntimeError) as torchs:
        torch.ones(2) @ torch.ones(3)
    assert judged(torchs.value).kind == "crash"


def test_messages_are_counted_without_their_names_and_numbers():
    a, b = "rank 3: parameter 'a.b' is cut", "rank 12: parameter 'c' is cut\nmore"
    assert run.pattern(a) == run.pattern(b) == "rank N: parameter '...' is cut"


def test_the_command_makes_a_trial_again():
    assert run.command(3, (17, None, None)).endswith("--seed 3 --model 17")
    words = run.command(3, (17, 2, (0, 4))).split()[2:]
    wanted = run.arguments(words)
    assert (wanted.seed, wanted.model, wanted.placement, wanted.keep) == (3, 17, 2, "0,4")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_minutes_of_random_models_without_a_finding(tmp_path):
    code = run.main(["--minutes", "3", "--json", str(tmp_path / "results.json")])
    assert code == 0, json.loads((tmp_path / "results.json").read_text())["findings"]
