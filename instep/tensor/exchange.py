"""Exchanges inside a layer, between the ranks along ``tp``: sums down the tree, and slices of the sequence.

A sum moves data and adds locally, in the order of the tree (``products.tree_sum``): it has the bits of one
rank. Bytes that a rank receives, t ranks, x of S bytes:

    sum              all-to-all of slices, then an all-gather     2 S (t-1)/t
    sum_slice        all-to-all                                   S (t-1)/t       sequence parallelism:
    gather_slices    all-gather of slices of S/t                  S (t-1)/t       together as much as a sum
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.errors import Desync
from instep.events import TENSOR_PARALLEL
from instep.mesh.axes import round_up
from instep.mesh.mesh import Axis, Mesh
from instep.state.boxes import BoxHome
from instep.state.hash import tensor_digest
from instep.tensor.products import tree_sum

ALIGN_ELEMENTS = 16
SMALL_BYTES = 64 << 10  # up to here one message from each rank is faster than slices


class TensorRanks:
    """The ranks along ``tp`` of the mesh of ``boxes``, which a run may replace."""

    def __init__(self, boxes: BoxHome) -> None:
        self.boxes = boxes
        self.slices: set[tuple[int, int]] = set()  # t, and T / t of a sequence that was cut
        self._compared: tuple[Mesh, bool] | None = None  # on which mesh, and whether gradients were enabled

    def require_same(self, x: Tensor) -> None:
        """Compare the input ``x`` of the first layer of a mesh's first forward, and of the first one with
        gradients enabled. Collective then.

        Raises:
            Desync: ranks have other inputs; on all ranks.
        """
        mesh, trains = self.boxes.mesh, torch.is_grad_enabled()
        if self.size == 1 or self._compared in [(mesh, trains), (mesh, True)]:
            return
        self._compared = mesh, trains
        by_rank = self.axis.group.all_gather_bytes(tensor_digest(x), "the comparison of inputs")
        if odd := [rank for rank, own in zip(self.axis.ranks, by_rank, strict=True) if own != by_rank[0]]:
            raise Desync(
                f"rank {', '.join(map(str, odd))} computes another batch than rank {self.axis.ranks[0]}, and "
                "they share layers (tp): let a rank's data follow from mesh.data.rank, not from its rank"
            )

    @property
    def axis(self) -> Axis:
        return self.boxes.mesh.along["tp"]

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def rank(self) -> int:
        return self.axis.rank

    def rows(self, x: Tensor, cause: str = TENSOR_PARALLEL) -> Tensor:
        """Every rank's ``x``: (t, *x.shape)."""
        if self.size == 1:
            return x.unsqueeze(0)
        out = x.new_empty(self.size, x.numel())
        with self.boxes.mesh.recorder.span(cause, lane="host", num_bytes=out.nbytes):
            self.axis.group.all_gather(out.view(-1), x.contiguous().view(-1), cause)
        return out.view(self.size, *x.shape)

    def sum(self, x: Tensor, cause: str = TENSOR_PARALLEL) -> Tensor:
        """The sum of all ranks' ``x``, each a subtree, in rank order. The same on all ranks."""
        size = self.size
        if size == 1:
            return x
        if size == 2 or x.nbytes <= SMALL_BYTES:
            return tree_sum(self.rows(x, cause).unbind())
        length = round_up(-(-x.numel() // size), ALIGN_ELEMENTS)
        padded = x.new_zeros(size * length)
        padded[: x.numel()] = x.reshape(-1)
        own = tree_sum(self._to_owners(padded, cause).view(size, length).unbind())
        return self.rows(own, cause).view(-1)[: x.numel()].view(x.shape)

    def sum_slice(self, x: Tensor) -> Tensor:
        """This rank's slice (B, T / t, ...) of the sum of all ranks' ``x`` (B, T, ...)."""
        if self.size == 1:
            return x
        slices = torch.stack(x.chunk(self.size, 1))  # (t, B, T / t, ...)
        return tree_sum(self._to_owners(slices, TENSOR_PARALLEL).view(slices.shape).unbind())

    def gather_slices(self, x: Tensor) -> Tensor:
        """All ranks' slices ``x`` (B, T / t, ...), joined to (B, T, ...)."""
        return torch.cat(self.rows(x).unbind(), 1)

    def own_slice(self, x: Tensor) -> Tensor:
        """This rank's slice of the sequence of ``x`` (B, T, ...), contiguous."""
        return x.chunk(self.size, 1)[self.rank].contiguous()

    def _to_owners(self, x: Tensor, cause: str) -> Tensor:
        """Send part r of ``x`` to rank r; return the received parts in rank order."""
        out = torch.empty_like(x)
        lengths: Sequence[int] = [x.numel() // self.size] * self.size
        with self.boxes.mesh.recorder.span(cause, lane="host", num_bytes=x.nbytes):
            self.axis.group.all_to_all(out.view(-1), x.view(-1), lengths, lengths, cause)
        return out
