"""What modules keep beside what every module has: numbers, containers, generators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # parameters, hooks; ``training`` is the user's to set


def own_attributes(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Of ``module`` and all modules in it: the name of the module, of the attribute, and its value."""
    for prefix, owner in module.named_modules():
        for key, value in vars(owner).items():
            if key not in OF_EVERY_MODULE:
                yield prefix, key, value
