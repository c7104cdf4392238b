"""``launch`` executes a function of a notebook once, on ranks that end with it.

A function of a cell has no file that a rank could import. Ranks get its source, and what the source names:
functions and classes of cells as source, modules and their contents as imports, tensors and data as copies.
Nothing is pickled. Any other variable is refused by name, before a rank starts.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from textwrap import dedent
from types import CodeType, FunctionType, ModuleType
from typing import Any

from instep.notebook.ranks import Ranks
from instep.state.objects import take_apart

ANNOTATIONS = annotations.compiler_flag  # their names need not reach the ranks
HEAD = "from __future__ import annotations\n"
LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
OF_RANK = {"rank", "world_size", "device", "mesh"}


def launch(
    function: Callable[..., Any],
    num_ranks: int = 2,
    *args: Any,
    device: str | None = None,
    backend: str | None = None,
    timeout_s: float = 60.0,
    threads: int = 1,
) -> list[Any]:
    """Execute ``function(*args)`` on ``num_ranks`` new ranks, and show their output while it comes.

    A function of a cell or a script sees ``rank``, ``world_size``, ``device`` and ``mesh`` as a cell does.

    Args:
        function: defined in a cell, a script or a module, without variables of a function around it.
        args: tensors and data that JSON can carry, as must be what the function returns.
        device, backend, timeout_s, threads: as in ``instep.init``.

    Returns:
        What each rank has returned, by rank.

    Raises:
        ValueError: the function uses a variable that cannot be copied to a rank.
        CellFailed: it raised on a rank, was interrupted, or a rank died.

    Example:
        >>> def square(x):
        ...     return (rank + x) ** 2
        >>> launch(square, 2, 3)
        [9, 16]
    """
    if not isinstance(function, FunctionType):
        raise ValueError(f"launch: expected a function written with def, got {type(function).__qualname__}")
    used = _Used(function.__globals__)
    used.add("launch", function.__name__, function)
    for number, value in enumerate(args):
        _require_data(f"argument {number} of {function.__name__}", value)
    with Ranks(num_ranks, device=device, backend=backend, timeout_s=timeout_s, threads=threads) as ranks:
        for name, value in used.data.items():
            ranks.push(name, value)
        ranks.push("_args", args)
        *others, last = used.sources
        ranks.run("".join([HEAD, *others]), name=f"what {function.__name__} uses")
        ranks.run(f"{HEAD}{last}\n_result = {function.__name__}(*_args)", name=function.__name__)
        return [ranks.pull("_result", rank) for rank in range(num_ranks)]


class _Used:
    """The variables of a function: ``data`` by name, and ``sources``, each after those that it uses."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._seen: set[str] = set()
        self.data: dict[str, Any] = {}
        self.sources: list[str] = []

    def add(self, user: str, name: str, value: Any) -> None:
        """``user`` names the variable ``name``."""
        self._seen.add(name)
        own = getattr(value, "__qualname__", "")
        module = getattr(value, "__module__", None) or ""
        if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
            self.sources.append(f"import {value.__name__} as {name}\n")
        elif own and module != "__main__" and getattr(sys.modules.get(module), own, None) is value:
            self.sources.append(f"from {module} import {own} as {name}\n")
        elif isinstance(value, type | FunctionType):
            self._add_source(user, name, value)
        else:
            _require_data(f"{name}, which {user} uses,", value)
            self.data[name] = value

    def _add_source(self, user: str, name: str, value: type | FunctionType) -> None:
        source = _source_of(user, value)
        if name != value.__name__:
            if self._variables.get(value.__name__) is not value:
                raise ValueError(f"launch: {user} uses {name}, which is an older {value.__name__}: rename it")
            source = f"{name} = {value.__name__}\n"
        code = compile(source, name, "exec", ANNOTATIONS, dont_inherit=True)
        for other in dict.fromkeys(_globals_of(code)):
            if other in self._variables and other not in self._seen | OF_RANK and other[:2] != "__":
                self.add(value.__name__, other, self._variables[other])
        self.sources.append(source)


def _require_data(what: str, value: Any) -> None:
    try:
        take_apart("", value)
    except ValueError:
        raise ValueError(
            f"launch: {what} cannot be copied to a rank: expected tensors or short data, got "
            f"{type(value).__qualname__}: make it inside the function"
        ) from None


def _globals_of(code: CodeType) -> Iterator[str]:
    """The names that ``code``, and what it defines, looks up outside of functions."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in LOADS)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


def _source_of(user: str, value: type | FunctionType) -> str:
    """The definition of ``value``, with its decorators, in its file or cell."""
    inner = inspect.unwrap(value)
    parts = vars(value).values() if isinstance(value, type) else [inner]
    codes = [part.__code__ for part in parts if isinstance(part, FunctionType)]
    for code in codes:
        lines = linecache.getlines(code.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == value.__name__:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                is_it = first <= code.co_firstlineno <= (node.end_lineno or 0)
                if is_it and (value is inner or node.decorator_list):  # else it was wrapped later
                    _require_open(value, [each for each in codes if each.co_filename == code.co_filename])
                    return dedent("".join(lines[first - 1 : node.end_lineno])) + "\n"
    raise ValueError(
        f"launch: {user} uses {value.__name__}, the source of which is not known: expected a def, or a class "
        "with a def in it, of a cell or a file, with its decorators above it"
    )


def _require_open(value: type | FunctionType, codes: Sequence[CodeType]) -> None:
    if captured := {name for code in codes for name in code.co_freevars} - {"__class__"}:
        raise ValueError(
            f"launch: {value.__name__} uses {', '.join(sorted(captured))} of the function around it, which "
            "cannot be copied to a rank: pass arguments, or define both in a cell"
        )
