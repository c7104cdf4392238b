"""Weights that a module uses and does not register: in a plain list, in a closure, in a layer in a dict.

No wrapper has a hook on them. In a declared step their gradients are the plain sum over this rank's
micro-batches, beside the mean over all of them that the others are. A teacher that is kept in a list to be no
part of the module may have such gradients, which no optimizer uses; stepped, it would drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor, nn

from instep.rng.attributes import at_hand, own_attributes
from instep.step.optimizer_guard import owners_of, refuse

DEPTH = 4  # containers within containers that are looked into
WIDTH = 1000  # so many things of each, because a container may be a data set


class UnregisteredWeights:
    """The trainable tensors that ``module`` holds beside its parameters, which no optimizer may step.

    At construction they are looked for, in the attributes of all submodules: containers, closures, bound
    methods, partial functions. A step: ``begin``, then ``end``.
    """

    def __init__(self, module: nn.Module) -> None:
        found = {id(x): None for x in [*module.parameters(), *module.modules()]}
        self._weights: list[tuple[str, Tensor]] = []
        for prefix, key, value in own_attributes(module.named_modules()):
            name = f"{prefix}.{key}".lstrip(".")
            self._weights += [(name, x) for x in _trainable(value, found, DEPTH)]

    @property
    def weights(self) -> list[Tensor]:
        return [x for _, x in self._weights]

    def begin(self) -> None:
        """A declared step begins."""
        self._before = [(x.grad, -1 if x.grad is None else x.grad._version) for _, x in self._weights]

    def end(self) -> None:
        """The step ends: no optimizer may use the gradients that weights have got since ``begin``."""
        for (name, x), (gradient, version) in zip(self._weights, self._before, strict=True):
            if x.grad is None or (x.grad is gradient and x.grad._version == version):
                continue
            if not any(entry.is_alive for entry in owners_of([x])):  # no other wrapper reduces it
                refuse(
                    x,
                    f"{name!r} holds a trainable tensor of shape {tuple(x.shape)} that is no parameter of "
                    "the module, and a declared step has given it a gradient, neither averaged nor "
                    "exchanged: register it (nn.Parameter, nn.ParameterList, nn.ModuleList) before "
                    "wrapping, or leave it out of the optimizer",
                )


def _trainable(value: Any, seen: dict[int, Any], depth: int) -> Iterator[Tensor]:
    """Leaves of autograd in ``value`` that are not in ``seen``, which they join."""
    if id(value) in seen or isinstance(value, str | bytes | int | float | None):
        return
    seen[id(value)] = value  # kept, so that no new object can have its id
    if isinstance(value, Tensor):
        if value.is_leaf and value.requires_grad:
            yield value
    elif depth:
        for part in _parts(value):
            yield from _trainable(part, seen, depth - 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        return list(value.parameters())
    if isinstance(value, list | tuple | set):
        return list(islice(value, WIDTH))
    if isinstance(value, dict):
        return list(islice(value.values(), WIDTH))
    return at_hand(value)
