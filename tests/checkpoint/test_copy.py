"""A state in memory: what it is, where it goes, and that no description can do harm."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import AdamW, Optimizer

from instep.checkpoint.copy import describe, nbytes, prepare, restore, tensors, views
from instep.checkpoint.manifest import canonical
from instep.errors import CheckpointRejected
from instep.memory import allocate
from tests.checkpoint.nets import OPTIMIZERS, Net, made, train, whole_hash
from tests.checkpoint.states import all_bits, bits

LIMIT = 1 << 20


def copied(model: Net, optimizer: Optimizer, step: int) -> tuple[Any, list[Tensor]]:
    """What another process would have: the description through JSON, and the values elsewhere."""
    description = json.loads(canonical(describe(model, optimizer, step)))
    copies = prepare(description, limit_bytes=LIMIT)
    for copy, live in zip(copies, tensors(model, optimizer), strict=True):
        copy.copy_(live)
    return description, copies


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_module_and_optimizer_go_on_with_the_bits_of_the_copied_ones(name: str) -> None:
    model, optimizer = made(0, OPTIMIZERS[name])
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] / 2  # as a scheduler would
    description, copies = copied(model, optimizer, 3)
    train(model, optimizer, range(3, 6))
    other, fresh = made(1, OPTIMIZERS[name])
    assert restore(other, fresh, description, copies) == 3
    for copy in copies:
        copy.zero_()  # memory that is used again
    train(other, fresh, range(3, 6))
    assert whole_hash(other, fresh) == whole_hash(model, optimizer)
    assert all_bits(other.state_dict()) == all_bits(model.state_dict())


def test_before_the_first_step_there_are_no_moments_and_after_going_back_there_are_none_again() -> None:
    model, optimizer = made(0)
    description, copies = copied(model, optimizer, 0)
    assert [name for name, *_ in description["layout"] if name.startswith("optimizer:")] == []
    before = whole_hash(model, optimizer)
    train(model, optimizer, range(2))
    restore(model, optimizer, description, copies)
    assert whole_hash(model, optimizer) == before
    assert not optimizer.state


def test_ties_are_copied_once_and_the_order_is_the_same_every_time() -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    names = [name for name, *_ in describe(model, optimizer, 1)["layout"]]
    assert "model:first.weight" in names and "model:second.weight" not in names
    train(model, optimizer, range(1, 2))
    assert [name for name, *_ in describe(model, optimizer, 2)["layout"]] == names


def test_restoring_keeps_the_memory_of_parameters_and_moments() -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    description, copies = copied(model, optimizer, 1)
    train(model, optimizer, range(1, 3))
    live = tensors(model, optimizer)
    restore(model, optimizer, description, copies)
    again = tensors(model, optimizer)
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in live]
    assert [bits(t) for t in again] == [bits(t) for t in copies]


def test_a_copy_without_an_optimizer() -> None:
    model, _ = made(0)
    description = describe(model, None, 5)
    other, _ = made(1)
    assert restore(other, None, description, tensors(model, None)) == 5
    assert all_bits(other.state_dict()) == all_bits(model.state_dict())


def test_views_are_aligned_inside_the_given_memory_and_do_not_overlap() -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    description = describe(model, optimizer, 1)
    segment = allocate(nbytes(description) + 8, 64).tensor
    placed = views(description, segment)
    assert {t.data_ptr() % 64 for t in placed} == {0}
    for number, tensor in enumerate(placed):
        tensor.fill_(number % 2)
    assert all(bool((tensor == number % 2).all()) for number, tensor in enumerate(placed))
    ends = [t.data_ptr() + t.nbytes for t in placed]
    assert ends[-1] <= segment.data_ptr() + segment.numel()
    with pytest.raises(ValueError, match="expected a flat segment of at least"):
        views(description, segment[:64])
    with pytest.raises(ValueError, match="expected a segment at a multiple of 64"):
        views(description, segment[8:])


LAYOUT = [["model:a", [2], "float32"]]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([["model:a", [2**40], "float32"]], "at most 1048576 bytes"),
        ([[f"model:{n}", [2**18], "float32"] for n in range(9)], "at most 1048576 bytes"),
        ([["model:a", [2**62] * 64, "int8"]], "a shape"),
        ([["model:a", [2**62, 2**62, 0], "int8"]], "a shape"),
        ([["model:a", [1] * 65, "int8"]], "a shape"),
        ([["model:a", [-1], "int8"]], "a shape"),
        ([["model:a", [True], "int8"]], "a shape"),
        ([["model:a", [1.0], "int8"]], "a shape"),
        ([["model:a", [2], "load"]], "a dtype among"),
        ([["model:a", [2], []]], "a dtype among"),
        ([["a", [2], "int8"]], "a name that begins with"),
        ([*LAYOUT, *LAYOUT], "each name once"),
        ([["model:a", [2]]], "name, shape and dtype"),
        ({}, "a list"),
    ],
)
def test_a_description_that_lies_is_rejected_before_memory_is_taken(layout: Any, message: str) -> None:
    with pytest.raises(CheckpointRejected, match=message):
        prepare({"step": 1, "layout": layout, "rest": None}, limit_bytes=LIMIT)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats()
    | st.sampled_from(["model:a", "float32"]),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.sampled_from(["step", "layout", "rest"]), x),
    max_leaves=12,
)


@given(JSON)
@settings(max_examples=60, deadline=None)
def test_any_other_json_is_rejected_or_small(value: Any) -> None:
    for description in (value, {"step": 1, "layout": value, "rest": None}):
        try:
            assert sum(t.nbytes for t in prepare(description, limit_bytes=LIMIT)) <= LIMIT
        except CheckpointRejected:
            continue


def swapped(description: Any, name: str, **entry: Any) -> Any:
    """``description`` with another shape or dtype for one tensor."""
    layout = [
        [n, entry.get("shape", s), entry.get("dtype", d)] if n == name else [n, s, d]
        for n, s, d in description["layout"]
    ]
    return {**description, "layout": layout}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: swapped(d, "model:first.bias", shape=[2, 2]), r"first\.bias: expected"),
        (lambda d: swapped(d, "model:first.bias", dtype="int32"), r"first\.bias: expected"),
        (lambda d: {**d, "layout": d["layout"][1:]}, "expected the tensor"),
        (lambda d: {**d, "layout": [*d["layout"], ["model:more", [1], "int8"]]}, "also"),
        (lambda d: {**d, "rest": None}, "expected class, groups and scalars"),
        (lambda d: {**d, "rest": {**d["rest"], "class": "SGD"}}, "of the checkpoint, SGD, got AdamW"),
        (lambda d: swapped(d, "optimizer:exp_avg/first.bias", shape=[1]), "the shape .4. of its parameter"),
        (lambda d: swapped(d, "optimizer:step/first.bias", shape=[4]), "expected one number"),
        (
            lambda d: {**d, "layout": [e for e in d["layout"] if e[0] != "optimizer:exp_avg/first.bias"]},
            "expected the moments exp_avg, exp_avg_sq, step",
        ),
        (
            lambda d: {**d, "layout": [*d["layout"], ["optimizer:param_groups.0/lr", [2], "float32"]]},
            "expected one number",
        ),
        (lambda d: {**d, "layout": [*d["layout"], ["optimizer:x/y", [1], "int8"]]}, "got one of 'y'"),
        (lambda d: {**d, "layout": [*d["layout"], ["optimizer:x", [1], "int8"]]}, "called key/parameter"),
    ],
)
def test_a_copy_of_something_else_is_rejected_and_nothing_changed(change: Any, message: str) -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    description = change(json.loads(canonical(describe(model, optimizer, 1))))
    before = whole_hash(model, optimizer)
    with pytest.raises(CheckpointRejected, match=message):
        restore(model, optimizer, description, prepare(description, limit_bytes=LIMIT))
    assert whole_hash(model, optimizer) == before


@pytest.mark.parametrize(
    "option",
    [
        {"lr": "0.1"},
        {"betas": [0.9]},
        {"betas": 1},
        {"eps": []},
        {"amsgrad": "x"},
        {"lr": 10**400},
        {"lr": None},
    ],
)
def test_an_option_of_another_kind_is_rejected(option: dict[str, Any]) -> None:
    model, optimizer = made(0)
    description = json.loads(canonical(describe(model, optimizer, 0)))
    description["rest"]["groups"][0]["options"] |= option
    with pytest.raises(CheckpointRejected, match=r"parameter group 0: .*expected something like"):
        restore(model, optimizer, description, tensors(model, optimizer))


def test_copies_that_are_not_as_described_are_rejected() -> None:
    model, optimizer = made(0)
    description, copies = copied(model, optimizer, 0)
    for wrong in (copies[:-1], [*copies[:-1], torch.empty(7)]):
        with pytest.raises(CheckpointRejected, match="expected"):
            restore(model, optimizer, description, wrong)


def test_what_json_cannot_carry_is_named() -> None:
    model = Net()
    optimizer = AdamW(model.parameters())
    optimizer.param_groups[0]["schedule"] = print
    with pytest.raises(ValueError, match=r"optimizer\.groups: .*print"):
        describe(model, optimizer, 0)
