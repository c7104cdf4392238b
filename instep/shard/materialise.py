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
from instep.rng.keys import derive
from instep.state.hash import SHORT, tensor_digest
from instep.state.shards import elements

Init = Callable[[str, Tensor], None]
RESETS = ("reset_parameters", "_reset_parameters")  # the second is what torch's attention calls its own


ALIKE = ": pass materialise() the same seed on all ranks, or a function that fills alike on all"


class Unfilled(Protocol):
    """Parameters of one dtype that have no values yet, and are filled together.

    ``empty(i)`` is memory for all of parameter i, in its own dtype and order: random numbers are drawn in
    this. Inside ``made_whole(values)`` the module's parameters are ``values``; what was written to them is
    kept.
    """

    name: str
    names: list[str]
    parameters: Any

    @property
    def device(self) -> torch.device: ...

    def empty(self, i: int) -> Tensor: ...

    def made_whole(self, values: Sequence[Tensor]) -> AbstractContextManager[None]: ...


def materialise(module: nn.Module, units: Sequence[Unfilled], init: Init | None, seed: int) -> list[str]:
    """Fill ``units`` of ``module``, which have no values yet, and buffers on the meta device.

    Returns a line for each parameter that another rank has too if it has made the same values; or nearly: it
    is of the first block of each.
    """
    made: list[str] = []
    init = init or _by_name(module, seed)
    if init is not None:
        for unit in units:
            with _whole([unit]):
                for name, p in zip(unit.names, unit.parameters, strict=True):
                    init(name, p.detach())
                    made.append(_line(name, p))
    else:
        _reset(module, units, seed, made)
    _require_buffers(module)
    return made


def prepare(module: nn.Module, units: Sequence[Unfilled], init: Init | None, seed: int) -> None:
    """Look whether ``materialise`` can fill ``units`` later, and fill buffers on the meta device."""
    if (init or _by_name(module, seed)) is None:
        for name, m in _resetting(module, units):
            _reset_of(m, name)
        _fill_buffers(module, units, seed, units[0].device)
    _require_buffers(module)


def _fill_buffers(module: nn.Module, units: Sequence[Unfilled], seed: int, device: torch.device) -> None:
    """Let submodules fill their buffers on the meta device, with memory for ``units`` for that long."""
    for name, m in _children_first(module):
        if any(x is not None and x.is_meta for x in m._buffers.values()) and _has_reset(m):
            mine = {id(p) for p in m._parameters.values()}
            with _whole([unit for unit in units if any(id(p) in mine for p in unit.parameters)]):
                _fill_by_itself(m, name, seed, device)


def _fill_by_itself(m: nn.Module, name: str, seed: int, device: torch.device) -> None:
    """Let ``m`` fill its parameters, which have memory, and its buffers, which get some on ``device``."""
    for key, x in m._buffers.items():
        if x is not None and x.is_meta:
            m._buffers[key] = torch.zeros_like(x, device=device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "init", name))
        _reset_of(m, name)()


def _require_buffers(module: nn.Module) -> None:
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name!r} is on the meta device, and its values are not known: make it on a "
                "device, or let reset_parameters() of its module fill it"
            )


def _by_name(module: Any, seed: int) -> Init | None:
    """The module's own ``init_parameter``, if it has one, with the numbers of ``rng.keys.initialize``."""
    if not hasattr(module, "init_parameter"):
        return None

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


def _reset(module: nn.Module, units: Sequence[Unfilled], seed: int, made: list[str]) -> None:
    """Let the submodules fill their parameters themselves, children first, as at their construction."""
    by_place: dict[str, list[Unfilled]] = {}
    for unit in units:
        by_place.setdefault(unit.name, []).append(unit)
    for own in by_place.values():
        with _whole(own):
            for name, m in _resetting(module, own):
                _fill_by_itself(m, name, seed, own[0].device)
            for unit in own:
                made += [_line(name, p) for name, p in zip(unit.names, unit.parameters, strict=True)]
    _fill_buffers(module, (), seed, units[0].device if units else torch.device("cpu"))


def _resetting(module: nn.Module, units: Sequence[Unfilled]) -> Iterator[tuple[str, nn.Module]]:
    """The submodules that fill the parameters of ``units``, in the order in which they do."""
    pending = {id(p) for unit in units for p in unit.parameters}
    done: set[int] = set()
    for name, m in _children_first(module):
        mine = {id(p) for p in m._parameters.values() if p is not None}
        if mine & pending and not mine <= done:
            yield name, m
            done |= mine


def _has_reset(m: nn.Module) -> bool:
    return any(callable(getattr(m, name, None)) for name in RESETS)


def _reset_of(m: nn.Module, name: str) -> Callable[[], object]:
    if not _has_reset(m):
        raise ValueError(
            f"{name or 'the module'!r}, a {type(m).__name__}, has parameters on the meta device and no "
            "reset_parameters(): pass materialise(init=...), which fills one parameter at a time"
        )
    return next(reset for key in RESETS if callable(reset := getattr(m, key, None)))


@contextmanager
def _whole(units: Sequence[Unfilled]) -> Iterator[None]:
    """Inside, the parameters are whole, each in its own dtype; what is written to them is kept."""
    with torch.no_grad(), ExitStack() as stack:
        for unit in units:
            stack.enter_context(unit.made_whole([unit.empty(i) for i in range(len(unit.names))]))
        yield


def _children_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All that is in ``module``, by name, in the order of construction."""
    seen: set[nn.Module] = set()

    def look(name: str, m: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if m not in seen:
            seen.add(m)
            for key, child in m.named_children():
                yield from look(f"{name}.{key}".lstrip("."), child)
            yield name, m

    yield from look("", module)
