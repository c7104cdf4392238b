"""Values for a module that was made on the meta device: a model that no rank could hold gets its weights.

Every rank makes the same values, one unit at a time, and keeps what it is to have of them. Where ranks have
not met yet, nothing is made but buffers (``prepare``), which every rank has whole in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.rng.generators import seed_generator
from instep.rng.keys import InitializesByName, derive
from instep.state.hash import SHORT, tensor_digest
from instep.state.shards import elements

Init = Callable[[str, Tensor], None]
RESETS = ("reset_parameters", "_reset_parameters")  # the second is what torch's attention calls its own


ALIKE = ": pass materialise() the same seed on all ranks, or a function that fills alike on all"


class Unfilled(Protocol):
    """Parameters of one dtype that have no values yet, and are filled together.

    Inside ``made_whole(values)`` the module's parameters are ``values``; what was written to them is kept.
    """

    name: str
    names: list[str]
    parameters: Any

    @property
    def device(self) -> torch.device: ...

    def empty(self, i: int) -> Tensor:
        """Memory for all of parameter i, in its own dtype and order: random numbers are drawn in this."""
        ...

    def made_whole(self, values: Sequence[Tensor]) -> AbstractContextManager[None]: ...

    def keep(self, i: int, values: Tensor) -> None: ...


def materialise(module: nn.Module, units: Sequence[Unfilled], init: Init | None, seed: int) -> list[str]:
    """Fill ``units`` of ``module``, which have no values yet, and buffers on the meta device.

    Returns a line for each parameter that another rank has too if it has made the same values; or nearly: it
    is of the first block of each.
    """
    made: list[str] = []
    if init is None and hasattr(module, "init_parameter"):
        init = _by_name(module, seed)  # type: ignore[arg-type]
    if init is not None:
        for unit in units:
            _fill(unit, init, made)
    else:
        _reset(module, units, seed, made)
    _require_buffers(module)
    return made


def prepare(module: nn.Module, units: Sequence[Unfilled], init: Init | None, seed: int) -> None:
    """Look whether ``materialise`` can fill ``units`` later, and fill buffers on the meta device.

    A submodule may fill its parameters with its buffers: these have memory meanwhile.
    """
    if init is None and not hasattr(module, "init_parameter"):
        names = {m: name for name, m in module.named_modules()}
        for m in _resetting(module, units):
            _require_reset(m, names[m])
        with torch.random.fork_rng(devices=[]):
            for m in _children_first(module):
                if _has_meta_buffers(m) and _reset_of(m) is not None:
                    mine = {id(p) for p in m._parameters.values()}
                    own = [unit for unit in units if any(id(p) in mine for p in unit.parameters)]
                    with _whole(own):
                        torch.manual_seed(derive(seed, "init", names[m]))
                        _make_buffers(m, units[0].device)
                        _require_reset(m, names[m])()
    _require_buffers(module)


def _require_buffers(module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name!r} is on the meta device, and its values are not known: make it on a "
                "device, or let reset_parameters() of its module fill it"
            )


def _by_name(module: InitializesByName, seed: int) -> Init:
    """The module's own ``init_parameter``, with the numbers of ``rng.keys.initialize``."""

    def init(name: str, tensor: Tensor) -> None:
        generator = torch.Generator()
        seed_generator(generator, derive(seed, "init", name))
        filled = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        module.init_parameter(name, filled, generator)
        tensor.copy_(filled)

    return init


def _line(name: str, values: Tensor) -> str:
    first = elements(values.detach(), 0, min(values.numel(), BLOCK_ELEMENTS))
    return f"{name}, which begins with the hash {tensor_digest(first).hex()[:SHORT]}"


def _fill(unit: Unfilled, init: Init, made: list[str]) -> None:
    with torch.no_grad():
        for i, name in enumerate(unit.names):
            values = unit.empty(i)
            init(name, values)
            unit.keep(i, values)
            made.append(_line(name, values))


def _reset(module: nn.Module, units: Sequence[Unfilled], seed: int, made: list[str]) -> None:
    """Let the submodules fill their parameters themselves, children first, as at their construction."""
    names = {m: name for name, m in module.named_modules()}
    by_place: dict[str, list[Unfilled]] = {}
    for unit in units:
        by_place.setdefault(unit.name, []).append(unit)
    for own in by_place.values():
        with _whole(own), torch.random.fork_rng(devices=[]):
            for m in _resetting(module, own):
                torch.manual_seed(derive(seed, "init", names[m]))
                _make_buffers(m, own[0].device)
                _require_reset(m, names[m])()
            for unit in own:
                made += [_line(name, p) for name, p in zip(unit.names, unit.parameters, strict=True)]
    for m in _children_first(module):
        if _has_meta_buffers(m) and _reset_of(m) is not None:
            _make_buffers(m, units[0].device if units else torch.device("cpu"))
            _require_reset(m, names[m])()


def _resetting(module: nn.Module, units: Sequence[Unfilled]) -> Iterator[nn.Module]:
    """The submodules that fill the parameters of ``units``, in the order in which they do."""
    pending = {id(p) for unit in units for p in unit.parameters}
    done: set[int] = set()
    for m in _children_first(module):
        mine = {id(p) for p in m._parameters.values() if p is not None}
        if mine & pending and not mine <= done:
            yield m
            done |= mine


def _reset_of(m: nn.Module) -> Callable[[], object] | None:
    return next((getattr(m, name) for name in RESETS if callable(getattr(m, name, None))), None)


def _require_reset(m: nn.Module, name: str) -> Callable[[], object]:
    reset = _reset_of(m)
    if reset is None:
        raise ValueError(
            f"{name or 'the module'!r}, a {type(m).__name__}, has parameters on the meta device and no "
            "reset_parameters(): pass materialise(init=...), which fills one parameter at a time"
        )
    return reset


def _has_meta_buffers(m: nn.Module) -> bool:
    return any(x is not None and x.is_meta for x in m._buffers.values())


def _make_buffers(m: nn.Module, device: torch.device) -> None:
    for key, x in m._buffers.items():
        if x is not None and x.is_meta:
            m._buffers[key] = torch.zeros_like(x, device=device)


@contextmanager
def _whole(units: Sequence[Unfilled]) -> Iterator[None]:
    """Inside, the parameters are whole, each in its own dtype; what is written to them is kept."""
    with torch.no_grad(), ExitStack() as stack:
        for unit in units:
            stack.enter_context(unit.made_whole([unit.empty(i) for i in range(len(unit.names))]))
        yield


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()

    def look(m: nn.Module) -> Iterator[nn.Module]:
        if m in seen:
            return
        seen.add(m)
        for child in m.children():
            yield from look(child)
        yield m

    yield from look(module)
