"""One step on the user's own model and batch, whose gradient is compared with that of one process.

    rank 0    forward, backward, exchange -> d0     l0 = backward of batch 0 ... lW-1     r = mean(l)
    rank 1    forward, backward, exchange -> d1                                           compare with r
                                                    \\___ rank 0 alone, no exchange ___/

The reference is made by rank 0 from all the batches with the bare module, one after the other, each from the
same buffers and with the same random numbers as on the rank whose batch it is. It is the sum of the ranks'
gradients in rank order, in float64, divided by W. It then goes to all ranks, so that whatever each has of the
gradient is looked at, all of it or its slice, and only figures come back. Afterwards nothing is different
from before.

W: number of ranks.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from instep.mesh.device import generators
from instep.mesh.find import find_ranks
from instep.mesh.group import Group
from instep.mesh.mesh import Mesh
from instep.ordered.buckets import wire_dtype
from instep.ordered.keys import derive, seed_generator
from instep.step.reduction import Plan
from instep.verify.batches import gather, pack, unpack
from instep.verify.differing import differing
from instep.verify.loss import Loss, loss_of
from instep.verify.outcome import agreed
from instep.verify.report import Figures, Reference, Report, joined, make_report
from instep.verify.subject import Piece, Subject, Value
from instep.verify.untouched import Untouched

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Relative to the norm of a gradient: what other kernels, threads or orders of sums may make of it.
TOLERANCES = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TOLERANCE = 1e-5  # of float32

Ours = list[tuple[Piece, Tensor | None]]
"""What this rank has of the gradient after the exchange."""


def verify(
    subject: Subject,
    process_group: Mesh | ProcessGroup | None,
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
    if backward.declared.leaf is not None:
        raise ValueError("verify() inside micro_batches(): call it between two steps")
    backward.look_back()
    group, _ = find_ranks(process_group, backward.reducer.group.timeout_s, what="verify()")
    try:
        return Trial(subject, group, loss=loss, rtol=rtol).run(batch)
    finally:
        group.close()


@dataclass
class Mean:
    """One parameter's gradient in one process, as far as it has been computed; on rank 0."""

    total: Tensor | None = None
    leaf_norm: float = 0.0
    own: bool = False


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
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.generators = generators(self.device)

    def run(self, batch: Any) -> Report:
        """Compare; every rank returns the same report. Collective."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.subject.apart())
            state = stack.enter_context(Untouched(self.subject, self.generators))
            packed = agreed(self.group, "preparing the batch", lambda: self._prepared(batch))
            odd = differing(self.subject.values, self.group)
            buffers = [Value(name, 0, x) for name, x in self.module.named_buffers()]
            odd_buffers = differing(buffers, self.group)
            ours = self._distributed(unpack(*packed, self.device), state)
            means, references = self._reference(gather(*packed, self.group), ours, state)
            copies = self._compared(ours, means, references)
        return make_report(
            references,
            copies,
            self.group.size,
            strategy=self.subject.strategy,
            ordered=self.reducer.options.ordered,
            differing=odd,
            differing_buffers=odd_buffers,
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

    def _distributed(self, batch: Any, state: Untouched) -> Ours:
        """The gradients of one synchronised step, or pieces of them, as this rank has them."""
        state.begin()
        self.backward.sync = True
        model, rank = self.subject.model, self.group.global_rank
        loss = agreed(self.group, "forward", lambda: self._forward(model, batch, rank))
        agreed(self.group, "backward", lambda: self._backward(loss))
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
                reducer.begin(Plan(False, size, [[r] for r in range(size)]), lambda: 1)
            reducer.leave()
            raise

    def _reference(
        self, batches: list[tuple[str, Tensor]], ours: Ours, state: Untouched
    ) -> tuple[list[Mean], list[Reference]]:
        """The mean over the ranks, on rank 0, and what all ranks are told of it. Collective."""
        self.backward.sync = False
        means = [Mean() for _ in self.parameters]

        def add(place: int) -> None:
            leaf = self._leaf(*batches[place], self.group.ranks[place], state)
            for mean, gradient in zip(means, leaf, strict=True):
                if gradient is not None:
                    x = _wide(gradient)
                    mean.leaf_norm += _norm(x) / self.group.size
                    mean.total = x if mean.total is None else mean.total.add_(x)
            if place == 0:
                self._look_for_own(means, ours)

        for place, rank in enumerate(self.group.ranks):
            # All come here for every part: rank 0 may need longer for all of them than a wait may last.
            what = f"computing the gradient of rank {rank}'s batch again"
            agreed(self.group, what, partial(add, place) if batches else _nothing)
        for mean in means:
            if mean.total is not None:
                mean.total.div_(self.group.size)
        told = [asdict(self._described(i, mean)) for i, mean in enumerate(means) if batches]
        text = self.group.all_gather_bytes(json.dumps(told).encode(), "the figures of the reference")[0]
        return means, [Reference(**fields) for fields in json.loads(text)]

    def _look_for_own(self, means: list[Mean], ours: Ours) -> None:
        """Where has rank 0 ended with the gradient of its own batch, of which ``means`` are made so far?"""
        for piece, mine in ours:
            x = means[piece.position].total
            if x is not None and mine is not None and mine.numel() == x.numel():
                distance = _norm(_wide(mine) - piece.of(x))
                means[piece.position].own = distance <= self._tolerance(piece.position) * _norm(x)

    def _leaf(self, text: str, data: Tensor, rank: int, state: Untouched) -> list[Tensor | None]:
        state.begin()
        self._forward(self.module, unpack(text, data, self.device), rank).backward()
        return [p.grad for p in self.parameters]

    def _described(self, i: int, mean: Mean) -> Reference:
        return Reference(
            self.reducer.names[i],
            mean.total is not None,
            0.0 if mean.total is None else _norm(mean.total),
            mean.leaf_norm,
            self._tolerance(i),
            torch.finfo(wire_dtype(self.parameters[i].dtype)).eps,
            mean.own,
        )

    def _tolerance(self, i: int) -> float:
        return TOLERANCES.get(self.parameters[i].dtype, TOLERANCE) if self.rtol is None else self.rtol

    def _compared(self, ours: Ours, means: list[Mean], references: list[Reference]) -> list[list[Figures]]:
        """Figures by copy of the gradient, and parameter; rank 0's reference goes to all. Collective."""
        mine: dict[int, Figures] = {}
        pieces = {piece.position: (piece, gradient) for piece, gradient in ours}
        for i, (mean, reference) in enumerate(zip(means, references, strict=True)):
            expected = self._told(i, mean, reference)  # one parameter at a time
            if i in pieces:
                mine[i] = self._figures(*pieces[i], expected)
        said = json.dumps([self.subject.copy, {i: asdict(found) for i, found in mine.items()}])
        everyone = self.group.all_gather_bytes(said.encode(), "the figures of all ranks")
        copies: dict[int, list[dict[str, Any]]] = {}
        for text in everyone:
            number, figures = json.loads(text)
            copies.setdefault(number, []).append(figures)
        return [
            [
                joined([Figures(**figures[str(i)]) for figures in parts if str(i) in figures])
                for i in range(len(references))
            ]
            for _, parts in sorted(copies.items())
        ]

    def _told(self, i: int, mean: Mean, reference: Reference) -> Tensor:
        """The reference of parameter i, which rank 0 has in ``mean``. Collective."""
        parameter = self.parameters[i]
        if mean.total is None:
            dtype = _wide_dtype(parameter)
            expected = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        else:
            expected = mean.total
        if reference.present and expected.numel():
            operation = f"the broadcast of the reference of {reference.name!r}"
            self.group.broadcast(expected.reshape(-1).view(torch.uint8), operation)
        return expected

    def _figures(self, piece: Piece, mine: Tensor | None, expected: Tensor) -> Figures:
        r = piece.of(expected)
        d = torch.zeros_like(r) if mine is None else _wide(mine)
        product = torch.vdot(d.reshape(-1), r.reshape(-1)).real.item()
        return Figures(self.group.global_rank, mine is not None, _norm(d - r), _norm(d), product)

    def _forward(self, model: nn.Module, batch: Any, rank: int) -> Tensor:
        """The loss of ``rank``'s batch with the random numbers of that rank."""
        key = derive(self.subject.seed, "verify", rank)
        for generator in self.generators:
            seed_generator(generator, key)
        return loss_of(model, batch, self.loss)


def _nothing() -> None:
    """A rank's part where only rank 0 has one."""


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _wide(x: Tensor) -> Tensor:
    """``x`` as a dense copy in double precision."""
    x = x.detach()
    return (x.to_dense() if x.is_sparse else x).to(_wide_dtype(x), copy=True).contiguous()


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))
