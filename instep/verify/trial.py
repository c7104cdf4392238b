"""One step on the user's own model and batch, whose gradient is compared with that of one process.

    rank 0    forward, backward, exchange -> d0     l0 = backward of batch 0 ... lW-1     r = mean(l)
    rank 1    forward, backward, exchange -> d1                                           compare with r
                                                    \\___ rank 0 alone, no exchange ___/

The reference is made by rank 0 from all the batches with the bare module, one after the other, each from the
same buffers and with the same random numbers as on the rank whose batch it is. It is the sum of the ranks'
gradients in rank order, in float64, divided by W. It then goes to all ranks, so that whatever each has of the
gradient is looked at, all of it or its slice, and only figures come back. Afterwards nothing is different
from before: model, gradients, random numbers and the wrapper's own state are put back.

W: number of ranks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from instep.errors import InstepError
from instep.memory import as_bytes
from instep.mesh.join import find_ranks
from instep.mesh.mesh import Mesh
from instep.net.agree import all_or_none
from instep.net.device import generators
from instep.net.process_group import Group
from instep.rng.generators import seed_generator, state_of
from instep.rng.keys import derive
from instep.state.hash import tensor_digest
from instep.step import optimizer_guard
from instep.step.reduction import StepPlan
from instep.verify.comparison import GradientComparison, Mean, Ours, norm, wide
from instep.verify.gradient_report import Report, make_report
from instep.verify.subject import Loss, Subject, Value, loss_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


T = TypeVar("T")


def verify(
    subject: Subject,
    process_group: Mesh | DeviceMesh | ProcessGroup | None,
    batch: Any,
    loss: Loss | None,
    rtol: float | None,
) -> Report:
    """Try ``subject``, over the ranks that it was given as ``process_group``. Collective.

    Raises:
        ValueError, TypeError, InstepError: on all ranks, if one of them raises in its part; it is named.
        PeerLost: a rank did not come.
    """
    backward = subject.backward
    if backward.declared.micro_batch is not None:
        raise ValueError("verify() inside micro_batches(): call it between two steps")
    backward.look_back()
    group, _ = find_ranks(process_group, backward.reducer.group.timeout_s, what="verify()")
    try:
        return Trial(subject, group, loss=loss, rtol=rtol).run(batch)
    finally:
        group.close()


class Trial:
    """One call of ``verify``; ``group`` is for it alone, over the ranks of the subject's reducer."""

    def __init__(self, subject: Subject, group: Group, *, loss: Loss | None, rtol: float | None) -> None:
        self.subject = subject
        self.backward = subject.backward
        self.module = self.backward.module
        self.reducer = self.backward.reducer
        self.parameters = self.reducer.parameters
        self.group = group
        self.loss = loss
        self.rtol = rtol
        self.comparison = GradientComparison(
            group,
            subject.copy,
            self.reducer.names,
            self.parameters,
            rtol,
            self.reducer.options.nodes.tolerance,
        )
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.generators = generators(self.device)

    def run(self, batch: Any) -> Report:
        """Compare; every rank returns the same report. Collective."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.subject.apart())
            state = stack.enter_context(RestoreOnExit(self.subject, self.generators))
            packed = self._agreed("preparing the batch", lambda: self._prepared(batch))
            odd = differing_values(self.subject.values, self.group)
            buffers = [Value(name, 0, x) for name, x in self.module.named_buffers()]
            odd_buffers = differing_values(buffers, self.group)
            ours = self._distributed(unpack(*packed, self.device), state)
            means = self._reference(gather(*packed, self.group), ours, state)
            references, copies = self.comparison.of(ours, means)
        return make_report(
            references,
            copies,
            self.group.size,
            strategy=self.subject.strategy,
            ordered=self.reducer.options.ordered,
            differing=odd,
            differing_buffers=odd_buffers,
        )

    def _agreed(self, operation: str, function: Callable[[], T]) -> T:
        """``function()`` of this rank, once it has worked on all. Collective."""
        errors = (ValueError, TypeError, InstepError)
        return all_or_none(self.group, f"the outcome of {operation}", function, errors=errors)

    def _prepared(self, batch: Any) -> tuple[str, Tensor]:
        if self.rtol is not None and not self.rtol > 0:
            raise ValueError(f"rtol: expected a positive number, got {self.rtol!r}")
        for name, module in self.module.named_modules():
            if isinstance(module, nn.SyncBatchNorm) and module.training and self.group.size > 1:
                raise ValueError(
                    f"{name!r} is a SyncBatchNorm, which mixes the batches of all ranks: one process cannot "
                    "recompute a rank's gradient. Put it into eval() mode, or use GroupNorm or LayerNorm"
                )
        return pack(batch)

    def _distributed(self, batch: Any, state: RestoreOnExit) -> Ours:
        """The gradients of one synchronised step, or pieces of them, as this rank has them."""
        state.begin()
        self.backward.sync = True
        model, rank = self.subject.model, self.group.global_rank
        loss = self._agreed("forward", lambda: self._forward(model, batch, rank))
        self._agreed("backward", lambda: self._backward(loss))
        return [(piece, piece.gradient()) for piece in self.subject.pieces]

    def _backward(self, loss: Tensor) -> None:
        """``loss.backward()``; an error reaches the ranks that wait for this one's gradients too."""
        reducer, before = self.reducer, self.reducer.exchanges
        try:
            loss.backward()
            if reducer.exchanges == before:
                raise ValueError(
                    "backward brought no gradient to any parameter of the wrapped module: compute the loss "
                    "from its output"
                )
        except BaseException:
            if reducer.exchanges == before and reducer.plan is None:
                size = reducer.group.size
                reducer.begin(StepPlan(False, size, [[r] for r in range(size)]))
            reducer.leave()
            raise

    def _reference(self, batches: list[tuple[str, Tensor]], ours: Ours, state: RestoreOnExit) -> list[Mean]:
        """The mean over the ranks, on rank 0. Collective."""
        self.backward.sync = False
        means = [Mean() for _ in self.parameters]

        def add(place: int) -> None:
            gradients = self._rank_gradients(*batches[place], self.group.ranks[place], state)
            for mean, gradient in zip(means, gradients, strict=True):
                mean.add(gradient)
            if place == 0:
                self._look_for_own(means, ours)

        for place, rank in enumerate(self.group.ranks):
            # All come here for every part: rank 0 may need longer for all of them than a wait may last.
            what = f"computing the gradient of rank {rank}'s batch again"
            self._agreed(what, partial(add, place) if batches else _no_part)
        for mean in means:
            mean.divide(self.group.size)
        return means

    def _look_for_own(self, means: list[Mean], ours: Ours) -> None:
        """Where has rank 0 ended with the gradient of its own batch, of which ``means`` are made so far?"""
        for piece, mine in ours:
            x = means[piece.position].total
            if x is not None and mine is not None and mine.numel() == x.numel():
                distance = norm(wide(mine) - piece.of(x))
                means[piece.position].own = distance <= self.comparison.tolerance(piece.position) * norm(x)

    def _rank_gradients(
        self, text: str, data: Tensor, rank: int, state: RestoreOnExit
    ) -> list[Tensor | None]:
        """The gradients of ``rank``'s batch alone."""
        state.begin()
        self._forward(self.module, unpack(text, data, self.device), rank).backward()
        return [p.grad for p in self.parameters]

    def _forward(self, model: nn.Module, batch: Any, rank: int) -> Tensor:
        """The loss of ``rank``'s batch with the random numbers of that rank."""
        key = derive(self.subject.seed, "verify", rank)
        for generator in self.generators:
            seed_generator(generator, key)
        return loss_of(model, batch, self.loss)


class RestoreOnExit:
    """A context between two steps; on leaving, all is as it was when it was made: model, gradients, random
    numbers, and what the wrapper counts.

    Values are written back only where bits differ, because a graph that is still to be walked backwards may
    hold them, and would take even the same bits for a change. Gradients that are there stay where they are:
    they are taken off their parameters, and the buckets, which never write over a gradient that is still
    referenced, move to other memory. Of those that lie in slices, whose memory is the wrapper's own
    (``Subject.memory``), there is a copy meanwhile, as of all weights.
    """

    def __init__(self, subject: Subject, generators: list[torch.Generator]) -> None:
        self.backward = subject.backward
        self.module = self.backward.module
        self.reducer = self.backward.reducer
        self._generators = [(generator, state_of(generator)) for generator in generators]
        self._modules = [(m, m.training, dict(m._buffers)) for m in self.module.modules()]
        self._values = _with_copies([*(value.tensor for value in subject.values), *subject.memory])
        self._buffers = _with_copies(self.module.buffers())
        self._gradients = [(p, p.grad) for p in self.module.parameters()]
        self._reduced = [
            (entry, entry.reduced) for entry in optimizer_guard.entries_of(self.reducer.parameters)
        ]
        self._wrapper_state = [
            (x, {name: copy.copy(getattr(x, name)) for name in x.changes})
            for x in (self.reducer, self.backward)
        ]

    def __enter__(self) -> RestoreOnExit:
        self.reducer.disable_reporting()  # the report says it
        return self

    def __exit__(self, *error: Any) -> None:
        self.reducer.lane.drain()  # it may still write to buckets, or tell the others that this rank failed
        self.backward.look_back()
        self.begin()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        _write_back(self._values)
        for generator, state in self._generators:
            generator.set_state(state)
        for module, training, _ in self._modules:
            module.training = training
        for entry, reduced in self._reduced:
            entry.reduced = reduced
        for x, before in self._wrapper_state:
            for name, value in before.items():
                setattr(x, name, value)

    def begin(self) -> None:
        """Buffers as they were, no gradients."""
        for module, _, buffers in self._modules:
            if isinstance(module._buffers, dict):  # a scripted module has those that it has
                module._buffers.clear()  # forward may have put others in their place
            for name, buffer in buffers.items():
                module._buffers[name] = buffer
        _write_back(self._buffers)
        for parameter, _ in self._gradients:
            parameter.grad = None


def _with_copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(x, x.detach().clone()) for x in tensors]


def _write_back(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for x, before in pairs:
            if not torch.equal(as_bytes(x), as_bytes(before)):
                x.copy_(before)


def differing_values(values: Iterable[Value], group: Group) -> list[str]:
    """Those of ``values`` whose bits are others on one rank than on another, in words. Collective.

    Values in slices are compared with the same slice of other replicas, if there are any.
    """
    mine = [(x.name, x.first, tensor_digest(x.tensor).hex()) for x in values]
    everyone = group.all_gather_bytes(json.dumps(mine).encode(), "the comparison of values")
    found: dict[tuple[str, int], dict[int, str]] = {}  # by name and first element: digests by rank
    for rank, data in zip(group.ranks, everyone, strict=True):
        for name, first, digest in json.loads(data):
            found.setdefault((name, first), {})[rank] = digest
    lines = []
    for (name, _), digests in found.items():
        rank, expected = next(iter(digests.items()))
        differ = [other for other, digest in digests.items() if digest != expected]
        if differ:
            ranks = ", ".join(map(str, differ))
            lines.append(f"{name!r} has other values on rank {ranks} than on rank {rank}")
    return lines


def _no_part() -> None:
    """A rank's part where only rank 0 has one."""


# One batch per rank, as bytes: tensors in nested dicts, lists and tuples travel to the group's first rank.
# Structure, dtypes and shapes go as JSON, values as one message of raw bytes; nothing is pickled.

SCALARS = (bool, int, float, str, type(None))
CONTAINERS = {"list": list, "tuple": tuple}


def pack(batch: Any) -> tuple[str, Tensor]:
    """``batch`` as JSON and a uint8 tensor on the CPU with the bytes of its tensors, one after the other.

    Raises:
        TypeError: something in it is neither a tensor, nor a container of them, nor what JSON can carry.
        ValueError: a tensor has no values or is not dense.
    """
    tensors: list[Tensor] = []
    text = json.dumps(_described(batch, "batch", tensors))
    parts = [x.detach().cpu().resolve_conj().resolve_neg() for x in tensors]
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    return text, torch.cat([nothing, *map(as_bytes, parts)])


def unpack(text: str, data: Tensor, device: torch.device) -> Any:
    """The batch that ``pack`` was given; its GPU tensors come to ``device``. Every tensor is a copy."""
    return _built(json.loads(text), _Reader(data), device)


def gather(text: str, data: Tensor, group: Group) -> list[tuple[str, Tensor]]:
    """What every rank has packed, in group order, on the first rank; nothing on the others. Collective."""
    operation = "the gathering of batches"
    lengths = group.all_gather_bytes(str(data.numel()).encode(), operation)
    texts = group.all_gather_bytes(text.encode(), operation)
    splits = [int(length) if group.rank == 0 else 0 for length in lengths]
    received = torch.empty(sum(splits), dtype=torch.uint8, device="cpu")
    group.all_to_all(received, data, splits, [data.numel()] + [0] * (group.size - 1), operation)
    if group.rank != 0:
        return []
    return [(text.decode(), part) for text, part in zip(texts, received.split(splits), strict=True)]


def _described(x: Any, where: str, tensors: list[Tensor]) -> dict[str, Any]:
    if isinstance(x, Tensor):
        if x.layout != torch.strided or x.is_meta or x.is_quantized or x.is_nested:
            raise ValueError(f"{where} is no dense tensor with values: convert it before verify()")
        tensors.append(x)
        dtype = str(x.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(x.shape), x.is_cuda, x.requires_grad and x.is_leaf]}
    if isinstance(x, Mapping):
        if odd := [key for key in x if not isinstance(key, str)]:
            raise TypeError(f"{where} has the key {odd[0]!r}: expected strings as keys")
        return {"dict": {key: _described(x[key], f"{where}[{key!r}]", tensors) for key in x}}
    for name, kind in CONTAINERS.items():
        if type(x) is kind:
            return {name: [_described(part, f"{where}[{i}]", tensors) for i, part in enumerate(x)]}
    if type(x) in SCALARS:
        return {"value": x}
    raise TypeError(
        f"{where} is a {type(x).__name__}: expected a tensor, a number, a string, None, or a dict, list or "
        "tuple of them, because verify() sends it to another process"
    )


class _Reader:
    """Takes tensors off the front of ``data``."""

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self._at = 0

    def next(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        part = self._data[self._at : self._at + nbytes].clone()  # of its own, so aligned for any dtype
        self._at += nbytes
        return part.view(dtype).view(shape)


def _built(entry: dict[str, Any], reader: _Reader, device: torch.device) -> Any:
    ((kind, content),) = entry.items()
    if kind == "value":
        return content
    if kind == "dict":
        return {key: _built(part, reader, device) for key, part in content.items()}
    if kind in CONTAINERS:
        return CONTAINERS[kind](_parts(content, reader, device))
    name, shape, on_gpu, requires_grad = content
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a rank sent a tensor of the unknown dtype {name!r}")
    x = reader.next(dtype, shape)
    return (x.to(device) if on_gpu else x).requires_grad_(requires_grad)


def _parts(entries: list[dict[str, Any]], reader: _Reader, device: torch.device) -> Iterator[Any]:
    return (_built(entry, reader, device) for entry in entries)
