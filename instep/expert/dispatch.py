"""From tokens to the rows of experts' blocks, and back: each is the backward of the other.

    tokens (N, D) --to_rows--> rows (rows of this rank, D) --experts--> rows --from_rows--> tokens (N, D)

The ranks along ep compute the same micro-batch, so each has all tokens: ``to_rows`` copies the tokens of this
rank's experts and sends nothing. ``from_rows`` sends each result to the rank that has the token's slice. This
rank adds the K results of a token in the order of its slots and sends the sums to all ranks:

    all-to-all     results, from the expert's rank to the slice's      each rank sends K N D (R - 1) / R**2
    local          slot 0 + slot 1 + ... + slot K-1, no atomic adds
    all-gather     slices                                              each rank sends N D (R - 1) / R

A single rank makes the same additions. A pair that an expert drops adds zero.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from instep.events import EXPERT_DISPATCH
from instep.expert.routes import Routes
from instep.memory import as_bytes
from instep.net.process_group import Group

COMBINE = "the exchange of expert outputs"


def to_rows(x: Tensor, routes: Routes, slots: int) -> Tensor:
    """The rows of this rank's blocks (rows, D), zeros where no pair is, from ``x`` (pairs / slots, D).

    ``slots`` is K for tokens; 1 for values of each pair.
    """
    rows: Tensor = _ToRows.apply(x, routes, slots)
    return rows


def from_rows(rows: Tensor, routes: Routes, slots: int) -> Tensor:
    """The sum of each token's ``slots`` results, (pairs / slots, D), on all ranks along ep. Collective."""
    x: Tensor = _FromRows.apply(rows, routes, slots)
    return x


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes, slots: int) -> Tensor:
        ctx.routes, ctx.slots = routes, slots
        rows = x.new_zeros(routes.num_rows, x.shape[1])
        rows[routes.rows] = x[routes.pairs // slots]
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return from_rows(gradient, ctx.routes, ctx.slots), None, None


class _FromRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes, slots: int) -> Tensor:
        ctx.routes, ctx.slots = routes, slots
        own = rows[routes.rows]  # by pair, so by the slice that it goes to
        if routes.mesh is None:
            return _sum_slots(own, routes, slots)
        group = routes.mesh.along["ep"].group
        num_bytes = own.nbytes * (group.size - 1) // group.size
        with routes.mesh.recorder.span(EXPERT_DISPATCH, lane="host", num_bytes=num_bytes):
            sums = _sum_slots(_all_to_all(own, routes, group), routes, slots)
            return _all_gather(sums, group)[: routes.num_pairs // slots]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return to_rows(gradient, ctx.routes, ctx.slots), None, None


def _all_to_all(own: Tensor, routes: Routes, group: Group) -> Tensor:
    """The results of this rank's slice, in the order of ``routes.returned``."""
    received = own.new_empty(len(routes.returned), own.shape[1])
    width = own.shape[1] * own.itemsize
    sends, receives = ([count * width for count in counts] for counts in (routes.sends, routes.receives))
    group.all_to_all(as_bytes(received), as_bytes(own), receives, sends, COMBINE)
    return received


def _sum_slots(results: Tensor, routes: Routes, slots: int) -> Tensor:
    """The sums of this rank's slice (pairs of a slice / slots, D), with zeros past the last token."""
    by_pair = results.new_zeros(routes.slice_pairs, results.shape[1])
    by_pair[routes.returned - routes.rank * routes.slice_pairs] = results
    first, *others = by_pair.view(-1, slots, results.shape[1]).unbind(1)
    for other in others:
        first = first + other
    return first


def _all_gather(own: Tensor, group: Group) -> Tensor:
    """The slices of all ranks."""
    whole = own.new_empty(group.size * own.shape[0], own.shape[1])
    group.all_gather(as_bytes(whole), as_bytes(own), COMBINE)
    return whole
