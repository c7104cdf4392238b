"""Values for a module that was made on the meta device: a model that no rank could hold gets its weights.

Every rank makes the same values, one unit at a time, and keeps its slice of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from instep.ordered.generators import seed_generator
from instep.ordered.keys import InitializesByName, derive
from instep.shard.unit import Unit

Init = Callable[[str, Tensor], None]
RESETS = ("reset_parameters", "_reset_parameters")  # the second is what torch's attention calls its own


def materialise(module: nn.Module, units: Sequence[Unit], init: Init | None, seed: int) -> None:
    """Fill the ``units`` of ``module`` that have no values yet, and buffers on the meta device."""
    if init is None and hasattr(module, "init_parameter"):
        init = _by_name(module, seed)  # type: ignore[arg-type]
    if init is not None:
        for unit in units:
            if not unit.materialised:
                _fill(unit, init)
    else:
        _reset(module, [unit for unit in units if not unit.materialised], seed)
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name!r} is on the meta device, and its values are not known: make it on a "
                "device, or let reset_parameters() of its module fill it"
            )
    for unit in units:
        unit.materialised = True


def _by_name(module: InitializesByName, seed: int) -> Init:
    """The module's own ``init_parameter``, with the numbers of ``ordered.keys.initialize``."""

    def init(name: str, tensor: Tensor) -> None:
        generator = torch.Generator()
        seed_generator(generator, derive(seed, "init", name))
        filled = torch.empty(tensor.shape, dtype=tensor.dtype)
        module.init_parameter(name, filled, generator)
        tensor.copy_(filled)

    return init


def _fill(unit: Unit, init: Init) -> None:
    with torch.no_grad():
        for i, name in enumerate(unit.names):
            values = torch.empty_strided(
                unit.parameters[i].shape,
                unit.strides_of(unit.parameters[i]),
                dtype=unit.own_dtype,
                device=unit.slice.device,
            )
            init(name, values)
            unit.keep(i, values)


def _reset(module: nn.Module, units: Sequence[Unit], seed: int) -> None:
    """Let the submodules fill their parameters themselves, children first, as at their construction."""
    names = {m: name for name, m in module.named_modules()}
    by_place: dict[str, list[Unit]] = {}
    for unit in units:
        by_place.setdefault(unit.name, []).append(unit)
    done: set[int] = set()
    for own in by_place.values():
        pending = {id(p) for unit in own for p in unit.parameters}
        with _whole(own), torch.random.fork_rng(devices=[]):
            for m in _children_first(module):
                mine = {id(p) for p in m._parameters.values() if p is not None}
                if mine & pending and not mine <= done:
                    torch.manual_seed(derive(seed, "init", names[m]))
                    _make_buffers(m, own[0].slice.device)
                    _call_reset(m, names[m])
                    done |= mine
    for m in _children_first(module):
        if any(x is not None and x.is_meta for x in m._buffers.values()) and _reset_of(m) is not None:
            _make_buffers(m, units[0].slice.device if units else torch.device("cpu"))
            _call_reset(m, names[m])


def _reset_of(m: nn.Module) -> Callable[[], object] | None:
    return next((getattr(m, name) for name in RESETS if callable(getattr(m, name, None))), None)


def _call_reset(m: nn.Module, name: str) -> None:
    reset = _reset_of(m)
    if reset is None:
        raise ValueError(
            f"{name or 'the module'!r}, a {type(m).__name__}, has parameters on the meta device and no "
            "reset_parameters(): pass materialise(init=...), which fills one parameter at a time"
        )
    reset()


def _make_buffers(m: nn.Module, device: torch.device) -> None:
    for key, x in m._buffers.items():
        if x is not None and x.is_meta:
            m._buffers[key] = torch.zeros_like(x, device=device)


@contextmanager
def _whole(units: Sequence[Unit]) -> Iterator[None]:
    """Inside, the parameters are whole, each in its own dtype; then the units keep their parts."""
    with torch.no_grad():
        for unit in units:
            unit.begin_use()
            for p in unit.parameters:
                p.data = torch.empty_strided(
                    p.shape, unit.strides_of(p), dtype=unit.own_dtype, device=unit.slice.device
                )
        try:
            yield
            for unit in units:
                for i, p in enumerate(unit.parameters):
                    unit.keep(i, p.detach())
        finally:
            for unit in units:
                unit.hide()


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
