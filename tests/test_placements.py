"""Random programs in random placements have the bits of plain torch: the fuzzer's trials, from one seed.

Each form of placement has so many trials, and a floor of those that must end in the same bits: a build that
refuses what it trained before fails as one with other bits does. The oracle is ``by_hand`` of the fuzzer.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

import instep
from benchmarks.placement.fuzz import programs, trial
from benchmarks.placement.fuzz.programs import INVALID, MISMATCH, REFUSED, SAME, Layer, Placement, Program
from benchmarks.placement.fuzz.trial import Outcome

SEED = 147
MOST_LAYERS = 3
MOST_PROCESSES = 1  # trials of a form whose ranks are processes; those of the others are threads


NUM_TRIALS = {
    "naive": 8,
    "flat": 8,
    "overlap": 8,
    "bucketed": 14,
    "server": 8,
    "threads": 6,
    "stage1": 12,
    "stage2": 12,
    "stage3": 16,
    "pipeline": 18,
}
# What is refused is not drawn, so that all end in the same bits, but one that torch itself may not train.
FLOORS = {form: number - 1 for form, number in NUM_TRIALS.items()}
# What is refused in words: a forward that counts its calls; where gradients are in slices, an optimizer that
# looks at whole matrices, parts of a gradient that come one by one,
# hooks of parameters, and weights that are used outside of their unit; in a pipeline, recomputation that
# cannot leave the gradients of weights for later.
ORDERS = ("transposed", "channels_last")  # of memory, of what is to be cut
REFUSALS = {
    **dict.fromkeys(NUM_TRIALS, frozenset({"counter"})),
    "threads": frozenset({"counter", "hook"}),  # of a parameter, which its copies lack
    "stage1": frozenset({"counter", "Adafactor", *ORDERS}),
    **dict.fromkeys(
        ("stage2", "stage3"),
        frozenset({"counter", "Adafactor", "reentrant", "hook", "l2", "borrowed", *ORDERS}),
    ),
    "pipeline": frozenset({"counter", "reentrant"}),
}


def refusals(part: Placement) -> frozenset[str]:
    """Also what a sharded optimizer refuses in a pipeline."""
    divides = part.form == "pipeline" and part.other_optimizer
    return REFUSALS[part.form] | (frozenset(ORDERS) if divides else frozenset())


class Trial(NamedTuple):
    program: Program
    parts: tuple[Placement, ...]


def drawn(form: str) -> Iterator[Trial]:
    """Trials that begin in ``form``; what one part has saved, the next may load in another form."""
    processes = 0
    for model in count():
        whole = programs.program(SEED, model)
        whole = replace(whole, layers=whole.layers[:MOST_LAYERS])
        if form not in programs.forms(whole):
            continue
        parts = programs.parts(random.Random(f"{SEED} {form} {model}"), whole, form)
        alone = form != "threads" and parts[0].world == 1
        if alone or any(whole.words & refusals(part) for part in parts):
            continue
        by_process = any(part.by == "process" for part in parts)
        processes += by_process
        if not by_process or processes <= MOST_PROCESSES:
            yield Trial(whole, parts)


TRIALS = {form: list(islice(drawn(form), number)) for form, number in NUM_TRIALS.items()}


def outcome(one: Trial, folder: Path) -> Outcome:
    folder.mkdir()
    with trial.quiet():
        found, expected = trial.checked_by_hand(one.program)
        return trial.placed(one.program, one.parts, expected, folder) if found.kind == SAME else found


def require(form: str, outcomes: Sequence[Outcome]) -> None:
    """AssertionError if there is a finding or a refusal, or if too few are the same."""
    found = Counter(one.kind for one in outcomes)
    said = "\n".join(
        f"{one.kind}: {' then '.join(map(str, parts))}: {one.where} {one.text}\n    {whole}"
        for one, (whole, parts) in zip(outcomes, TRIALS[form], strict=True)
        if one.kind != SAME
    )
    assert set(found) <= {SAME, INVALID}, said
    assert found[SAME] >= FLOORS[form], said


@pytest.mark.parametrize("form", NUM_TRIALS)
def test_random_programs_have_the_bits_of_plain_torch(form: str, tmp_path: Path) -> None:
    require(form, [outcome(one, tmp_path / str(number)) for number, one in enumerate(TRIALS[form])])


def mixed(whole: Program) -> bool:
    return {layer.dtype for layer in whole.layers} != {"float32"}  # that of the last layer


def test_every_form_is_tried_over_both_backends_and_saved_and_loaded_in_threads_and_processes() -> None:
    assert set(NUM_TRIALS) == set(programs.FORMS)
    for form, number in NUM_TRIALS.items():
        assert len(TRIALS[form]) == number
        assert any(len(one.parts) > 1 for one in TRIALS[form])
        first = [one.parts[0] for one in TRIALS[form]]
        assert form == "threads" or {part.backend for part in first} == {"gloo", "shm"}
        assert form == "threads" or {2, 3} <= {part.world for part in first}
    parts = [part for trials in TRIALS.values() for one in trials for part in one.parts]
    assert {part.by for part in parts} == {"thread", "process"}
    for form in ("stage2", "stage3", "pipeline"):
        assert {part.other_optimizer for part in parts if part.form == form} == {True, False}
    assert {part.num_hosts for part in parts} == {1, 2}
    assert {part.form for part in parts if part.shard is not None} == set(programs.SHARDED)
    assert any(
        len(parts) > 1 and mixed(whole) and all(part.form == "pipeline" for part in parts)
        for whole, parts in TRIALS["pipeline"]
    )
    assert {part.schedule for part in parts if part.form == "pipeline"} == set(programs.SCHEDULES)


def test_a_build_that_refuses_everything_fails() -> None:
    with pytest.raises(AssertionError):
        require("bucketed", [Outcome(REFUSED)] * NUM_TRIALS["bucketed"])


PLAIN = Program(
    width=8,
    length=3,
    layers=(Layer("linear"), Layer("layernorm")),
    outputs="tensor",
    inputs="positional",
    loss="square",
    optimizer="AdamW",
    options=(),
    groups="one",
    clip=None,
    scheduled=False,
    sizes=(2,) * 7,
    weights="mean",
    stops=(2,),
)
ON_THREE = Trial(PLAIN, (Placement("bucketed", 3),))

Add = Callable[[list[Tensor]], Tensor]


def from_left_to_right(leaves: list[Tensor]) -> Tensor:
    return functools.reduce(lambda total, leaf: total + leaf, leaves)


def from_rank_to_rank(leaves: list[Tensor]) -> Tensor:
    """Each of three ranks adds its own first."""
    return from_left_to_right([from_left_to_right(leaves[rank::3]) for rank in range(3)])


def scaled_first(leaves: list[Tensor]) -> Tensor:
    """A mean of means, as of ranks that divide before they send."""
    return tree_sum([leaf / len(leaves) for leaf in leaves]) * len(leaves)


tree_sum: Add = trial._tree_sum  # type: ignore[assignment]


@pytest.mark.parametrize("add", [from_left_to_right, from_rank_to_rank, scaled_first])
def test_a_sum_in_another_order_is_found(add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(ON_THREE, tmp_path / "ordered").kind == SAME
    monkeypatch.setattr(trial, "_tree_sum", add)
    assert outcome(ON_THREE, tmp_path / "other").kind == MISMATCH


def test_the_sum_of_a_plain_all_reduce_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = functools.partial(instep.DataParallel, ordered=False)
    monkeypatch.setattr(instep, "DataParallel", plain)
    assert outcome(ON_THREE, tmp_path / "all-reduce").kind == MISMATCH
