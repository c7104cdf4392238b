"""Hooks that a copy or a pickle of their module does not inherit, and that do not keep their owner alive.

``copy.deepcopy(model.module)``, for example for averaged weights, copies hooks too, and the backward of the
copy would send gradients of the original. A module with a closure as a hook cannot be pickled.
``torch.compile`` does not trace these hooks: they use threads and other ranks. It breaks its graph there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

FULL_GRAPH = (
    "instep exchanges with other ranks there, which no graph can have: leave out fullgraph=True, or put "
    "torch.compile(block) in the place of each block before the model is wrapped"
)


def untraced(function: Callable[..., Any], *, recursive: bool = True) -> Callable[..., Any]:
    """``function``, which breaks a graph of ``torch.compile``, or refuses one without breaks in words.

    Unless ``recursive``, what it calls is compiled.
    """
    call = torch._disable_dynamo(function, recursive)
    call.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=FULL_GRAPH)
    return call


class Hook:
    """Calls ``function``; its copies and pickles do nothing."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        if is_dynamo_compiling():  # checked first: an untraced call takes ten times as long
            return self._untraced(*args)
        return None if self.function is None else self.function(*args)

    @untraced
    def _untraced(self, *args: Any) -> Any:
        return None if self.function is None else self.function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls ``method`` while its object is alive; afterwards returns None."""
    # Unlike ``weakref.WeakMethod`` without a Python call to dereference.
    reference, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else function(alive, *args)

    return call
