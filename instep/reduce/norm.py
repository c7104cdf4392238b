"""The gradient norm and clipping, with the same bits on every placement.

The norm of the norms of shards differs from the norm of the whole in the last bits, and through the clipping
factor one bit changes every weight. So each canonical block is summed by one owner in float64, and the sums
of blocks are added exactly (``math.fsum``), in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from fractions import Fraction
from itertools import accumulate, groupby

import torch
from torch import Tensor

from instep.events import Recorder
from instep.memory import bytes_of, tensor_of
from instep.net.process_group import Group
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.reduce.buckets import flat_real
from instep.reduce.gradient_shard import gradients_of, peers_in
from instep.reduce.owners import GradientPeers, peers_of

NORM_BYTES = 1 << 32  # at most, of one rank's sums of blocks
GRADIENT_NORM = "the gradient norm"


class Clips:
    """The clippings while this object is set in ``clipping``, and the norms before them, for a run's checks.

    ``recorder`` records their duration.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # With the gradients themselves, so that their ids are not reused.
        self._clipped: list[tuple[float, Sequence[Tensor], frozenset[tuple[int, int]]]] = []

    @property
    def norms(self) -> list[float]:
        """The norm before each clipping since ``clear``."""
        return [norm for norm, _, _ in self._clipped]

    def add(self, norm: float, gradients: Sequence[Tensor]) -> None:
        """``gradients``, of this ``norm``, have been clipped."""
        self._clipped.append((norm, gradients, _marks(gradients)))

    def norm_of(self, gradients: Sequence[Tensor]) -> float | None:
        """The norm before clipping, if exactly these ``gradients`` were clipped and not written to since."""
        marks = _marks(gradients)
        return next((norm for norm, _, clipped in reversed(self._clipped) if clipped == marks), None)

    def clear(self) -> None:
        """The optimizer has used the gradients."""
        self._clipped.clear()


clipping: ContextVar[Clips | None] = ContextVar("instep_clipping", default=None)

# torch converts its whole input to float64 before it adds. Pieces of 1 MB stay in the cache, in a seventh of
# the time.
PIECE_BLOCKS = 32
GPU_PIECE_BLOCKS = 2048  # a batch has fewer than twice as many: 128 MB in float64


def block_square_sums(*flat: Tensor) -> Tensor:
    """Sums of squares of the blocks of each of ``flat``, on one device, (sum of ceil(numel / 4096),) float64;
    of several tensors in some order.

    On a CPU the norms of all partial blocks are one call, since most parameters are shorter than a block;
    its bits are those of one call each.
    """
    if flat[0].device.type != "cpu":
        return _sums_by_halves(flat)
    norms = [torch.empty(0, dtype=torch.float64, device="cpu")]
    tails = []
    for x in flat:
        whole = x.numel() - x.numel() % BLOCK_ELEMENTS
        if whole:
            for piece in x[:whole].view(-1, BLOCK_ELEMENTS).split(PIECE_BLOCKS):
                norms.append(torch.linalg.vector_norm(piece, dim=1, dtype=torch.float64))
        if whole < x.numel():
            tails.append(x[whole:] if whole else x)
    if tails:
        norms.append(torch.stack(torch._foreach_norm(tails, 2, dtype=torch.float64)))
    return torch.cat(norms).square()


def _sums_by_halves(flat: Sequence[Tensor]) -> Tensor:
    """``block_square_sums`` on a GPU, in an order that does not depend on the number of blocks.

    torch's own sum on a GPU splits a row among more threads if there are fewer rows, and so adds in another
    order. Here the second half of every row is added to the first, elementwise, until one column is left.
    """
    pieces = [piece for x in flat for piece in x.split(GPU_PIECE_BLOCKS * BLOCK_ELEMENTS)]
    counts = [-(-x.numel() // BLOCK_ELEMENTS) for x in pieces]
    sums = []
    # In batches: one set of kernels per tensor would take longer to launch than to run.
    ends = zip(accumulate(counts), counts, pieces, strict=True)
    for _, batch in groupby(ends, lambda x: x[0] // GPU_PIECE_BLOCKS):
        _, num_blocks, members = map(list, zip(*batch, strict=True))
        rows = flat[0].new_zeros(sum(num_blocks), BLOCK_ELEMENTS, dtype=torch.float64)
        places = [row.flatten()[: x.numel()] for row, x in zip(rows.split(num_blocks), members, strict=True)]
        torch._foreach_copy_(places, members)
        rows.square_()
        while rows.shape[1] > 1:
            rows, second = rows.chunk(2, dim=1)
            rows.add_(second)
        sums.append(rows.flatten())
    return torch.cat(sums)


def norm_over(parameters: Iterable[Tensor]) -> float:
    """The 2-norm over the gradients of ``parameters``. Collective if they are sharded or in a pipeline."""
    found: dict[GradientPeers | None, list[Tensor]] = {}
    for p in parameters:
        its = found.setdefault(peers_of(p), [])
        if p.grad is not None:
            its.append(p.grad)
    return _norm(found)


def grad_norm(gradients: Iterable[Tensor]) -> float:
    """The 2-norm over ``gradients``, as far as this rank's go; collective if they are sharded."""
    found: dict[GradientPeers | None, list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault(peers_in(gradient), []).append(gradient)
    return _norm(found)


def _norm(gradients: Mapping[GradientPeers | None, Sequence[Tensor]]) -> float:
    squares: list[float] = []
    for peers, its in gradients.items():
        own = _square_sums(its if peers is None else peers.pieces(its))
        squares += own if peers is None else peers.square_sums(own)
    return math.sqrt(exact_sum(squares))


def gather_sums(own: Sequence[float], group: Group) -> list[float]:
    """The sums of blocks of all ranks of ``group``, of which ``own`` are this rank's. Collective."""
    told = bytes_of(torch.tensor(own, dtype=torch.float64, device="cpu"))
    rows = group.all_gather_bytes(told, GRADIENT_NORM, limit=NORM_BYTES)
    return [x for row in rows for x in tensor_of(row, torch.float64).tolist()]


def exact_sum(numbers: Sequence[float]) -> float:
    """The sum of ``numbers``, rounded once and so in any order; inf or nan as with ``+``."""
    if not all(map(math.isfinite, numbers)):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except OverflowError:  # of a partial sum; the sum may be in range
        return rounded(sum(map(Fraction, numbers)))


def rounded(exact: Fraction | int) -> float:
    """The nearest float64, or inf."""
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _square_sums(gradients: Iterable[Tensor]) -> list[float]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if dense.numel():
            by_device.setdefault(dense.device, []).append(flat_real(dense.detach()))
    return [value for flat in by_device.values() for value in block_square_sums(*flat).tolist()]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that their common 2-norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, with a norm whose bits do not depend on the placement. Call it on
    every rank, between backward, which reduces the gradients, and the optimizer's step. Replicated gradients
    need no communication; ranks that share gradients by ``fully_shard``, or have other stages of a pipeline,
    all-gather 8 bytes per 4096 elements.

    Args:
        parameters: one or several; any shapes, dtypes and devices. Parameters without a gradient are skipped,
            sparse gradients count by their dense values.
        max_norm: the largest norm after clipping; each gradient is multiplied by max_norm / (norm + 1e-6) if
            that is below 1.
        norm_type: 2, the only norm offered.
        error_if_nonfinite: raise, with the gradients unchanged, if the norm is inf or nan. By default they
            are multiplied by 0 or nan, as by torch.

    Returns:
        The norm before clipping: float64, shape (), on the CPU.

    Raises:
        ValueError: another ``norm_type``.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
        PeerLost: gradients are sharded, and a rank did not arrive.

    Example:
        >>> loss_function(model(x), y).backward()
        >>> norm = instep.clip_grad_norm_(model.parameters(), max_norm=0.01)
        >>> float(norm) > 0.01  # before clipping; now it is 0.01
        True
        >>> optimizer.step()
    """
    if norm_type != 2:
        raise ValueError(
            f"norm_type={norm_type!r}: expected 2, the norm that has the same bits on any number of ranks; "
            "where gradients are replicated, torch.nn.utils.clip_grad_norm_ has the others"
        )
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = gradients_of(parameters)
    watch = clipping.get()
    with nullcontext() if watch is None else watch.recorder.span("clip", lane="compute"):
        norm = norm_over(parameters)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm}: expected a finite number")
        factor = max_norm / (norm + 1e-6)
        if not factor >= 1.0:  # also when it is nan
            with torch.no_grad():  # after backward(create_graph=True) gradients require gradients themselves
                for gradient in gradients:
                    gradient.mul_(factor)  # torch._foreach_mul_ rounds the factor to bfloat16 first
            for peers in dict.fromkeys(map(peers_of, parameters)):
                if peers is not None:
                    peers.changed()
        if watch is not None:
            watch.add(norm, gradients)
    return torch.tensor(norm, dtype=torch.float64, device="cpu")


clip_grad_norm_.__module__ = "instep"


def _marks(gradients: Iterable[Tensor]) -> frozenset[tuple[int, int]]:
    """A fingerprint that changes if one of ``gradients`` is replaced or written to."""
    return frozenset((id(x), x._version) for x in gradients)
