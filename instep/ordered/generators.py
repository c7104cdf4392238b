"""Random generators that are not torch's default ones, each with one way to save, key and restore it.

Forwards and augmentations also draw from Python's ``random``, from the global state of ``numpy.random``, and
from generators that a module keeps as attributes. ``LeafKeys`` keys them all by
(seed, step, leaf). That they are not keyed by block as torch's are is a matter of cost: a seed takes ten
microseconds. So states are saved once per step, and a leaf costs a seed each.

Python and numpy take fifty to tell a Mersenne twister's state and to take it back, because its words become
Python's numbers one by one. Here they are copied as bytes, from and to where they lie (``_Twister``).
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import warnings
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy.random  # here, because NumPy loads it late: draws before it is loaded would not be keyed
import torch
from torch import Tensor, nn

from instep.memory import tensor_of
from instep.ordered.attributes import OF_EVERY_MODULE, own_attributes, reached, within

_asking = threading.Lock()  # of ``state_of``
# By turns, as threads may share one; again in the same thread, where the garbage collector ends a step in it.
_looking = threading.RLock()  # of ``_Twister``
TWISTER_BYTES = 4 * (624 + 1)  # of a Mersenne twister: its words, and the place among them
DEPTH = 3  # of an object in a container in an attribute
_WITHOUT = (Tensor, int, float, str, type(None))  # which hold no generator


def seed_generator(generator: torch.Generator, key: int) -> None:
    """Seed ``generator`` from a 64-bit ``key``, folded to what its kind can take.

    The CPU generator uses 32 bits of its seed (tried: 5 and 5 + 2**32 give one stream); of a million keys
    about 116 pairs share a stream, which harms nothing.
    """
    generator.manual_seed((key ^ key >> 32) & 0xFFFFFFFF if generator.device.type == "cpu" else key >> 1)


def state_of(generator: torch.Generator) -> Tensor:
    """The state of ``generator``, also while other threads ask for it.

    torch holds a mutex of the generator while it makes the tensor; where that sets off the garbage collector,
    another thread may come to run, and wait for the mutex with the interpreter's lock in its hands.
    """
    with _asking:
        return generator.get_state()


class KeyedGenerator(NamedTuple):
    """A generator, by what can be done to it: states are what ``save`` returns, the name is in the key."""

    name: str
    save: Callable[[], Any]
    key: Callable[[int], object]
    restore: Callable[[Any], object]


def global_generators() -> list[KeyedGenerator]:
    """``random`` and ``numpy.random``."""
    return [*_global_generators()]


@cache
def _global_generators() -> tuple[KeyedGenerator, ...]:
    return _python("random", random), _legacy_numpy("numpy.random", numpy.random)


def default_generator() -> KeyedGenerator:
    """torch's own, of the CPU."""
    return _torch("torch", torch.default_generator)


def same_state(one: Any, other: Any) -> bool:
    """Whether a generator has given nothing between two ``save``."""
    if isinstance(one, dict):
        return all(same_state(one[key], other[key]) for key in one)
    return bool((one == other).all()) if hasattr(one, "all") else one == other


def generators_of(module: nn.Module) -> list[KeyedGenerator]:
    """Those that ``module`` and its submodules keep, each once: as attributes, in what is ``within`` them."""
    return ModuleGenerators(module).look()


class ModuleGenerators:
    """The generators that ``module`` keeps, looked for again when its attributes are other objects.

    At construction, and when a step begins, so that one which is assigned later is found. One that forward
    itself makes has given numbers before it could be keyed, which is a warning at the end of the first step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # Of each attribute: what it was, by identity, and the generators in it, by theirs.
        self._known: dict[tuple[str, str], tuple[int, dict[int, KeyedGenerator]]] = {}
        self._seen: list[_Seen] = []
        self._found: list[KeyedGenerator] = []
        self._steps = 0
        self.look()

    def look(self, named: Sequence[tuple[str, nn.Module]] | None = None) -> list[KeyedGenerator]:
        """Those that there are at this moment; in what is still the same attribute, those found before.

        ``named``: the modules that there are now, with their names, where they are known.
        """
        named = [*self._module.named_modules()] if named is None else named
        if len(named) == len(self._seen) and all(map(_is_as_seen, named, self._seen)):
            return self._found
        self._seen = [_see(owner) for _, owner in named]
        before, self._known = self._known, {}
        found: dict[int, KeyedGenerator] = {}
        for prefix, key, value in own_attributes(named):
            if isinstance(value, _WITHOUT):
                continue
            known = before.get((prefix, key))
            if known is None or known[0] != id(value):
                known = id(value), _by_identity(value, f"module.{prefix}.{key}")
            self._known[prefix, key] = known
            found |= {at: x for at, x in known[1].items() if at not in found}
        self._found = list(found.values())
        return self._found

    def ended(self) -> None:
        """A step has ended: warn, after the first, of a generator that was made in it."""
        self._steps += 1
        if self._steps > 1:
            return
        before = {x.name for _, found in self._known.values() for x in found.values()}
        made = [x.name.removeprefix("module.") for x in self.look() if x.name not in before]
        if made:
            warnings.warn(
                f"forward made the generator {made[0]!r} in a declared step: what it gave before the step's "
                "end depends on which rank has which micro-batch, so the weights may, too. Make it before "
                "wrapping, in __init__, or ignore this if every forward makes it anew",
                stacklevel=2,
            )


class _Seen(NamedTuple):
    """A module, how many attributes it had, and the kind and identity of each that may have generators."""

    module: nn.Module
    num_attributes: int
    kinds: dict[str, tuple[type, int]]  # 0 in the place of an identity: none of the kind has any


def _see(module: nn.Module) -> _Seen:
    own = {key: x for key, x in vars(module).items() if key not in OF_EVERY_MODULE}
    kinds = {key: (type(x), 0 if isinstance(x, _WITHOUT) else id(x)) for key, x in own.items()}
    return _Seen(module, len(vars(module)), kinds)


def _is_as_seen(named: tuple[str, nn.Module], seen: _Seen) -> bool:
    attributes = vars(named[1])
    if named[1] is not seen.module or len(attributes) != seen.num_attributes:
        return False
    for key, (kind, identity) in seen.kinds.items():
        x = attributes.get(key, seen)  # what is not there is of another kind
        if type(x) is not kind or (identity and id(x) != identity):
            return False
    return True


def generators_in(value: Any, name: str) -> list[KeyedGenerator]:
    """Those within ``value``, an object that is no module, each once; ``name`` goes before theirs."""
    return list(_by_identity(value, name).values())


def _by_identity(value: Any, name: str) -> dict[int, KeyedGenerator]:
    found: dict[int, KeyedGenerator] = {}
    for place, x in within(value, reached, DEPTH):
        kind = _kind(x)
        if kind is not None and id(x) not in found:
            found[id(x)] = kind(f"{name}.{place}", x)
    return found


def _kind(x: Any) -> Callable[[str, Any], KeyedGenerator] | None:
    if isinstance(x, torch.Generator):
        return _torch
    if isinstance(x, random.Random):
        return None if isinstance(x, random.SystemRandom) else _python  # the system's has no state
    if isinstance(x, numpy.random.RandomState):
        return _legacy_numpy
    if isinstance(x, numpy.random.Generator | numpy.random.BitGenerator):
        return _numpy
    return None


def _torch(name: str, generator: torch.Generator) -> KeyedGenerator:
    key = partial(seed_generator, generator)
    return KeyedGenerator(name, lambda: state_of(generator), key, generator.set_state)


def _python(name: str, generator: Any) -> KeyedGenerator:
    """Of a ``random.Random``, or of the module, which has the same functions."""
    its, own = getattr(generator.getstate, "__self__", None), random.Random
    if not isinstance(its, own) or type(its).getstate != own.getstate or type(its).setstate != own.setstate:
        return KeyedGenerator(name, generator.getstate, generator.seed, generator.setstate)
    twister = _PythonTwister(its)
    return KeyedGenerator(name, twister.save, generator.seed, twister.restore)


def _legacy_numpy(name: str, generator: Any) -> KeyedGenerator:
    """Of a ``numpy.random.RandomState``, or of the module, which has the same functions."""
    twister = _Twister(generator)

    def key(key: int) -> None:
        try:
            generator.seed(key & 0xFFFFFFFF)
        except TypeError:  # the user has given it bits that are no Mersenne twister's
            given = _bits_of(generator)
            generator.set_state({**type(given)(key).state, "has_gauss": 0, "gauss": 0.0})

    return KeyedGenerator(name, twister.save, key, twister.restore)


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "get_bit_generator", lambda: generator._bit_generator)()


class _TwisterState(NamedTuple):
    words: bytes
    normal: float | None  # that is drawn already, as normal numbers are made by twos, and comes next


class _PythonTwister:
    """The state of a ``random.Random``; as Python tells it where its words do not lie where CPython has them.

    In an object of ``_random.Random`` they follow the place among them, and both what every object has.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._memory: Any = None
        begin, end = object.__basicsize__, object.__basicsize__ + TWISTER_BYTES
        if sys.implementation.name == "cpython" and random.Random.__mro__[1].__basicsize__ >= end:
            memory = (ctypes.c_char * TWISTER_BYTES).from_address(id(generator) + begin)
            *words, place = generator.getstate()[1]
            self._memory = memory if memory.raw == array("I", [place, *words]).tobytes() else None

    def save(self) -> Any:
        if self._memory is None:
            return self._generator.getstate()
        return _TwisterState(self._memory.raw, self._generator.gauss_next)

    def restore(self, state: Any) -> None:
        if isinstance(state, _TwisterState):
            self._memory.raw, self._generator.gauss_next = state
        else:
            self._generator.setstate(state)


class _Twister:
    """The state of a ``RandomState`` whose bits are a Mersenne twister's; of others as numpy tells it.

    ``RandomState`` has one number besides: normal ones are made by twos, and the second waits. Whether one
    does is seen by drawing one: it is there if the words stay as they are. Else it waits now, and is drawn.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._bits: Any = None  # those that ``_memory`` is of
        self._memory: Any = None  # the words, where numpy has them; None where they are not told

    def save(self) -> Any:
        with _looking:
            memory = self._look()
            if memory is None:
                return self._generator.get_state(legacy=False)
            words = memory.raw
            state = _TwisterState(words, self._draw_waiting(memory, words))
            self._put(state, memory)
        return state

    def restore(self, state: Any) -> None:
        if not isinstance(state, _TwisterState):
            self._generator.set_state(state)
            return
        with _looking:
            memory = self._look()
            if memory is not None and state.normal is None:
                self._draw_waiting(memory, memory.raw)
            self._put(state, memory)

    def _draw_waiting(self, memory: Any, words: bytes) -> float | None:
        """The normal number that waits at ``words``, or None; none does afterwards, at other words."""
        number: float = self._generator.standard_normal()
        if memory.raw == words:
            return number
        self._generator.standard_normal()
        return None

    def _put(self, state: _TwisterState, memory: Any) -> None:
        """``state``, where no number waits, or one is to."""
        if memory is not None and state.normal is None:
            memory.raw = state.words
            return
        words = tensor_of(state.words, torch.int32).numpy()
        told = {"key": words[:-1].view("uint32"), "pos": int(words[-1])}
        waits = {"has_gauss": int(state.normal is not None), "gauss": state.normal or 0.0}
        self._generator.set_state({"bit_generator": "MT19937", "state": told, **waits})

    def _look(self) -> Any:
        """The memory of the words; None if the bits are others, or lie there in another way."""
        bits = _bits_of(self._generator)
        if bits is not self._bits:
            self._bits, self._memory = bits, None
            if type(bits) is numpy.random.MT19937:
                memory = (ctypes.c_char * TWISTER_BYTES).from_address(bits.ctypes.state_address)
                told = bits.state["state"]
                place = int(told["pos"]).to_bytes(4, sys.byteorder)
                self._memory = memory if memory.raw == told["key"].tobytes() + place else None
        return self._memory


def _numpy(name: str, generator: Any) -> KeyedGenerator:
    bits = getattr(generator, "bit_generator", generator)

    def key(key: int) -> None:
        bits.state = type(bits)(key).state

    def restore(state: Any) -> None:
        bits.state = state

    return KeyedGenerator(name, lambda: bits.state, key, restore)
