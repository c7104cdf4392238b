"""Hooks that stay behind: when their module is copied or pickled, and when their owner goes.

Hooks are part of a module: ``copy.deepcopy(model.module)``, for an average of the weights for instance,
copies them too, and the copy's backward would then speak for the original. And a module with a closure for
a hook cannot be pickled.

``torch.compile`` does not look into them: they deal with threads, other ranks, and what parameters show.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling


class Hook:
    """Calls ``function``; a copy of it, or an unpickled one, does nothing."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        if is_dynamo_compiling():  # asked first, because a function that is hidden takes ten times as long
            return self._hidden(*args)
        return None if self.function is None else self.function(*args)

    @torch._disable_dynamo
    def _hidden(self, *args: Any) -> Any:
        return None if self.function is None else self.function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` as long as its object lives, then nothing."""
    # Not ``weakref.WeakMethod``, which is a call of Python's in each of these.
    reference, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else function(alive, *args)

    return call
