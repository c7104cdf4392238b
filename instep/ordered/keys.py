"""Random numbers keyed by what they are for, not by who draws them.

A generator's stream depends on everything drawn before, so on which micro-batches a rank has had. Instead
the generator is seeded anew from (seed, step, leaf, block) when a micro-batch begins and whenever its
forward enters a declared block, recompute included, and put back when the micro-batch ends. A block is a
submodule with the attribute ``rng_block = True``; a model without any is one block. Keying by block makes
a block's draws independent of how much the blocks before it drew, and so of where a pipeline is cut.

Initial weights are keyed by (seed, parameter name) for the same reason: whichever rank creates a
parameter, and in which order, it starts with the same values.

Generators that are not torch's default ones (``ordered/generators.py``) are keyed by (seed, step, leaf).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from instep.ordered.generators import (
    KeyedGenerator,
    ModuleGenerators,
    global_generators,
    seed_generator,
    state_of,
)
from instep.ordered.hook import Hook

WHOLE_MODEL = 0  # blocks are numbered from 1


def derive(seed: int, *path: int | str) -> int:
    """A 64-bit key from ``seed`` and a path of numbers and names (BLAKE2b)."""
    text = "/".join([str(seed), *[f"{type(part).__name__[0]}{part}" for part in path]])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def is_block(module: nn.Module) -> bool:
    """Whether ``module`` is declared to be a block."""
    return getattr(module, "rng_block", False) is True


class InitializesByName(Protocol):
    """A model that can fill one parameter at a time."""

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None: ...


def initialize(module: nn.Module, seed: int) -> None:
    """Fill every parameter of ``module`` by its name, through the module's ``init_parameter``.

    So a parameter has the same values whatever else there is in the model, in which order it is made, and on
    which rank. Numbers are drawn on CPU for every device, each parameter whole; tied parameters once, by
    their first name. Running statistics of norms are as new.

    Args:
        module: with a method ``init_parameter(name, parameter, generator)``, which fills ``parameter``, a CPU
            tensor, with numbers drawn from ``generator``.
        seed: of all parameters.

    Raises:
        TypeError: the module has no such method.

    Example:
        >>> class Net(torch.nn.Linear):
        ...     def init_parameter(self, name, parameter, generator):
        ...         parameter.normal_(std=0.02, generator=generator)
        >>> instep.initialize(Net(8, 4), seed=0)
    """
    if not callable(getattr(module, "init_parameter", None)):
        raise TypeError(
            f"{type(module).__name__} cannot be filled by name: give it a method "
            "init_parameter(self, name, parameter, generator), which fills one parameter"
        )
    model: InitializesByName = module  # type: ignore[assignment]
    for name, parameter in module.named_parameters():
        generator = torch.Generator()
        seed_generator(generator, derive(seed, "init", name))
        filled = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        model.init_parameter(name, filled, generator)
        with torch.no_grad():
            parameter.copy_(filled)
    for part in module.modules():
        if callable(reset := getattr(part, "reset_running_stats", None)):
            reset()


class LeafKeys:
    """Seeds the generators that one module's micro-batches may draw from; idle outside of ``leaf``.

    At construction: a pre-forward hook on every block, and the generators that the module keeps. ``blocks``
    have numbers of their own where the module is a part of another one; else they are the declared ones. In
    a leaf: it is seeded, and the hooks seed torch's again. After it torch's default generators, and after
    ``step`` the others, continue where the caller's own draws had left them.
    """

    def __init__(
        self,
        module: nn.Module,
        seed: int,
        generators: list[torch.Generator],
        blocks: Mapping[nn.Module, int] | None = None,
    ) -> None:
        self.seed = seed
        self._generators = generators
        self._leaf: tuple[int, int] | None = None
        self._own = ModuleGenerators(module)
        self._others: list[KeyedGenerator] = []
        # What torch.jit has compiled takes no hooks, and draws with the block around it.
        modules = [m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]
        if blocks is None:
            blocks = {m: i for i, m in enumerate(filter(is_block, modules), start=1)}
        me = weakref.ref(self)
        self.hooks = [
            m.register_forward_pre_hook(Hook(_entering(me, blocks[m])), prepend=True)
            for m in modules
            if m in blocks
        ]

    @contextmanager
    def step(self, named_modules: Sequence[tuple[str, nn.Module]] | None = None) -> Iterator[None]:
        """Around the leaves of a step: those of ``random``, of numpy and of the module are put back.

        ``named_modules`` are those of the module, where they are known.
        """
        self._others = [*global_generators(), *self._own.look(named_modules)]
        before = [generator.save() for generator in self._others]
        try:
            yield
        finally:
            for generator, state in zip(self._others, before, strict=True):
                generator.restore(state)
        self._own.ended()

    @contextmanager
    def leaf(self, step: int, leaf: int) -> Iterator[None]:
        """Inside, what generators give depends on (seed, step, leaf, block) alone. Within ``step``."""
        before = [state_of(generator) for generator in self._generators]
        self._leaf = (step, leaf)
        self.enter(WHOLE_MODEL)
        for other in self._others:
            other.key(derive(self.seed, step, leaf, other.name))
        try:
            yield
        finally:
            self._leaf = None
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)

    def enter(self, block: int) -> None:
        """Seed for ``block`` if a leaf is under way."""
        if self._leaf is not None:
            key = derive(self.seed, *self._leaf, block)
            for generator in self._generators:
                seed_generator(generator, key)


def _entering(keys: weakref.ref[LeafKeys], block: int) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        alive = keys()
        if alive is not None:
            alive.enter(block)

    return hook
