"""What each layer costs, measured: they run one after the other, forward and backward, and leave no trace.

A layer's backward begins at ones in the place of the gradients that would come, and gradients are handed to
nobody: ``.grad`` is not touched. Buffers and random generators are afterwards as they were before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.mesh.device import generators, synchronize
from instep.ordered.generators import generators_of, global_generators, state_of
from instep.pipeline.cuts import LayerCost
from instep.pipeline.layers import Layer
from instep.pipeline.stage import is_differentiable
from instep.shard.saved_memory import saved_beside

REPETITIONS = 5


class Ran(NamedTuple):
    """What one run of a layer has taken; what it gave is ``outputs``."""

    forward_s: float
    backward_s: float
    saved_bytes: int
    outputs: tuple[Any, ...]


def measure(
    model: nn.Module,
    layers: Sequence[Layer],
    example: Any,
    loss: Callable[[Any], Tensor] | None = None,
    repetitions: int = REPETITIONS,
) -> list[LayerCost]:
    """The costs of ``layers``, of ``model``, whose first one is called with ``example``.

    A tuple is several arguments. ``loss`` of what the last layer gives counts as a part of that. Times are
    medians of ``repetitions``, after one in which memory is counted.
    """
    first = example if isinstance(example, tuple) else (example,)
    with _untouched(model), torch.enable_grad():
        counted = [*_run(layers, first, loss, is_counted=True)]
        timed = [[*_run(layers, first, loss)] for _ in range(repetitions)]
    seen: set[int] = set()
    found = []
    for layer, ran, times in zip(layers, counted, zip(*timed, strict=True), strict=True):
        weights = list(layer.module.parameters())
        trained = sum(p.nbytes for p in weights if p.requires_grad and id(p) not in seen)
        seen.update(map(id, weights))
        found.append(
            LayerCost(
                median(one.forward_s for one in times),
                median(one.backward_s for one in times),
                sum(x.nbytes for x in (*weights, *layer.module.buffers())),
                trained,
                ran.saved_bytes,
                sum(x.nbytes for x in ran.outputs if isinstance(x, Tensor)),
            )
        )
    return found


def _run(
    layers: Sequence[Layer],
    values: tuple[Any, ...],
    loss: Callable[[Any], Tensor] | None,
    *,
    is_counted: bool = False,
) -> Iterator[Ran]:
    """Each layer once, with what the one before has given."""
    last = len(layers) - 1
    for number, layer in enumerate(layers):
        ran = _run_layer(
            layer, values, loss if number == last else None, is_first=number == 0, is_counted=is_counted
        )
        yield ran
        values = ran.outputs


def _run_layer(
    layer: Layer,
    values: tuple[Any, ...],
    loss: Callable[[Any], Tensor] | None,
    *,
    is_first: bool,
    is_counted: bool,
) -> Ran:
    leaves = [x.detach() if isinstance(x, Tensor) else x for x in values]
    inputs = [] if is_first else [x.requires_grad_() for x in leaves if is_differentiable(x)]
    # A layer may change its inputs in place, as long as they are no leaves.
    given = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
    weights = [p for p in layer.module.parameters() if p.requires_grad]
    device = next((x.device for x in (*weights, *given) if isinstance(x, Tensor)), torch.device("cpu"))
    saved = saved_beside(layer.module, [x for x in given if isinstance(x, Tensor)])
    begun = _now_s(device)
    with saved.watch() if is_counted else nullcontext():
        found = layer.call(*given)
        if loss is not None:
            found = loss(found)
    between = _now_s(device)
    outputs = found if isinstance(found, tuple) else (found,)
    roots = [x for x in outputs if is_differentiable(x) and x.requires_grad]
    own = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in roots if saved.keeps(x)}
    saved_bytes = saved.nbytes - sum(own.values())
    ones, wanted = [torch.ones_like(x) for x in roots], [*inputs, *weights]
    ready = _now_s(device)
    if roots and wanted:
        with torch.autocast(device.type, enabled=False):
            torch.autograd.grad(roots, wanted, ones, allow_unused=True)
    ended = _now_s(device)
    # What goes on has no history.
    plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in outputs)
    return Ran(between - begun, ended - ready, saved_bytes, plain)


def _now_s(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Whatever forwards of ``model`` draw and write inside, generators and buffers are as before."""
    devices = {x.device for x in chain(model.parameters(), model.buffers())}
    own = {id(g): g for device in devices for g in generators(device)}.values()
    states: list[tuple[Any, Any]] = [(g.set_state, state_of(g)) for g in own]
    states += [(g.restore, g.save()) for g in (*global_generators(), *generators_of(model))]
    buffers = [
        (module, key, x, None if x is None else x.clone())
        for module in model.modules()
        for key, x in module._buffers.items()
    ]
    try:
        yield
    finally:
        for restore, state in states:
            restore(state)
        with torch.no_grad():
            for module, key, x, values in buffers:
                module._buffers[key] = x
                if x is not None and values is not None:
                    x.copy_(values)
