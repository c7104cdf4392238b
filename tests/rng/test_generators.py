"""Generators of Python, numpy and modules: keyed by the micro-batch, restored after the step."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from instep.rng.generators import (
    ModuleGenerators,
    generators_in,
    generators_of,
    global_generators,
    same_state,
    state_of,
)
from instep.rng.keys import LeafKeys


class OwnBits(np.random.PCG64):
    """Bits that numpy does not know."""


class Counting(random.Random):
    """Has a state of its own."""

    def seed(self, *args: Any) -> None:
        self.state = int(args[0]) % 1000 if args else 0

    def random(self) -> float:
        self.state += 1
        return self.state / 1e6

    def getstate(self) -> tuple[Any, ...]:
        return (self.state,)

    def setstate(self, state: tuple[Any, ...]) -> None:
        (self.state,) = state


class Keeps(nn.Module):
    """Keeps generators as attributes, as modules with noise of their own do."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = torch.Generator().manual_seed(1)
        self.numpy = np.random.default_rng(1)
        self.twins = [np.random.RandomState(1), np.random.Generator(np.random.Philox(1))]
        self.python = {"noise": random.Random(1)}
        self.legacy = np.random.RandomState(np.random.PCG64(3))  # seed() does not support these bits
        self.own = np.random.RandomState(OwnBits(1))
        self.count = Counting(1)
        self.same = self.torch


DRAWS: dict[str, Callable[[Keeps], float]] = {
    "random": lambda keeps: random.gauss(0, 1),
    "numpy.random": lambda keeps: float(np.random.normal()),
    "a torch.Generator": lambda keeps: torch.rand(1, generator=keeps.torch).item(),
    "a numpy Generator": lambda keeps: float(keeps.numpy.random()),
    "a RandomState": lambda keeps: float(keeps.twins[0].normal()),
    "another bit generator": lambda keeps: float(keeps.twins[1].random()),
    "a random.Random": lambda keeps: keeps.python["noise"].gauss(0, 1),
    "a RandomState of other bits": lambda keeps: float(keeps.legacy.normal()),
    "a RandomState of unknown bits": lambda keeps: float(keeps.own.normal()),
    "a random.Random of another class": lambda keeps: keeps.count.random(),
}


def drawn(draw: Callable[[Keeps], float], leaves: Iterable[int], *, step: int = 3, times: int = 3) -> dict:
    """What each leaf draws, by a rank that has ``leaves``."""
    keeps = Keeps()
    keys, found = LeafKeys(keeps, 7, [torch.default_generator]), {}
    with keys.step():
        for leaf in leaves:
            with keys.leaf(step, leaf):
                found[leaf] = [draw(keeps) for _ in range(times)]
    return found


@pytest.mark.parametrize("name", DRAWS)
def test_a_leaf_draws_the_same_whichever_leaves_come_before(name: str) -> None:
    whole = drawn(DRAWS[name], range(4))
    assert drawn(DRAWS[name], [2]) | drawn(DRAWS[name], [3, 1]) == {leaf: whole[leaf] for leaf in (1, 2, 3)}
    numbers = [
        x for step in (3, 4) for draws in drawn(DRAWS[name], range(4), step=step).values() for x in draws
    ]
    assert len(numbers) == len(set(numbers)) == 2 * 4 * 3


@pytest.mark.parametrize("name", DRAWS)
def test_after_a_step_the_user_s_own_numbers_go_on(name: str) -> None:
    draw = DRAWS[name]
    random.seed(5)
    np.random.seed(5)
    keeps = Keeps()
    expected = [draw(keeps) for _ in range(4)]
    random.seed(5)
    np.random.seed(5)
    keeps = Keeps()
    keys = LeafKeys(keeps, 7, [torch.default_generator])
    ours = [draw(keeps)]  # of a pair of Gaussian numbers, the other of which waits
    for step in range(3):
        with keys.step(), keys.leaf(step, 0):
            draw(keeps)
        ours.append(draw(keeps))
    assert ours == expected


@pytest.mark.parametrize("num_normal", [0, 1, 2])
def test_a_state_is_the_same_until_a_number_is_drawn(num_normal: int) -> None:
    for generator in (*global_generators(), *generators_of(Keeps())):
        before = generator.save()
        assert same_state(generator.save(), before)
        generator.key(9)
        assert not same_state(generator.save(), before)
        generator.restore(before)
        assert same_state(generator.save(), before)
    noise = np.random.RandomState(5)
    (generator,) = generators_in(noise, "noise")
    noise.normal(size=num_normal)
    before = generator.save()
    noise.normal()  # takes the second of a pair, without new words, where one waits
    assert not same_state(generator.save(), before)


def test_a_generator_in_the_place_of_another_attribute_is_found_in_the_next_step() -> None:
    module = nn.Sequential(nn.Identity(), nn.Identity())
    module[0].noise, module[1].number = None, 1
    generators, named = ModuleGenerators(module), [*module.named_modules()]

    def names() -> list[str]:
        return [x.name for x in generators.find(named)]

    assert names() == names() == []
    module[0].noise = seeded()
    assert names() == ["module.0.noise.0"]
    module[0].noise = seeded()
    (found,) = generators.find(named)
    found.key(3)
    assert module[0].noise.initial_seed() == 3
    del module[0].noise
    module[0].other = [seeded()]
    assert names() == ["module.0.other.1"]
    module[1] = nn.Module()
    module[1].noise = seeded()
    named = [*module.named_modules()]
    assert names() == ["module.0.other.1", "module.1.noise.0"]


@dataclass
class Record:
    generator: torch.Generator


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = seeded()


def closed_over(generator: torch.Generator) -> Callable[[], Tensor]:
    return lambda: torch.rand((), generator=generator)


# What holds one generator.
HOLDERS: dict[str, Callable[[], object]] = {
    "an ordered dict": lambda: OrderedDict(g=seeded()),
    "a deque": lambda: deque([seeded()]),
    "a dict of lists": lambda: {"a": [0, seeded()]},
    "a dataclass": lambda: Record(seeded()),
    "an object in a list": lambda: [Record(seeded())],
    "a layer in a list": lambda: [nn.Sequential(), Noise()],
    "a bound method": lambda: random.Random(1).random,
    "a list, beside one of the system, which has no state": lambda: [random.SystemRandom(), seeded()],
    "a bound method of numpy": lambda: np.random.default_rng(1).random,
    "a partial function": lambda: partial(torch.rand, (), generator=seeded()),
    "a closure": lambda: closed_over(seeded()),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_generator_is_found_in(name: str) -> None:
    module = nn.Sequential(nn.Identity())
    module[0].holder = HOLDERS[name]()
    assert len(generators_of(module)) == 1


def test_looking_for_generators_ends_in_what_knows_itself_and_in_what_is_large() -> None:
    module = nn.Module()
    module.itself = [module]
    module.itself.append(module.itself)
    module.large = [[[0] * 1000] * 1000] * 1000
    assert generators_of(module) == []


def test_a_generator_that_forward_creates_is_named_once_and_keyed_from_then_on() -> None:
    keeps = Keeps()
    keys = LeafKeys(keeps, 7, [])
    message = r"forward created the generator '\.late\.0' in a declared step"
    with pytest.warns(UserWarning, match=message), keys.step(), keys.leaf(0, 0):
        keeps.late = seeded()
    found = []
    for _ in range(2):
        with keys.step(), keys.leaf(1, 0):
            found.append(torch.rand(1, generator=keeps.late).item())
    assert found[0] == found[1]


def test_the_first_draw_of_numpy_is_keyed_though_nothing_has_imported_numpy_random() -> None:
    """NumPy loads it at its first use, and what a forward drew then differed from run to run."""
    code = """
import numpy, torch
from instep.rng.keys import LeafKeys
keys = LeafKeys(torch.nn.Linear(1, 1), 7, [torch.default_generator])
with keys.step(), keys.leaf(0, 0):
    print(numpy.random.rand())
"""
    draws = {subprocess.check_output([sys.executable, "-c", code]) for _ in range(2)}
    assert len(draws) == 1


class Slow:
    """In a cycle with itself; lets other threads run when the collector finds it."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        zlib.crc32(bytes(1 << 20))  # without the interpreter's lock


def test_threads_may_ask_one_generator_for_its_state_while_garbage_is_collected() -> None:
    def ask() -> None:
        for _ in range(200):
            Slow()
            state_of(torch.default_generator)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    before = gc.get_threshold()
    gc.set_threshold(10)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    finally:
        gc.set_threshold(*before)
    assert not any(thread.is_alive() for thread in threads)
