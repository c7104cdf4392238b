"""The state of a module and its optimizer: what it is, where it goes, and that no description can do harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from instep.checkpoint.state import merged
from instep.errors import CheckpointRejected
from instep.state.shards import MODEL, OPTIMIZER
from instep.state.stored import UNORDERED, Source, assemble, shards_from_json
from tests.checkpoint.elsewhere import Elsewhere
from tests.checkpoint.nets import OPTIMIZERS, Net, made, train, whole_hash
from tests.checkpoint.states import all_bits, bits
from tests.state_oracle import state_entries, state_sha256
from tests.training_state import training_state

MOMENT = "optimizer:exp_avg/first.bias"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_module_and_optimizer_go_on_with_the_bits_of_the_copied_ones(name: str) -> None:
    model, optimizer = made(0, OPTIMIZERS[name])
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] / 2  # as a scheduler would
    there = Elsewhere.of(training_state(model, optimizer))
    train(model, optimizer, range(3, 6))
    other, fresh = made(1, OPTIMIZERS[name])
    there.restore(training_state(other, fresh))
    for value in there.values.values():
        value.zero_()  # memory that is used again
    train(other, fresh, range(3, 6))
    assert whole_hash(other, fresh) == whole_hash(model, optimizer)
    assert all_bits(other.state_dict()) == all_bits(model.state_dict())


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


def test_state_of_an_optimizer_that_is_under_no_parameter_is_refused() -> None:
    model, optimizer = made(0, lambda p: SGD(p, lr=0.1))
    optimizer.state["round"] = {"number": 3}
    with pytest.raises(ValueError, match="SGD keeps state under 'round', which is none of its parameters"):
        training_state(model, optimizer).options()
    model, optimizer = made(0, lambda p: KeepsMore(p, lr=0.1))
    with pytest.raises(ValueError, match="KeepsMore keeps state under 'temperature'"):
        training_state(model, optimizer).options()


def test_ties_are_listed_once_and_the_order_is_the_same_every_time() -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    state = training_state(model, optimizer)
    names = [shard.name for shard in state.shards()]
    assert "model:first.weight" in names and "model:second.weight" not in names
    assert state.ties() == {"second.weight": "first.weight"}
    train(model, optimizer, range(1, 2))
    assert [shard.name for shard in state.shards()] == names
    assert [shard.name for shard in training_state(model, optimizer).shards()] == names


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


def test_moments_that_have_to_be_made_are_aligned() -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    there = Elsewhere.of(training_state(model, optimizer))
    other, fresh = made(1)
    there.restore(training_state(other, fresh))
    moments = [x for state in fresh.state.values() for x in state.values()]
    assert len(moments) == 15  # three of each parameter that has a gradient
    assert {x.data_ptr() % 64 for x in moments} == {0}


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


def test_a_state_without_an_optimizer() -> None:
    model, _ = made(0)
    there = Elsewhere.of(training_state(model))
    assert there.options["class"] == "none"
    other, fresh = made(1)
    there.restore(training_state(other))
    assert all_bits(other.state_dict()) == all_bits(model.state_dict())
    with pytest.raises(CheckpointRejected, match="no optimizer: load without optimizer="):
        there.restore(training_state(other, fresh))


def test_the_weights_alone_are_taken_from_a_state_with_moments() -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    other, fresh = made(1)
    Elsewhere.of(training_state(model, optimizer)).restore(training_state(other))
    assert all_bits(other.state_dict()) == all_bits(model.state_dict())
    assert not fresh.state


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


def huge(there: Elsewhere) -> None:
    there.change("model:first.weight", shape=[LARGE])


def huge_moment(there: Elsewhere) -> None:
    there.change(MOMENT, shape=[LARGE])


def tied_to_another(there: Elsewhere) -> None:
    there.remove("model:first.weight")
    there.ties = {"first.weight": "first.bias", "second.weight": "first.bias"}


def other_class(there: Elsewhere) -> None:
    there.options["class"] = "SGD"


def other_groups(there: Elsewhere) -> None:
    there.options["groups"] *= 2


def unknown_parameter(there: Elsewhere) -> None:
    there.options["groups"][0]["parameters"].append("third.weight")


def a_number_for_a_moment(there: Elsewhere) -> None:
    there.remove(MOMENT)
    there.options["scalars"] = {"exp_avg/first.bias": 1.0}


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
        (huge, r"first\.weight: expected float32\[4, 4\], got float32"),
        (tied_to_another, r"first\.weight: expected float32\[4, 4\], got float32\[4\]"),
        (lambda x: setattr(x, "ties", ["first.weight"]), "expected names tied to names"),
        (lambda x: setattr(x, "ties", {"first.weight": ["first.bias"]}), "expected names tied to names"),
        (lambda x: x.remove("model:first.bias"), r"missing first\.bias"),
        (lambda x: x.change("model:more", dtype="int8"), "unknown more"),
        (lambda x: setattr(x, "options", None), "expected class, groups, scalars"),
        (lambda x: setattr(x, "options", []), "expected class, groups, scalars"),
        (lambda x: x.options.pop("scalars"), "expected class, groups, scalars"),
        (other_class, "of the checkpoint, SGD, got AdamW"),
        (other_groups, "expected 2 parameter groups, got 1"),
        (unknown_parameter, r"only the checkpoint has 'third\.weight'"),
        (a_number_for_a_moment, r"exp_avg/first\.bias: expected a tensor, got 1\.0"),
        (lambda x: x.change(MOMENT, shape=[1]), "the shape .4. of its parameter"),
        (huge_moment, "the shape .4. of its parameter"),
        (lambda x: x.change("optimizer:step/first.bias", shape=[4]), "expected one number"),
        (lambda x: x.remove(MOMENT), "expected the moments exp_avg, exp_avg_sq, step"),
        (lambda x: x.change("optimizer:param_groups.0/lr", shape=[2]), "expected one number"),
        (lambda x: x.change("optimizer:param_groups.1/lr"), "got one of 'lr'"),
        (lambda x: x.change("optimizer:x/y", dtype="int8"), "got one of 'y'"),
        (lambda x: x.change("optimizer:x", dtype="int8"), "called key/parameter"),
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
    there = Elsewhere.of(training_state(model, optimizer))
    there.options["groups"][0]["options"] |= option
    with pytest.raises(CheckpointRejected, match=r"parameter group 0: .*expected something like"):
        there.restore(training_state(model, optimizer))


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


def test_a_state_in_several_places_is_put_together() -> None:
    """As ranks have it: the halves of each tensor of more than one block."""

    def long() -> tuple[nn.Module, Optimizer]:
        model = nn.Linear(3, 4096)
        return model, SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = long()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    there = Elsewhere.of(training_state(model, optimizer))
    halves: list[Any] = [[], []]
    for name, shape, dtype, first, last, order in there.rows:
        middle = last if last <= 4096 else 4096
        halves[0].append([name, shape, dtype, first, middle, order])
        if middle < last:
            halves[1].append([name, shape, dtype, middle, last, order])
    assert len(halves[1]) == 2

    class Second:
        """The values from element 4096 on."""

        def read_into(self, name: str, first: int, out: Tensor) -> None:
            there.read_into(name, first + 4096, out)

    other, fresh = long()
    rows = {str(i): shards_from_json(half) for i, half in enumerate(halves)}
    source = Source(assemble(rows), {"0": there, "1": Second()})
    state = training_state(other, fresh)
    state.put(state.read(source, there.options), there.options)
    assert whole_hash(other, fresh) == whole_hash(model, optimizer)


def test_what_ranks_say_of_the_rest_is_put_together_and_believed_only_if_all_say_something() -> None:
    options = Elsewhere.of(training_state(*made(0))).options
    one, two = ({**options, "scalars": {name: 1}} for name in ("z/first.bias", "a/first.bias"))
    assert list(merged([one, two])["scalars"]) == ["a/first.bias", "z/first.bias"]
    for wrong in ([one, None], [None, one], [one, {}], [one, []], [one, {**two, "scalars": None}]):
        with pytest.raises(CheckpointRejected, match="of a saved state, got"):
            merged(wrong)


def test_what_json_cannot_carry_is_named() -> None:
    model = Net()
    optimizer = AdamW(model.parameters())
    for odd, message in ((print, r"state\.groups: .*print"), (float("nan"), "a finite number, got nan")):
        optimizer.param_groups[0]["schedule"] = odd
        with pytest.raises(ValueError, match=message):
            training_state(model, optimizer).options()


def test_a_name_of_optimizer_state_with_a_slash_is_refused() -> None:
    model, optimizer = made(0)
    for value in (torch.ones(1), 1.0):
        optimizer.state[model.frozen] = {"a/b": value}
        with pytest.raises(ValueError, match="without a slash, got 'a/b'"):
            Elsewhere.of(training_state(model, optimizer))


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has a parameter of shape \[4, 4\] that is in none"):
        training_state(Net(), SGD(Net().first.parameters(), lr=0.1))


class Keeping(nn.Linear):
    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_what_a_module_keeps_is_data_or_it_is_refused_by_its_path() -> None:
    model, other = Keeping(2, 2), Keeping(2, 2)
    model.kept = {"calls": 3, "range": (torch.zeros(2), None)}
    Elsewhere.of(training_state(model)).restore(training_state(other))
    assert repr(other.kept) == repr(model.kept)
    model.kept = {"calls": [object()]}
    with pytest.raises(
        ValueError, match=r"_extra_state/calls/0: expected data or a tensor .* got builtins\.object"
    ):
        training_state(model).shards()


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


def test_what_is_neither_parameter_nor_buffer_travels_too_and_is_not_hashed() -> None:
    model, other = Keeping(2, 2), Keeping(2, 2)
    model.kept = torch.tensor(5)
    state = training_state(model)
    assert [shard.name for shard in state.shards()] == [
        *(MODEL + name for name in ("weight", "bias")),
        "model:_extra_state",
    ]
    assert [shard.name for shard in state.hashed()] == ["model:weight", "model:bias"]
    Elsewhere.of(state).restore(training_state(other))
    assert other.kept == 5
