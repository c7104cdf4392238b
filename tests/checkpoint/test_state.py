"""The state of a module and its optimizer: what it is, where it goes, and that no description can do harm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from instep.checkpoint.state import merged
from instep.errors import CheckpointRejected
from instep.state.shards import OPTIMIZER
from instep.state.stored import UNORDERED
from tests.checkpoint.elsewhere import Elsewhere
from tests.checkpoint.nets import OPTIMIZERS, made, train, whole_hash
from tests.checkpoint.states import all_bits, bits
from tests.state_oracle import state_entries, state_sha256
from tests.training_state import training_state

MOMENT = "optimizer:exp_avg/first.bias"


def test_before_the_first_step_there_are_no_moments_and_after_going_back_there_are_none_again() -> None:
    model, optimizer = made(0)
    there = Elsewhere.of(training_state(model, optimizer))
    assert [name for name in there.layout() if name.startswith(OPTIMIZER)] == []
    before = whole_hash(model, optimizer)
    train(model, optimizer, range(2))
    there.restore(training_state(model, optimizer))
    assert whole_hash(model, optimizer) == before
    assert not optimizer.state


class KeepsMore(SGD):
    """With something in its ``state_dict()`` that belongs to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"temperature": 0.5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda o: o.state.update(round={"number": 3}),
            "keeps state under 'round', which is none of its param",
        ),
        (lambda o: None, "KeepsMore keeps state under 'temperature'"),
        (lambda o: o.param_groups[0].update(schedule=print), r"state\.groups: .*print"),
        (lambda o: o.param_groups[0].update(schedule=float("nan")), "a finite number, got nan"),
        (
            lambda o: o.state.update({o.param_groups[0]["params"][0]: {"a/b": 1.0}}),
            "without a slash, got 'a/b'",
        ),
    ],
)
def test_what_an_optimizer_keeps_and_no_state_can_carry_is_refused(
    change: Callable[[Optimizer], object], words: str
) -> None:
    model, optimizer = made(0, lambda p: (KeepsMore if "KeepsMore" in words else SGD)(p, lr=0.1))
    change(optimizer)
    with pytest.raises(ValueError, match=words):
        Elsewhere.of(training_state(model, optimizer))


def test_shards_are_live_and_those_of_the_hash_come_first_in_its_order() -> None:
    model, optimizer = made(0, OPTIMIZERS["adam, amsgrad, tensor lr"])
    train(model, optimizer, range(1))
    state, entries = training_state(model, optimizer), state_entries(model, optimizer)
    shards = state.shards()
    hashed = [shard for shard in shards if shard.order is not None]
    assert shards[: len(hashed)] == hashed
    assert [shard.name.partition(":")[2] for shard in hashed] == [name for name, _ in entries]
    assert [x.tensor.data_ptr() for x in hashed] == [x.data_ptr() for _, x in entries]
    assert hashed == sorted(hashed, key=lambda shard: shard.order or UNORDERED)
    assert [x.name for x in shards[len(hashed) :]] == ["optimizer:param_groups.0/lr"]
    assert [x.layout for x in state.owned()] == [x.layout for x in shards]
    assert not state.is_divided and state.group.size == 1


def test_restoring_keeps_the_memory_of_parameters_and_moments() -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    state = training_state(model, optimizer)
    there = Elsewhere.of(state)
    train(model, optimizer, range(1, 3))
    before = [shard.tensor.data_ptr() for shard in state.shards()]
    there.restore(state)
    after = state.shards()
    assert [shard.tensor.data_ptr() for shard in after] == before
    assert [bits(shard.tensor.flatten()) for shard in after] == [bits(x) for x in there.values.values()]


def test_what_was_read_changes_nothing_before_it_is_put() -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(2))
    there = Elsewhere.of(training_state(model, optimizer))
    other, fresh = made(1)
    state, before = training_state(other, fresh), whole_hash(other, fresh)
    values = state.read(there.source(), there.options)
    assert whole_hash(other, fresh) == before
    assert not {x.tensor.data_ptr() for x in values} & {x.data_ptr() for x in there.values.values()}
    state.put(values, there.options)
    assert whole_hash(other, fresh) == whole_hash(model, optimizer)


class Tied(nn.Module):
    """One weight under both of ``names``, or two weights."""

    def __init__(self, *names: str, tied: bool = True) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(3))
        for name in names:
            self.register_parameter(name, weight if tied else nn.Parameter(torch.randn(3)))


@pytest.mark.parametrize(
    "other",
    [Tied("a", "b"), Tied("b", "a"), Tied("a", "b", tied=False), Tied("b", "a", tied=False)],
    ids=["as they were", "in another order", "not tied", "not tied, in another order"],
)
def test_either_name_of_a_tie_is_enough_to_find_it(other: Tied) -> None:
    model = Tied("a", "b")
    Elsewhere.of(training_state(model)).restore(training_state(other))
    assert bits(other.a) == bits(other.b) == bits(model.a)


def test_two_tensors_are_not_taken_for_one_that_is_tied() -> None:
    there, model = Elsewhere.of(training_state(Tied("a", "b", tied=False))), Tied("a", "b")
    before = all_bits(model.state_dict())
    with pytest.raises(CheckpointRejected, match="expected 1 tensors, got 2: unknown b"):
        there.restore(training_state(model))
    assert all_bits(model.state_dict()) == before


LARGE = 2**47  # elements that a tensor can have, and no memory


def tied_to_another(there: Elsewhere) -> None:
    there.remove("model:first.weight")
    there.ties = {"first.weight": "first.bias", "second.weight": "first.bias"}


def a_number_for_a_moment(there: Elsewhere) -> None:
    there.remove(MOMENT)
    there.options["scalars"] = {"exp_avg/first.bias": 1.0}


def option(wrong: dict[str, Any], there: Elsewhere) -> None:
    there.options["groups"][0]["options"] |= wrong


WRONG_OPTIONS = {"lr": ["0.1", 10**400, None], "betas": [[0.9], 1], "eps": [[]], "amsgrad": ["x"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.change("model:first.bias", shape=[2, 2]),
            r"first\.bias: expected float32\[4\], got float32\[2, 2\]",
        ),
        (
            lambda x: x.change("model:first.bias", dtype="int32"),
            r"first\.bias: expected float32\[4\], got int32\[4\]",
        ),
        (
            lambda x: x.change("model:first.weight", shape=[LARGE]),
            r"first\.weight: expected float32\[4, 4\], got float32",
        ),
        (tied_to_another, r"first\.weight: expected float32\[4, 4\], got float32\[4\]"),
        (lambda x: setattr(x, "ties", ["first.weight"]), "expected names tied to names"),
        (lambda x: setattr(x, "ties", {"first.weight": ["first.bias"]}), "expected names tied to names"),
        (lambda x: x.remove("model:first.bias"), r"missing first\.bias"),
        (lambda x: x.change("model:more", dtype="int8"), "unknown more"),
        (lambda x: setattr(x, "options", None), "expected class, groups, scalars"),
        (lambda x: setattr(x, "options", []), "expected class, groups, scalars"),
        (lambda x: x.options.pop("scalars"), "expected class, groups, scalars"),
        (lambda x: x.options.update({"class": "SGD"}), "of the checkpoint, SGD, got AdamW"),
        (lambda x: x.options.update(groups=2 * x.options["groups"]), "expected 2 parameter groups, got 1"),
        (
            lambda x: x.options["groups"][0]["parameters"].append("third.weight"),
            r"only the checkpoint has 'third\.weight'",
        ),
        (a_number_for_a_moment, r"exp_avg/first\.bias: expected a tensor, got 1\.0"),
        (lambda x: x.change(MOMENT, shape=[1]), "the shape .4. of its parameter"),
        (lambda x: x.change(MOMENT, shape=[LARGE]), "the shape .4. of its parameter"),
        (lambda x: x.change("optimizer:step/first.bias", shape=[4]), "expected one number"),
        (lambda x: x.remove(MOMENT), "expected the moments exp_avg, exp_avg_sq, step"),
        (lambda x: x.change("optimizer:param_groups.0/lr", shape=[2]), "expected one number"),
        (lambda x: x.change("optimizer:param_groups.1/lr"), "got one of 'lr'"),
        (lambda x: x.change("optimizer:x/y", dtype="int8"), "got one of 'y'"),
        (lambda x: x.change("optimizer:x", dtype="int8"), "called key/parameter"),
        *(
            (partial(option, {name: value}), r"parameter group 0: .*expected something like")
            for name, values in WRONG_OPTIONS.items()
            for value in values
        ),
    ],
)
def test_a_state_of_something_else_is_rejected_and_nothing_changed(
    change: Callable[[Elsewhere], object], message: str
) -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    there = Elsewhere.of(training_state(model, optimizer))
    change(there)
    train(model, optimizer, range(1, 2))
    before = whole_hash(model, optimizer)
    with pytest.raises(CheckpointRejected, match=message):
        there.restore(training_state(model, optimizer))
    assert whole_hash(model, optimizer) == before


class Broken(Elsewhere):
    """It has forgotten one of its tensors, the last that is asked for."""

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        if name == list(self.values)[-1]:
            raise CheckpointRejected(f"{name}: cannot be read")
        super().read_into(name, first, out)


def test_a_place_that_cannot_be_read_to_the_end_changes_nothing() -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    there = Elsewhere.of(training_state(model, optimizer))
    other, fresh = made(1)
    before = whole_hash(other, fresh)
    with pytest.raises(CheckpointRejected, match="cannot be read"):
        Broken(**vars(there)).restore(training_state(other, fresh))
    assert whole_hash(other, fresh) == before


@pytest.mark.parametrize("name", ["model:first.weight", MOMENT])
def test_values_that_do_not_have_the_hash_of_the_whole_change_nothing(name: str) -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    there = Elsewhere.of(training_state(model, optimizer))
    sha256 = state_sha256(state_entries(model, optimizer), 1)
    other, fresh = made(1)
    before = whole_hash(other, fresh)
    value = there.values[name]
    value[0] = value[0].nextafter(torch.tensor(torch.inf))
    with pytest.raises(CheckpointRejected, match=rf"expected a state of hash {sha256[:12]}\.\.\., got"):
        there.restore(training_state(other, fresh), 1, sha256)
    assert whole_hash(other, fresh) == before
    value[0] = value[0].nextafter(torch.tensor(-torch.inf))
    there.restore(training_state(other, fresh), 1, sha256)
    assert whole_hash(other, fresh) == whole_hash(model, optimizer)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats()
    | st.sampled_from(["model:first.bias", "float32", "AdamW", "first.bias"]),
    lambda x: (
        st.lists(x, max_size=6)
        | st.dictionaries(
            st.sampled_from(["class", "groups", "scalars", "parameters", "options", "exp_avg/first.bias"]), x
        )
    ),
    max_leaves=12,
)


@given(JSON, JSON)
@settings(max_examples=60, deadline=None)
def test_any_other_json_is_rejected_and_nothing_changed(rows: Any, options: Any) -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    sound = Elsewhere.of(training_state(model, optimizer))
    other, fresh = made(1)
    before = whole_hash(other, fresh)
    for lie in (
        Elsewhere(rows, sound.ties, sound.options, sound.values),
        Elsewhere([rows], sound.ties, sound.options, sound.values),
        Elsewhere(sound.rows, sound.ties, options, sound.values),
        Elsewhere(sound.rows, sound.ties, {**sound.options, "groups": [options]}, sound.values),
    ):
        with pytest.raises(CheckpointRejected):
            lie.restore(training_state(other, fresh))
        assert whole_hash(other, fresh) == before


def test_what_ranks_say_of_the_rest_is_put_together_and_believed_only_if_all_say_something() -> None:
    options = Elsewhere.of(training_state(*made(0))).options
    one, two = ({**options, "scalars": {name: 1}} for name in ("z/first.bias", "a/first.bias"))
    assert list(merged([one, two])["scalars"]) == ["a/first.bias", "z/first.bias"]
    for wrong in ([one, None], [None, one], [one, {}], [one, []], [one, {**two, "scalars": None}]):
        with pytest.raises(CheckpointRejected, match="of a saved state, got"):
            merged(wrong)


class Keeping(nn.Linear):
    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_damaged_data_of_a_module_is_rejected_and_nothing_changes() -> None:
    model, other = Keeping(2, 2), Keeping(2, 2)
    there = Elsewhere.of(training_state(model))
    before = all_bits({name: p.detach() for name, p in other.named_parameters()})
    there.values["model:_extra_state.json"].fill_(ord("["))
    with pytest.raises(CheckpointRejected, match="_extra_state: expected JSON"):
        there.restore(training_state(other))
    assert all_bits({name: p.detach() for name, p in other.named_parameters()}) == before
    with pytest.raises(CheckpointRejected, match="missing _extra_state"):
        Elsewhere.of(training_state(nn.Linear(2, 2))).restore(training_state(other))
