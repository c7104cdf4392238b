"""What objects beside models and optimizers carry from step to step: exactly what they gave, or a refusal."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from instep.checkpoint.manifest import canonical, require_json
from instep.checkpoint.registered import Registered
from instep.data.loader import Loader
from instep.errors import CheckpointRejected
from instep.state.objects import put_together, take_apart, tensors_of
from tests.checkpoint.elsewhere import Elsewhere
from tests.checkpoint.states import bits

SCHEDULES: dict[str, Callable[[SGD], LRScheduler]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 5, 7]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: schedulers.LinearLR(o, total_iters=7),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 9, power=2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=3), schedulers.CosineAnnealingLR(o, 9)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, total_iters=3), schedulers.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=5),
}


def scheduled(name: str) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "schedule": SCHEDULES[name](optimizer)}


def options_of(objects: dict[str, Any], steps: int) -> list[tuple[Any, ...]]:
    found = []
    for step in range(steps):
        loss = (1.0 + step % 3,) if isinstance(objects["schedule"], schedulers.ReduceLROnPlateau) else ()
        objects["optimizer"].step()
        objects["schedule"].step(*loss)
        group = objects["optimizer"].param_groups[0]
        rates = [float(rate) for rate in (group["lr"], *objects["schedule"].get_last_lr())]
        found.append((*rates, group["momentum"]))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_as_it_would_have(name: str) -> None:
    objects, fresh = scheduled(name), scheduled(name)
    options_of(objects, 4)
    Elsewhere.of(Registered(objects).state()).restore(Registered(fresh).state())
    assert Registered(fresh).digest() == Registered(objects).digest()
    assert options_of(fresh, 8) == options_of(objects, 8)


class Holds:
    """An object whose state is ``value``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def moved(value: Any, fresh: Any = None) -> Any:
    """``value`` after a trip as the state of an object to another one."""
    there = Elsewhere.of(Registered({"it": Holds(value)}).state())
    other = Holds(fresh)
    there.restore(Registered({"it": other}).state())
    return other.value


VALUES = [
    {2: "two", "2": 2, None: 0, (2, 3): (), True: 5.0},
    {"$float": "inf", "$tuple": [1]},
    Counter({2: 3, 5: 1}),
    OrderedDict([("z", 1), ("a", (2,))]),
    [1e-320, 2**70, -float("inf")],
]


def shape_of(value: Any) -> Any:
    """All of it that equality leaves open: types, signs and the order of keys."""
    if isinstance(value, dict):
        return type(value), [(shape_of(key), shape_of(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape_of(each) for each in value]
    return type(value), repr(value)


@pytest.mark.parametrize("value", VALUES, ids=map(str, range(len(VALUES))))
def test_data_comes_back_with_its_types_and_its_order(value: Any) -> None:
    assert shape_of(moved(value)) == shape_of(value)


KEYS = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.tuples(st.integers()))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))


@given(
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(KEYS, inner, max_size=3),
        ),
        max_leaves=12,
    )
)
def test_any_data_survives_json_that_sorts_its_keys(value: Any) -> None:
    body, tensors = take_apart("it", value)
    require_json("it", body)
    assert not tensors
    assert shape_of(put_together("it", json.loads(canonical(body)), {})) == shape_of(value)


def test_tensors_come_back_with_dtype_and_shape_and_live_ones_are_saved() -> None:
    x = torch.arange(6.0).view(2, 3)
    value = {
        "a": {"weight": x, "nothing": torch.empty(0, 3)},
        "list": [torch.tensor(7, dtype=torch.uint8), torch.tensor([True]), x.bfloat16()],
        "turned": x.t(),
    }
    state = Registered({"it": Holds(value)}).state()
    names = [shard.name for shard in state.shards()]
    expected = ["a/nothing", "a/weight", "list/0", "list/1", "list/2", "turned"]
    assert names == [f"object:it/{name}" for name in expected]
    assert state.shards()[1].tensor.data_ptr() == x.data_ptr()
    found = moved(value)
    assert bits(found["a"]["weight"]) == bits(x)
    assert found["a"]["nothing"].shape == (0, 3)
    assert [bits(each) for each in found["list"]] == [bits(each) for each in value["list"]]
    assert bits(found["turned"]) == bits(x.t())


class Names(NamedTuple):
    a: int


@dataclass
class Data:
    a: int


class Color(Enum):
    RED = 1


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


class Text(str):
    """A subclass that has no data of its own."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"f": {"g": len}}, r"it/f/g: .*got builtins\.builtin_function_or_method: leave it out"),
        ([0, object()], r"it/1: .*got builtins\.object"),
        (Names(1), r"it: .*Names"),
        (Data(1), r"it: .*Data"),
        ([Color.RED], r"it/0: .*Color"),
        ([Text("a")], r"it/0: .*Text"),
        (b"bytes", r"it: .*builtins\.bytes"),
        (1j, r"it: .*builtins\.complex"),
        (defaultdict(list), r"it: .*collections\.defaultdict"),
        (deque([1]), r"it: .*collections\.deque"),
        (torch.float32, r"it: .*torch\.dtype"),
        ({"x": torch.zeros(2).to_sparse()}, r"it/x: expected a dense tensor"),
        ({"x": torch.zeros(2, device="meta")}, r"it/x: .*a meta tensor"),
        ({"x": torch.zeros(2, dtype=torch.complex128)}, r"it/x: .*torch\.complex128"),
        ({"x": np.zeros(2)}, r"it/x: .*got numpy\.ndarray"),
        ({"x": np.float32(1)}, r"it/x: .*got numpy\.float32"),
        ({1, 2}, r"it: .*builtins\.set"),
        (torch.Size([2]), r"it: .*torch\.Size"),
        ({"0": torch.zeros(1), 0: torch.zeros(1)}, r"it/0: expected one tensor there, got two"),
        ([0.0] * 300_000, r"'it': expected at most 262144 values"),
        (["x" * 300_000], r"'it': expected at most 262144 values"),
        (endless(), "expected at most 12 levels"),
    ],
)
def test_what_is_neither_data_nor_a_tensor_is_refused_when_it_is_registered(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Registered({"it": Holds(value)})


def test_the_deepest_state_fits_into_a_manifest() -> None:
    value: Any = {"x": torch.zeros(1)}
    for level in range(11):
        value = {"b": level, "a": value} if level % 2 else (value,)
    body, tensors = take_apart("it", value)
    require_json("extra", {"optimizer": {"objects": {"it": body}}})
    assert list(tensors) == [name for name, _ in tensors_of(body)]
    put_together("it", json.loads(canonical(body)), tensors)


@pytest.mark.parametrize(
    "body",
    [
        {"$what": 1},
        {"$tuple": 1},
        {"$dict": [1]},
        {"$dict": [[], 1]},
        {"$Counter": [1, 2, 3]},
        {"$float": "1.0"},
        {"$tensor": ["missing", "cpu"]},
        {"$tensor": "missing"},
        {"$tuple": [], "$dict": []},
        {"$set": [1]},
    ],
    ids=json.dumps,
)
def test_json_of_another_maker_is_rejected(body: Any) -> None:
    with pytest.raises(CheckpointRejected, match="the state of the object 'it'"):
        put_together("it", body, {})


class Shadow:
    """Keeps the tensors that it was given, where it has been given them."""

    def __init__(self, *sizes: int) -> None:
        self.values = {str(size): torch.ones(size) for size in sizes}

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.values = state


def test_an_object_may_have_had_more_tensors_or_fewer() -> None:
    there = Elsewhere.of(Registered({"it": Shadow(2, 3)}).state())
    for other in (Shadow(), Shadow(5), Shadow(2)):
        there.restore(Registered({"it": other}).state())
        assert list(other.values) == ["2", "3"]


def test_the_order_of_keys_does_not_hang_on_the_files() -> None:
    class Zipped(Shadow):
        def load_state_dict(self, state: dict[str, Tensor]) -> None:
            for mine, its in zip(self.values.values(), state.values(), strict=True):
                mine.copy_(its)

    there, other = Zipped(3, 1, 2), Zipped(3, 1, 2)
    for size in there.values.values():
        size.mul_(size.numel())
    Elsewhere.of(Registered({"it": there}).state()).restore(Registered({"it": other}).state())
    assert [x.tolist() for x in other.values.values()] == [[3.0] * 3, [1.0], [2.0] * 2]


def test_a_loader_and_a_scaler_are_objects_like_any_other() -> None:
    def made() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        data = Loader(list(range(32)), batch_size=8, micro_batch_size=4, seed=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        return {"model": model, "optimizer": AdamW(model.parameters()), "data": data, "scaler": scaler}

    objects, fresh = made(), made()
    objects["data"].position = 16
    objects["scaler"].scale(torch.zeros(1))
    objects["scaler"].update(4.0)
    Elsewhere.of(Registered(objects).state()).restore(Registered(fresh).state())
    assert fresh["data"].position == 16
    assert fresh["scaler"].get_scale() == 4.0


def test_an_error_of_load_state_dict_says_whose_it_was() -> None:
    class Fails(Holds):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("mine")

    there = Elsewhere.of(Registered({"it": Holds(1)}).state())
    with pytest.raises(KeyError, match="mine") as caught:
        there.restore(Registered({"it": Fails(1)}).state())
    assert caught.value.__notes__ == ["in load_state_dict() of the registered object 'it'"]
