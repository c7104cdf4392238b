"""Attributes of modules beside those of every module: numbers, containers, generators, and their contents."""

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
WIDTH = 100  # elements looked at in each container, because it may be a data set
LIMIT = 1000  # objects looked at in each attribute, because an object may know the whole program


def own_attributes(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, str, Any]]:
    """The attributes of named modules: name of the module, name of the attribute, value."""
    for prefix, owner in named:
        for key, value in vars(owner).items():
            if key not in OF_EVERY_MODULE:
                yield prefix, key, value


def within(value: Any, parts: Callable[[Any], list[Any]], depth: int) -> Iterator[tuple[str, Any]]:
    """``value`` and its contents by ``parts``, the nearest first: place ("0", "3", "3.1") and object.

    Searches ``depth`` levels, and at most ``LIMIT`` objects.
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
    """The elements of a container, or the attributes of an object that is no tensor, class or code.

    In an order that all ranks have, so none of a set; and none of instep's own objects.
    """
    if type(x).__module__.partition(".")[0] == "instep" or isinstance(
        x, Tensor | type | ModuleType | FunctionType
    ):
        return []
    if isinstance(x, list | tuple | deque | dict):
        return list(islice(x.values() if isinstance(x, dict) else x, WIDTH))
    return list(getattr(x, "__dict__", {}).values())


def reached(x: Any) -> list[Any]:
    """``contents``, and the objects that a function reaches."""
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
