"""Random generators other than torch's defaults: how to find, save, seed and restore each.

Forwards and augmentations also draw from Python's ``random``, from the global state of ``numpy.random``, and
from generators that a module keeps as attributes. ``LeafKeys`` seeds all of them by (seed, step,
micro-batch), not by block as torch's defaults, because seeding takes ten microseconds. Saving or restoring a
Mersenne twister takes fifty, so their states are saved once per step, and a micro-batch only seeds.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy.random as npr  # here, because NumPy loads it late: draws before it is loaded would not be keyed
import torch
from torch import Tensor, nn

from instep.errors import warn
from instep.rng.attributes import own_attributes, reached, within

_state_lock = threading.Lock()
DEPTH = 3  # levels below an attribute that are searched
_WITHOUT_GENERATOR = (Tensor, int, float, str, type(None))
_KINDS = (torch.Generator, random.Random, npr.RandomState, npr.Generator, npr.BitGenerator)


def seed_generator(generator: torch.Generator, key: int) -> None:
    """Seed ``generator`` from a 64-bit ``key``, folded to the size its device accepts.

    The CPU generator uses 32 bits of its seed (measured: 5 and 5 + 2**32 give one stream); of a million keys
    about 116 pairs share a stream, which is harmless.
    """
    generator.manual_seed((key ^ key >> 32) & 0xFFFFFFFF if generator.device.type == "cpu" else key >> 1)


def state_of(generator: torch.Generator) -> Tensor:
    """The state of ``generator``; safe to call from several threads.

    torch locks the generator while allocating the tensor. If the allocation triggers garbage collection,
    another thread may run and wait for that lock while it holds the interpreter's: a deadlock.
    """
    with _state_lock:
        return generator.get_state()


class KeyedGenerator(NamedTuple):
    """A generator as three functions; ``name`` is part of its key."""

    name: str
    save: Callable[[], Any]
    key: Callable[[int], object]
    restore: Callable[[Any], object]


def _keyed(name: str, x: Any) -> KeyedGenerator:
    """``x``, of one of ``_KINDS``, as a ``KeyedGenerator``."""
    if isinstance(x, torch.Generator):
        return KeyedGenerator(name, partial(state_of, x), partial(seed_generator, x), x.set_state)
    if isinstance(x, random.Random):
        return KeyedGenerator(name, x.getstate, x.seed, x.setstate)
    if isinstance(x, npr.RandomState):
        return KeyedGenerator(name, partial(x.get_state, legacy=False), partial(_seed_legacy, x), x.set_state)
    bits = getattr(x, "bit_generator", x)
    restore = partial(setattr, bits, "state")
    return KeyedGenerator(name, lambda: bits.state, lambda key: restore(type(bits)(key).state), restore)


def _seed_legacy(generator: Any, key: int) -> None:
    try:
        generator.seed(key & 0xFFFFFFFF)
    except TypeError:  # seed() supports only the Mersenne twister
        state = type(generator._bit_generator)(key).state
        generator.set_state({**state, "has_gauss": 0, "gauss": 0.0})


def default_generator() -> KeyedGenerator:
    """torch's default CPU generator."""
    return _keyed("torch", torch.default_generator)


def global_generators() -> list[KeyedGenerator]:
    """``random`` and ``numpy.random``."""
    return [_keyed("random", random._inst), _keyed("numpy.random", npr.mtrand._rand)]


def same_state(one: Any, other: Any) -> bool:
    """Whether two results of ``save`` are equal: nothing was drawn in between."""
    if isinstance(one, dict):
        return all(same_state(one[key], other[key]) for key in one)
    return bool((one == other).all()) if hasattr(one, "all") else one == other


def generators_of(module: nn.Module) -> list[KeyedGenerator]:
    """The generators that ``module`` and its submodules keep as attributes or ``within`` them, each once."""
    return ModuleGenerators(module).find()


def generators_in(value: Any, name: str) -> list[KeyedGenerator]:
    """The generators within ``value``, an object that is no module, each once; ``name`` prefixes theirs."""
    return list(_by_identity(value, name).values())


def _by_identity(value: Any, name: str) -> dict[int, KeyedGenerator]:
    found: dict[int, KeyedGenerator] = {}
    for place, x in within(value, reached, DEPTH):
        has_state = isinstance(x, _KINDS) and not isinstance(x, random.SystemRandom)
        if has_state and id(x) not in found:
            found[id(x)] = _keyed(f"{name}.{place}", x)
    return found


class ModuleGenerators:
    """The generators that ``module`` keeps. An attribute is searched once, and again when it is replaced.

    ``find`` runs at construction and at the start of each step, so a generator that is assigned later is
    found. One that forward creates has been drawn from before it is keyed: ``end_step`` warns, once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # (module, attribute, identity of the value) -> the generators in it, by identity
        self._searched: dict[tuple[str, str, int], dict[int, KeyedGenerator]] = {}
        self._found: list[KeyedGenerator] = []
        self._is_first_step = True
        self.find()

    def find(self, named: Iterable[tuple[str, nn.Module]] | None = None) -> list[KeyedGenerator]:
        """The generators now. ``named``: ``named_modules()`` of the module, if the caller has the list."""
        kept = {
            (prefix, key, id(x)): x
            for prefix, key, x in own_attributes(self._module.named_modules() if named is None else named)
            if not isinstance(x, _WITHOUT_GENERATOR)
        }
        if kept.keys() != self._searched.keys():
            before = self._searched
            self._searched = {
                at: before[at] if at in before else _by_identity(x, f"module.{at[0]}.{at[1]}")
                for at, x in kept.items()
            }
            unique: dict[int, KeyedGenerator] = {}
            for own in self._searched.values():
                unique |= {identity: x for identity, x in own.items() if identity not in unique}
            self._found = list(unique.values())
        return self._found

    def end_step(self) -> None:
        """After the first step, warn of a generator that was created in it."""
        if not self._is_first_step:
            return
        self._is_first_step = False
        before = {x.name for own in self._searched.values() for x in own.values()}
        created = [x.name.removeprefix("module.") for x in self.find() if x.name not in before]
        if created:
            warn(
                f"forward created the generator {created[0]!r} in a declared step: numbers drawn from it in "
                "this step depend on which rank has which micro-batch, so the weights may, too. Create it "
                "before wrapping, in __init__, or ignore this if every forward creates a new one",
            )
