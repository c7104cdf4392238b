"""What each layer costs, measured: they run one after the other, forward and backward, and leave no trace.

A layer's backward begins at ones in the place of the gradients that would come, and gradients are handed to
nobody: ``.grad`` is not touched. Buffers and random generators are afterwards as they were before.

A layer on the meta device has made-up values for as long as it runs, and no other one has any.

One rank measures, and the others believe it: they all have to cut alike.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.bench.saved_bytes import saved_beside
from instep.events import Event
from instep.net.agree import all_or_none, all_tell, on_first_rank
from instep.net.device import generators, synchronize
from instep.net.process_group import Group
from instep.pipeline.actions import Schedule
from instep.pipeline.cuts import LAYERS, LayerCost, edges_of, require_known
from instep.pipeline.layers import Layer
from instep.pipeline.proposal import CutProposal, RankTimes, propose, rank_times
from instep.pipeline.stage import is_differentiable
from instep.rng.generators import generators_of, global_generators, state_of

REPETITIONS = 5


class Cutter:
    """Says where a pipeline is cut, as its user has asked.

    When the pipeline takes part in a mesh, ``edges``; the first time layers are measured, where there is an
    ``example``, and from then on their ``costs`` are known. After some steps, ``propose``.
    """

    def __init__(
        self,
        cuts: str | Sequence[int],
        example: Any,
        loss: Callable[[Any], Tensor] | None,
        moments: int,
    ) -> None:
        require_known(cuts, is_measured=example is not None)
        self.cuts = cuts if isinstance(cuts, str) else list(cuts)
        self.example, self.loss, self.moments = example, loss, moments
        self.costs: list[LayerCost] = []

    def described(self) -> dict[str, object]:
        """What has to be the same on all ranks."""
        return {"cuts": self.cuts, "has an example": self.example is not None, "moments": self.moments}

    def edges(
        self, model: nn.Module, layers: Sequence[Layer], schedule: Schedule, group: Group, *, is_whole: bool
    ) -> list[int]:
        """Those of ``layers``, of ``model``; ``is_whole``: no other rank is there yet. Collective.

        The first rank has to have the whole model when it is asked first.

        Raises:
            ValueError: on all ranks; there are no such cuts, or what a layer raises.
        """
        if self.example is not None:
            measured = partial(measure, model, layers, self.example, self.loss)
            told = on_first_rank(group, "the costs of layers", lambda: self.costs or measured())
            self.costs = [one._replace(shared=tuple(one.shared)) for one in (LayerCost(*x) for x in told)]
        cuts = LAYERS if is_whole else self.cuts
        find = partial(edges_of, cuts, len(layers), schedule, self.costs, self.moments)
        return all_or_none(group, "the cut of pipelines", find, errors=(ValueError,))

    def propose(
        self,
        edges: Sequence[int],
        schedule_of: Callable[[int], Schedule],
        events: Iterable[Event],
        group: Group,
        place: int,
    ) -> CutProposal:
        """What is better than ``edges``, by the ``events`` of all ranks' last steps. Collective.

        This one is at ``place`` along pp, and ``schedule_of`` a number of micro-batches is what they do.
        """

        def look() -> RankTimes:
            if not self.costs:
                raise ValueError(
                    "propose_cuts(): the layers of this pipeline have not been measured: make it with "
                    "example=, what the first one is called with for one micro-batch"
                )
            return rank_times(events, group.global_rank, place)

        _, told = all_tell(group, "the proposal of cuts", look, lambda own: json.dumps(own).encode())
        taken = [RankTimes(*json.loads(one)) for one in told]
        schedule = schedule_of(max(one.num_micro_batches for one in taken))
        return propose(self.costs, edges, schedule, taken)


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
    users = Counter(id(p) for layer in layers for p in layer.module.parameters())
    numbers = {id(p): i for i, p in enumerate(model.parameters()) if users[id(p)] > 1}
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
                tuple(numbers[id(p)] for p in weights if id(p) in numbers),
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
        here = next((x.device for x in values if isinstance(x, Tensor)), torch.device("cpu"))
        own_loss = loss if number == last else None
        with _filled(layer.module, here):
            ran = _run_layer(layer, values, own_loss, is_first=number == 0, is_counted=is_counted)
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


@contextmanager
def _filled(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, what ``module`` has on the meta device has values, of the size that first values have."""
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (kept, key, x)
        for m in module.modules()
        for kept in (m._parameters, m._buffers)
        for key, x in kept.items()
        if x is not None and x.is_meta
    ]
    generator = torch.Generator(device)
    made: dict[int, Tensor] = {}
    for kept, key, x in places:
        if id(x) not in made:
            values = torch.zeros(x.shape, dtype=x.dtype, device=device)
            if isinstance(x, nn.Parameter):
                bound = x.shape[-1] ** -0.5 if x.ndim > 1 else 1.0
                values.uniform_(-bound, bound, generator=generator)
                values = nn.Parameter(values, x.requires_grad)
            made[id(x)] = values
        kept[key] = made[id(x)]
    try:
        yield
    finally:
        for kept, key, x in places:
            kept[key] = x


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
