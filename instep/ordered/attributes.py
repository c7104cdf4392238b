"""What modules keep beside what every module has: numbers, containers, generators, and what is in those."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

# Parameters, hooks, what torch.compile has made; ``training`` is the user's to set.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
WIDTH = 100  # so many things of each container are looked at, because it may be a data set
LIMIT = 1000  # and so many of an attribute in all, because an object may know the whole program


def own_attributes(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, str, Any]]:
    """Of modules with their names: the name of the module, of the attribute, and its value."""
    for prefix, owner in named:
        for key, value in vars(owner).items():
            if key not in OF_EVERY_MODULE:
                yield prefix, key, value


def within(value: Any, parts: Callable[[Any], list[Any]], depth: int) -> Iterator[tuple[str, Any]]:
    """``value`` and what is in it by ``parts``, the nearest first: where it is ("0", "3", "3.1"), and what.

    Looks so many levels deep, and at no more than ``LIMIT`` things.
    """
    yield "0", value
    level, seen, left = [("", value)], {id(value)}, LIMIT
    for _ in range(depth):
        following: list[tuple[str, Any]] = []
        for place, x in level:
            for i, part in enumerate(islice(parts(x), min(WIDTH, left)), start=1):
                left -= 1
                at = f"{place}.{i}".lstrip(".")
                yield at, part
                if id(part) not in seen:
                    seen.add(id(part))
                    following.append((at, part))
        level = following


def contents(x: Any) -> list[Any]:
    """What a container holds, or an object that is no tensor, class or file of code, in its attributes.

    In an order that all ranks have, so of a set nothing; and nothing of what instep itself keeps there.
    """
    if type(x).__module__.partition(".")[0] == "instep":
        return []
    if isinstance(x, list | tuple | deque):
        return list(islice(x, WIDTH))
    if isinstance(x, dict):
        return list(islice(x.values(), WIDTH))
    if isinstance(x, Tensor | type | ModuleType | FunctionType):
        return []
    return list(getattr(x, "__dict__", {}).values())


def reached(x: Any) -> list[Any]:
    """``contents``, and what a function has at hand."""
    return at_hand(x) or contents(x)


def at_hand(x: Any) -> list[Any]:
    """The object of a bound method, the arguments in a partial function, the closure of a function."""
    if isinstance(x, partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, MethodType | BuiltinMethodType):
        return [x.__self__]
    if isinstance(x, FunctionType):
        cells = [_content(cell) for cell in x.__closure__ or ()]
        return [*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    return []


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # its variable has no value yet
        return None
