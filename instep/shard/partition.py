"""Which parameters of a module are gathered and reduced together: its units. Pure on modules.

    model                     the root unit: whatever is in no other
      embedding               root
      blocks (ModuleList)
        0                     unit "blocks.0", and so on
        1
      head                    root

A unit is all of one entry of an outermost list of layers, for a list is what models are repeated in: of such
a layer nothing is needed before it runs, and nothing after. What several units use, tied, is the root's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from instep.step.parameter_registry import require_read_only

LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class UnitMembers:
    """Parameters of one unit, in the order of ``named_parameters``; ``module`` is where they are used."""

    name: str  # of ``module`` in the whole; "" is the whole
    module: nn.Module
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]


def partition(module: nn.Module, units: Sequence[nn.Module] | None = None) -> list[UnitMembers]:
    """The units of ``module``, the root first if it has any parameter, else in the order of registration.

    Every floating-point parameter is in one of them, frozen ones too, tied ones under their first name. A
    parameter belongs to the innermost unit around it. Units are split by dtype, device, and whether their
    parameters are trained, because one flat buffer holds one kind.

    Args:
        units: submodules that shall be units, instead of the entries of lists.

    Raises:
        ValueError: one of ``units`` is not a submodule of ``module``, or a module writes to its weights.
    """
    require_read_only(module)
    tops = _entries(module) if units is None else _given(module, units)
    owners: dict[int, set[int]] = {}  # parameter -> the units that use it; -1: the root
    for unit, parameter in _used(module, {id(top): i for i, (_, top) in enumerate(tops)}):
        owners.setdefault(id(parameter), set()).add(unit)
    found: dict[int, list[tuple[str, nn.Parameter]]] = {i: [] for i in range(-1, len(tops))}
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            unit, *others = owners[id(parameter)]
            found[-1 if others else unit].append((name, parameter))
    made = []
    for i, pairs in found.items():
        kinds: dict[tuple[torch.dtype, torch.device, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, p in pairs:
            kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append((name, p))
        place = ("", module) if i < 0 else tops[i]
        made += [UnitMembers(*place, *zip(*own, strict=True)) for own in kinds.values()]
    return made


def _entries(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Entries of the outermost lists, with their names, each once; of a list in a list, its own entries."""
    found: dict[int, tuple[str, nn.Module]] = {}

    def look(inside: nn.Module, prefix: str) -> None:
        for name, child in inside.named_children():
            if not isinstance(inside, LISTS) or not _is_callable(child):
                look(child, f"{prefix}{name}.")
            elif next(child.parameters(), None) is not None:
                found.setdefault(id(child), (prefix + name, child))

    look(module, "")
    return list(found.values())


def _given(module: nn.Module, units: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    inside, given = set(module.modules()) - {module}, set(units)
    for i, unit in enumerate(units):
        if unit not in inside or not _is_callable(unit):
            raise ValueError(
                f"units[{i}], a {type(unit).__name__}: expected a submodule of the module that is sharded, "
                "with a forward; the whole of it is a unit already"
            )
    return [(name, m) for name, m in module.named_modules() if m in given]


def _used(module: nn.Module, tops: Mapping[int, int]) -> Iterator[tuple[int, nn.Parameter]]:
    """(unit, parameter) wherever a module has a parameter of its own; the unit is the innermost around it."""
    seen: set[tuple[int, int]] = set()

    def look(m: nn.Module, unit: int) -> Iterator[tuple[int, nn.Parameter]]:
        unit = tops.get(id(m), unit)
        if (id(m), unit) not in seen:
            seen.add((id(m), unit))
            yield from ((unit, p) for p in m._parameters.values() if p is not None)
            for child in m.children():
                yield from look(child, unit)

    yield from look(module, -1)


def _is_callable(m: nn.Module) -> bool:
    """Whether ``m`` has a forward."""
    return "forward" in m.__dict__ or type(m).forward is not nn.Module.forward
