"""Random numbers keyed by their use, not by the rank that draws them.

A generator's stream depends on everything drawn before, so on which micro-batches a rank computes. Therefore
the generator is seeded from (seed, step, micro-batch, block) at the start of each micro-batch and whenever
forward enters a declared block, recompute included, and restored when the micro-batch ends. A block is a
submodule with the attribute ``rng_block = True``; a model without any is one block. Keying by block makes a
block's draws independent of how much earlier blocks drew, and so of where a pipeline is cut.

Initial weights are keyed by (seed, parameter name), so whichever rank creates a parameter, and in which
order, it starts with the same values.

Other generators than torch's defaults (``rng/generators.py``) are keyed by (seed, step, micro-batch).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from instep.hook import Hook, weakly
from instep.rng.generators import (
    KeyedGenerator,
    ModuleGenerators,
    global_generators,
    seed_generator,
    state_of,
)

WHOLE_MODEL = 0  # blocks are numbered from 1


def derive(seed: int, *path: int | str) -> int:
    """A 64-bit key from ``seed`` and a path of numbers and names (BLAKE2b)."""
    text = "/".join([str(seed), *[f"{type(part).__name__[0]}{part}" for part in path]])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def is_block(module: nn.Module) -> bool:
    """Whether ``module`` declares ``rng_block = True``."""
    return getattr(module, "rng_block", False) is True


class InitializesByName(Protocol):
    """A model that can fill one parameter at a time."""

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None: ...


def initialize(module: nn.Module, seed: int) -> None:
    """Fill every parameter of ``module`` by its name, through the module's ``init_parameter``.

    A parameter has the same values whatever else the model holds, whenever it is created, and on whichever
    rank. Numbers are drawn on CPU for every device, each parameter whole; tied parameters once, by their
    first name. Running statistics of norms are reset.

    Args:
        module: has a method ``init_parameter(name, parameter, generator)``, which fills ``parameter``, a CPU
            tensor, with numbers drawn from ``generator``.
        seed: keys all parameters.

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
            f"{type(module).__name__} cannot be initialized by name: give it a method "
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
    """Seeds the generators that one module's micro-batches draw from; idle outside of ``leaf``.

    At construction: a pre-forward hook on every block. ``blocks`` numbers them where the module is part of a
    larger one; by default the declared blocks are numbered in order. ``leaf`` seeds, and the hooks seed
    torch's generators again. After ``leaf`` torch's default generators, and after ``step`` the others, are
    where the user's own draws left them.
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
        # Modules of torch.jit take no hooks, and draw with the block around them.
        modules = [m for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]
        if blocks is None:
            blocks = {m: i for i, m in enumerate(filter(is_block, modules), start=1)}
        enter = weakly(self._enter)
        self.hooks = [
            m.register_forward_pre_hook(Hook(partial(enter, blocks[m])), prepend=True)
            for m in modules
            if m in blocks
        ]

    @contextmanager
    def step(self, named_modules: Sequence[tuple[str, nn.Module]] | None = None) -> Iterator[None]:
        """Around the micro-batches of a step: restores ``random``, numpy's and the module's generators.

        ``named_modules``: those of the module, if the caller has the list.
        """
        self._others = [*global_generators(), *self._own.find(named_modules)]
        before = [generator.save() for generator in self._others]
        try:
            yield
        finally:
            for generator, state in zip(self._others, before, strict=True):
                generator.restore(state)
        self._own.end_step()

    @contextmanager
    def leaf(self, step: int, leaf: int) -> Iterator[None]:
        """Inside, draws depend on (seed, step, leaf, block) alone. Used within ``step``."""
        before = [state_of(generator) for generator in self._generators]
        self._leaf = (step, leaf)
        self._enter(WHOLE_MODEL)
        for other in self._others:
            other.key(derive(self.seed, step, leaf, other.name))
        try:
            yield
        finally:
            self._leaf = None
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)

    def _enter(self, block: int, *_: Any) -> None:
        if self._leaf is not None:
            key = derive(self.seed, *self._leaf, block)
            for generator in self._generators:
                seed_generator(generator, key)
