"""Transforms of ``torch.func``: inside of them weights neither come nor go.

What is made inside of ``grad``, ``vjp``, ``jacrev``, ``jvp`` or ``functionalize`` belongs to the transform: a
tensor around another one, which no parameter can show and no unit can free. So a module may be called there
whose weights are whole already, and no other. ``vmap`` alone leaves alone what has nothing to do with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_functorch: Any = torch._C._functorch
VMAP = _functorch.TransformType.Vmap


def is_inside() -> bool:
    """Whether a transform runs this code that would wrap new tensors; in some 100 ns."""
    levels = _functorch.get_interpreter_stack()
    return levels is not None and any(level.key() != VMAP for level in levels)


def require_outside(unit: str, names: Sequence[str]) -> None:
    """Raise ``RuntimeError`` if the weights of a unit, called ``names``, would come or go in a transform."""
    if is_inside():
        raise RuntimeError(
            f"weights of unit {unit!r} ({', '.join(names)}) were needed inside of a transform of torch.func "
            "(grad, vjp, jacrev, jvp), where they cannot be gathered: use stage=2 without compute_dtype; or "
            "use the transform in the forward of one module that has all weights it needs and is one unit "
            "(units=[...]), with reshard_after_forward=False"
        )
