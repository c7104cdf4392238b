"""The layers of a model, and those of one stage as a module, under the names that they have in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from instep.rng.keys import is_block

Place: TypeAlias = tuple[dict[str, Any], str, Any, nn.Parameter]
"""A module's parameters, the name of one, itself, and what is used in its place."""


class Layer(NamedTuple):
    """One layer: its ``path`` in the model, and what forward ``call``s, which may be a checkpoint of it."""

    path: str
    module: nn.Module
    call: Callable[..., Any]


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of ``model``, whose forward calls one after the other.

    Raises:
        TypeError: ``model`` does not say which they are.
        ValueError: a parameter or a buffer is of no layer, so that no stage would have it.
    """
    if callable(named := getattr(model, "pipeline_layers", None)):
        pairs = list(named())
        if others := [x for x in pairs if not (isinstance(x, tuple) and len(x) == 2)]:
            raise TypeError(
                f"pipeline_layers() of {type(model).__name__}: expected pairs of a path, such as "
                f"'blocks.0', and what forward calls there, got {type(others[0]).__name__}: return "
                "[(path, module), ...]"
            )
        found = [Layer(path, model.get_submodule(path), call) for path, call in pairs]
    elif isinstance(model, nn.Sequential | nn.ModuleList):
        # Not named_children(), which passes over a module that is there again, as an activation may be.
        children = ((path, layer) for path, layer in model._modules.items() if layer is not None)
        found = [Layer(path, layer, layer) for path, layer in children]
    else:
        raise TypeError(
            f"{type(model).__name__} does not say which layers a pipeline may cut between: pass an "
            "nn.Sequential or a list of modules, or give it a method pipeline_layers(), which returns "
            "(path, callable) of each layer in the order of forward"
        )
    inside = {id(x) for layer in found for x in (*layer.module.parameters(), *layer.module.buffers())}
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if id(x) not in inside:
            raise ValueError(
                f"{name!r} is in no layer of the pipeline, so that no stage would have it: make what uses it "
                "a layer, or a part of one"
            )
    return found


def numbered_blocks(model: nn.Module, layers: Sequence[Layer]) -> dict[nn.Module, int]:
    """The blocks of random numbers, with the numbers that they are keyed by: the same for any cut.

    Those that the model declares (``rng_block = True``) have the numbers that they have without a pipeline. A
    layer that is none is one here, also if it has some: else what it draws outside of them would depend on
    the layers before it.
    """
    declared = list(filter(is_block, model.modules()))
    others = [layer.module for layer in layers if not is_block(layer.module)]
    return {block: number for number, block in enumerate([*declared, *others], start=1)}


class Layers(nn.Module):
    """``layers``, one after the other: a layer that returns a tuple gives the next one so many arguments."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self._layers = tuple(layers)
        for layer in layers:
            *outer, last = layer.path.split(".")
            at: nn.Module = self
            for part in outer:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.add_module(last, layer.module)

    def forward(self, *values: Any) -> Any:
        found: Any = values
        for layer in self._layers:
            found = layer.call(*found) if isinstance(found, tuple) else layer.call(found)
        return found

    def places(self, instead: Mapping[int, nn.Parameter]) -> list[Place]:
        """Where parameters stand that have others ``instead``, by their identity."""
        return [
            (kept, key, p, instead[id(p)])
            for kept in (module._parameters for module in self.modules())
            for key, p in kept.items()
            if id(p) in instead
        ]


@contextmanager
def replaced(places: Sequence[Place]) -> Iterator[None]:
    """Inside, layers use the others."""
    for kept, key, _, other in places:
        kept[key] = other
    try:
        yield
    finally:
        for kept, key, own, _ in places:
            kept[key] = own
