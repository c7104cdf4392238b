"""Is the distributed gradient that of one process? Tried on the user's own model, strategy and batch.

    rank 0    forward, backward, exchange -> d0     l0 = backward of batch 0 ... lW-1     r = mean(l)
    rank 1    forward, backward, exchange -> d1                                           compare with r
                                                    \\___ rank 0 alone, no exchange ___/

The reference is made by rank 0 from all the batches with the bare module, one after the other, each from the
same buffers and with the same random numbers as on the rank whose batch it is. It is the sum of the ranks'
gradients in rank order, in float64, divided by W. It then goes to all ranks, so that the gradient of each is
looked at, and only figures come back. Afterwards nothing is different from before.

W: number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from instep.errors import InstepError
from instep.mesh.device import generators
from instep.mesh.group import Group
from instep.ordered.buckets import wire_dtype
from instep.ordered.hash import block_digests
from instep.ordered.keys import derive, seed_generator
from instep.replicate.batches import gather, pack, unpack
from instep.replicate.report import Figures, Reference, Report, make_report
from instep.replicate.untouched import Untouched
from instep.step.backward import Backward
from instep.step.reducer import Plan

Loss = Callable[[nn.Module, Any], Tensor]
"""The loss of a model on a batch: a scalar, the mean over the batch."""
T = TypeVar("T")

# Relative to the norm of a gradient: what other kernels, threads or orders of sums may make of it.
TOLERANCES = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TOLERANCE = 1e-5  # of float32

KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}
FOLLOWING = ("Desync", "PeerLost")  # what the other ranks raise when one has failed
MESSAGE_LIMIT = 4000


class Verification:
    """One call of ``verify``; ``group`` is for it alone, over the ranks of ``backward``'s reducer.

    ``model`` is the wrapper, ``backward.module`` what it wraps.
    """

    def __init__(
        self,
        model: nn.Module,
        backward: Backward,
        group: Group,
        *,
        loss: Loss | None,
        rtol: float | None,
        seed: int,
    ) -> None:
        self.model = model
        self.backward = backward
        self.module = backward.module
        self.reducer = backward.reducer
        self.parameters = self.reducer.parameters
        self.group = group
        self.loss = loss
        self.rtol = rtol
        self.seed = seed
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.generators = generators(self.device)

    def run(self, batch: Any) -> Report:
        """Compare; every rank returns the same report. Collective.

        Raises:
            ValueError, TypeError, InstepError: on all ranks, if one of them raises in its part; it is named.
        """
        packed = agreed(self.group, "preparing the batch", lambda: self._prepared(batch))
        differing = self._differing(self.module.named_parameters())
        differing_buffers = self._differing(self.module.named_buffers())
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            state = stack.enter_context(Untouched(self.backward, self.generators))
            ours = self._distributed(unpack(*packed, self.device), state)
            batches = gather(*packed, self.group)
            totals, references = self._reference(batches, ours, state)
            figures = self._compared(ours, totals, references)
        return make_report(
            references,
            figures,
            self.group.ranks,
            strategy=self.reducer.options.strategy.__name__.lower(),
            ordered=self.reducer.options.ordered,
            differing=differing,
            differing_buffers=differing_buffers,
        )

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

    def _distributed(self, batch: Any, state: Untouched) -> list[Tensor | None]:
        """The gradients of one synchronised step, as this rank has them."""
        state.begin()
        self.backward.sync = True
        loss = agreed(self.group, "forward", lambda: self._forward(self.model, batch, self.group.global_rank))
        agreed(self.group, "backward", lambda: self._backward(loss))
        return [p.grad for p in self.parameters]

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
                reducer.begin(Plan(False, size, [[r] for r in range(size)]), lambda: 1)
            reducer.leave()
            raise

    def _reference(
        self, batches: list[tuple[str, Tensor]], ours: list[Tensor | None], state: Untouched
    ) -> tuple[list[Tensor | None], list[Reference]]:
        """The mean over the ranks, on rank 0, and what all ranks are told of it. Collective."""
        self.backward.sync = False
        totals: list[Tensor | None] = [None] * len(self.parameters)
        leaf_norms, own = [0.0] * len(self.parameters), [False] * len(self.parameters)

        def add(place: int) -> None:
            leaf = self._leaf(*batches[place], self.group.ranks[place], state)
            for i, gradient in enumerate(leaf):
                if gradient is None:
                    continue
                x = _wide(gradient)
                leaf_norms[i] += _norm(x) / self.group.size
                mine = ours[i]
                if place == 0 and mine is not None:
                    own[i] = _norm(_wide(mine) - x) <= self._tolerance(i) * _norm(x)
                total = totals[i]
                totals[i] = x if total is None else total.add_(x)

        for place, rank in enumerate(self.group.ranks):
            # All come here for every part: rank 0 may need longer for all of them than a wait may last.
            what = f"computing the gradient of rank {rank}'s batch again"
            agreed(self.group, what, partial(add, place) if batches else _nothing)
        totals = [None if x is None else x.div_(self.group.size) for x in totals]
        told = [
            asdict(self._described(i, total, leaf_norms[i], own[i]))
            for i, total in enumerate(totals)
            if batches
        ]
        text = self.group.all_gather_bytes(json.dumps(told).encode(), "the figures of the reference")[0]
        return totals, [Reference(**fields) for fields in json.loads(text)]

    def _leaf(self, text: str, data: Tensor, rank: int, state: Untouched) -> list[Tensor | None]:
        state.begin()
        self._forward(self.module, unpack(text, data, self.device), rank).backward()
        return [p.grad for p in self.parameters]

    def _described(self, i: int, total: Tensor | None, leaf_norm: float, own: bool) -> Reference:
        return Reference(
            self.reducer.names[i],
            total is not None,
            0.0 if total is None else _norm(total),
            leaf_norm,
            self._tolerance(i),
            torch.finfo(wire_dtype(self.parameters[i].dtype)).eps,
            own,
        )

    def _tolerance(self, i: int) -> float:
        return TOLERANCES.get(self.parameters[i].dtype, TOLERANCE) if self.rtol is None else self.rtol

    def _compared(
        self, ours: list[Tensor | None], totals: list[Tensor | None], references: list[Reference]
    ) -> list[list[Figures]]:
        """The figures of all ranks; rank 0's ``totals`` go to everybody, one at a time. Collective."""
        figures = []
        for parameter, mine, total, reference in zip(self.parameters, ours, totals, references, strict=True):
            expected = torch.zeros_like(parameter, dtype=_wide_dtype(parameter)) if total is None else total
            expected = expected.detach().contiguous()
            if reference.present and expected.numel():
                operation = f"the broadcast of the reference of {reference.name!r}"
                self.group.broadcast(expected.reshape(-1).view(torch.uint8), operation)
            d = torch.zeros_like(expected) if mine is None else _wide(mine)
            product = torch.vdot(d.reshape(-1), expected.reshape(-1)).real.item()
            figures.append(asdict(Figures(mine is not None, _norm(d - expected), _norm(d), product)))
        everyone = self.group.all_gather_bytes(json.dumps(figures).encode(), "the figures of all ranks")
        return [[Figures(**fields) for fields in json.loads(text)] for text in everyone]

    def _forward(self, model: nn.Module, batch: Any, rank: int) -> Tensor:
        """The loss of ``rank``'s batch with the random numbers of that rank."""
        key = derive(self.seed, "verify", rank)
        for generator in self.generators:
            seed_generator(generator, key)
        value = self.loss(model, batch) if self.loss is not None else _own_loss(_call(model, batch))
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"expected the loss to be a scalar tensor with a gradient, got {kind}: let loss be the mean "
                "over the batch"
            )
        return value

    def _differing(self, named: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Those of ``named`` that do not have the same bits on all ranks, in words. Collective."""
        pairs = list(named)
        mine = b"".join(hashlib.sha256(b"".join(block_digests(x))).digest() for _, x in pairs)
        everyone = self.group.all_gather_bytes(mine, "the comparison of values")
        lines = []
        for i, (name, _) in enumerate(pairs):
            digests = [data[32 * i : 32 * i + 32] for data in everyone]
            odd = [r for r, digest in zip(self.group.ranks, digests, strict=True) if digest != digests[0]]
            if odd:
                lines.append(
                    f"{name!r} has other values on rank {', '.join(map(str, odd))} than on rank "
                    f"{self.group.ranks[0]}"
                )
        return lines


def agreed(group: Group, operation: str, function: Callable[[], T]) -> T:
    """``function()`` of this rank, once it has worked on all. Collective.

    Raises:
        ValueError, TypeError, InstepError: it failed on a rank; that rank raises what it has raised, and the
            others an error that names it.
    """
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:
        failure = error
    text = "" if failure is None else json.dumps([type(failure).__name__, str(failure)[:MESSAGE_LIMIT]])
    said = group.all_gather_bytes(text.encode(), f"the outcome of {operation}")
    failed = {rank: json.loads(data) for rank, data in zip(group.ranks, said, strict=True) if data}
    if not failed:
        return result
    causes = {rank: record for rank, record in failed.items() if record[0] not in FOLLOWING} or failed
    if failure is not None and group.global_rank in causes:
        failure.add_note(f"rank {group.global_rank}, in {operation} of verify()")
        raise failure
    rank, (kind, message) = next(iter(causes.items()))
    raise KINDS.get(kind, InstepError)(f"rank {rank} raised {kind} in {operation}: {message}") from failure


def _nothing() -> None:
    """A rank's part where only rank 0 has one."""


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def _own_loss(output: Any) -> Any:
    """The loss that the model has computed: its output, ``output.loss`` or ``output["loss"]``."""
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(getattr(output, "loss", None), Tensor):
        return output.loss
    kind = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise ValueError(
        "verify() without loss expects model(batch) to be a scalar, or to have one as .loss or ['loss'], "
        f"got {kind}: pass loss=lambda model, batch: ..."
    )


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _wide(x: Tensor) -> Tensor:
    """``x`` as a dense copy in double precision."""
    x = x.detach()
    return (x.to_dense() if x.is_sparse else x).to(_wide_dtype(x), copy=True).contiguous()


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))
