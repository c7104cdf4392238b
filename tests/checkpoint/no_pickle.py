"""A process in which whoever unpickles is caught: every way to run code from bytes raises.

``forbid()`` stays until the process ends; ``forbidden()`` is a context for a test. What multiprocessing needs
to start a child it has taken before, and the import system may go on to read its own compiled files.
"""

from __future__ import annotations

import marshal
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

WAYS: tuple[tuple[Any, str], ...] = (
    (pickle, "load"),
    (pickle, "loads"),
    (pickle, "Unpickler"),
    (pickle, "_Unpickler"),
    (torch, "load"),
    (torch.serialization, "load"),
    (marshal, "load"),
    (marshal, "loads"),
)
IMPORT_SYSTEM = "<frozen importlib._bootstrap_external>"


class Unpickled(AssertionError):
    """Bytes were about to be run."""


def forbid() -> None:
    """From here on, every way raises ``Unpickled``."""
    for module, name in WAYS:
        setattr(module, name, _raising(f"{module.__name__}.{name}", getattr(module, name)))


@contextmanager
def forbidden() -> Iterator[None]:
    """The same until the end of the block."""
    before = [getattr(module, name) for module, name in WAYS]
    forbid()
    try:
        yield
    finally:
        for (module, name), original in zip(WAYS, before, strict=True):
            setattr(module, name, original)


def _raising(way: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise Unpickled(f"{way} was called")

    def compiled_only(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _caller() == IMPORT_SYSTEM else refuse()

    return compiled_only if way == "marshal.loads" else refuse


def _caller() -> str:
    return sys._getframe(2).f_code.co_filename
