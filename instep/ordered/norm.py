"""The gradient norm and clipping, with the same bits however the gradients are placed.

The norm of the norms of shards is not the norm of the whole to the last bit, and through the clipping
factor one bit changes every weight. So the squares are summed per canonical block in float64, each block
by one owner, and the sums of blocks are added exactly (``math.fsum``), which has no order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from fractions import Fraction

import torch
from torch import Tensor

from instep.events import Recorder
from instep.ordered.blocks import BLOCK_ELEMENTS
from instep.ordered.buckets import flat_real
from instep.ordered.placeholder import by_slices, slices_elsewhere, slices_of


class Clips:
    """What is clipped while this one is set in ``clipping``: the norms of before, and of which gradients.

    A run judges by them; ``recorder`` is told how long it took.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # With the gradients themselves, so that no others come to have their identity.
        self._clipped: list[tuple[float, Sequence[Tensor], frozenset[tuple[int, int]]]] = []

    @property
    def norms(self) -> list[float]:
        """Of before each clipping since ``clear``."""
        return [norm for norm, _, _ in self._clipped]

    def add(self, norm: float, gradients: Sequence[Tensor]) -> None:
        """``gradients`` are clipped, which had this ``norm``."""
        self._clipped.append((norm, gradients, _marks(gradients)))

    def norm_of(self, gradients: Sequence[Tensor]) -> float | None:
        """That of before clipping, if just these ``gradients`` were clipped and not written to since."""
        marks = _marks(gradients)
        return next((norm for norm, _, its in reversed(self._clipped) if its == marks), None)

    def clear(self) -> None:
        """The gradients are used."""
        self._clipped.clear()


clipping: ContextVar[Clips | None] = ContextVar("instep_clipping", default=None)

# torch converts all that it is given before it adds: in pieces of 1 MB that stays in the cache, and takes a
# seventh of the time.
PIECE_BLOCKS = 32
GPU_PIECE_BLOCKS = 4096  # 128 MB in float64


def block_square_sums(x: Tensor) -> Tensor:
    """Sum of squares of every block of ``x``, in order: (ceil(numel / 4096),) float64 on ``x``'s device."""
    flat = flat_real(x.detach())
    if flat.device.type != "cpu":
        return _sums_by_halves([flat])
    pieces, tail = _pieces(flat)
    norms = [_norms(piece) for piece in pieces]
    if tail.numel():
        norms.append(_norms(tail.view(1, -1)))
    return torch.cat(norms).square()


def _sums_by_halves(flat: Sequence[Tensor]) -> Tensor:
    """``block_square_sums`` of each tensor, in an order that does not depend on how many blocks there are.

    torch's own sum on a GPU divides a row among more threads where there are fewer rows, and so adds in
    another order. Here the second half of every row is added to the first, elementwise, until one is left.
    """
    batches: list[list[Tensor]] = [[]]  # few kernels, whatever the number of tensors
    room = GPU_PIECE_BLOCKS
    for piece in (piece for x in flat for piece in x.split(GPU_PIECE_BLOCKS * BLOCK_ELEMENTS)):
        if (blocks := _num_blocks(piece)) > room:
            batches.append([])
            room = GPU_PIECE_BLOCKS
        batches[-1].append(piece)
        room -= blocks
    return torch.cat([_sums_of_batch(batch) for batch in batches])


def _sums_of_batch(batch: Sequence[Tensor]) -> Tensor:
    counts = [_num_blocks(x) for x in batch]
    rows = batch[0].new_zeros(sum(counts), BLOCK_ELEMENTS, dtype=torch.float64)
    places = [place.flatten()[: x.numel()] for place, x in zip(rows.split(counts), batch, strict=True)]
    torch._foreach_copy_(places, list(batch))
    rows.square_()
    while rows.shape[1] > 1:
        rows, second = rows.chunk(2, dim=1)
        rows.add_(second)
    return rows.flatten()


def _num_blocks(x: Tensor) -> int:
    return -(-x.numel() // BLOCK_ELEMENTS)


def _pieces(flat: Tensor) -> tuple[list[Tensor], Tensor]:
    """The whole blocks of ``flat``, some at a time, (blocks, 4096) each; and what is left of it."""
    whole = flat.numel() - flat.numel() % BLOCK_ELEMENTS
    blocks = flat[:whole].view(-1, BLOCK_ELEMENTS)
    return [blocks] if len(blocks) <= PIECE_BLOCKS else list(blocks.split(PIECE_BLOCKS)), flat[whole:]


def _norms(piece: Tensor) -> Tensor:
    return torch.linalg.vector_norm(piece, dim=1, dtype=torch.float64)


def grad_norm(gradients: Iterable[Tensor]) -> float:
    """The 2-norm over all ``gradients``: inf or nan if one of their elements is.

    Collective where they are divided among ranks.
    """
    gradients = list(gradients)
    whole = [(x, slices_elsewhere(x)) for x in gradients if slices_of(x) is None]
    squares = _square_sums([x for x, elsewhere in whole if elsewhere is None])
    for slices, members in by_slices(gradients):
        squares += slices.square_sums(members, [x for x, elsewhere in whole if elsewhere is slices])
    return norm_of(squares)


def norm_of(squares: Sequence[float]) -> float:
    """The norm whose squares of blocks these are, in any order."""
    return math.sqrt(exact_sum(squares))


def exact_sum(numbers: Sequence[float]) -> float:
    """The sum of ``numbers``, rounded once, so that it has no order; inf or nan as ``+`` gives them."""
    if not all(map(math.isfinite, numbers)):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except OverflowError:  # a partial sum is too large, which the sum need not be
        return rounded(sum(map(Fraction, numbers)))


def rounded(exact: Fraction | int) -> float:
    """The nearest float64; inf where that is too large."""
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _square_sums(gradients: Iterable[Tensor]) -> list[float]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        by_device.setdefault(dense.device, []).append(flat_real(dense.detach()))
    return [value for flat in by_device.values() for value in _squares_of_all(flat).tolist()]


def _squares_of_all(flat: Sequence[Tensor]) -> Tensor:
    """``block_square_sums`` of each of ``flat``, of one device, in some order.

    Most tensors of a model are shorter than a block: on a CPU their norms are asked for in one call, which
    has the bits of one call each.
    """
    if flat[0].device.type != "cpu":
        return _sums_by_halves(flat)
    cut = [_pieces(x) for x in flat if x.numel() >= BLOCK_ELEMENTS]
    norms = [torch.empty(0, dtype=torch.float64, device="cpu")]
    norms += [_norms(piece) for pieces, _ in cut for piece in pieces]
    tails = [x for x in (*flat, *(tail for _, tail in cut)) if 0 < x.numel() < BLOCK_ELEMENTS]
    if tails:
        norms += [torch.stack(torch._foreach_norm(tails, 2, dtype=torch.float64))]
    return torch.cat(norms).square()


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients in place so that their common 2-norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, with a norm whose bits do not depend on the placement. Call it on
    every rank, between backward, which reduces the gradients, and the optimizer's step. Where each rank has
    all of them nothing is sent; where ``fully_shard`` has divided them, ranks tell each other 8 bytes per
    4096 elements.

    Args:
        parameters: all that the norm is over, or one; any shapes, dtypes and devices. Those without a
            gradient are passed over, sparse gradients count by their dense values.
        max_norm: the largest norm that is left; each gradient is multiplied by max_norm / (norm + 1e-6)
            where that is below 1.
        error_if_nonfinite: raise, with the gradients as they are, if the norm is inf or nan. By default they
            are multiplied all the same, by 0 or nan, as by torch.

    Returns:
        The norm before clipping: float64, shape (), on the CPU.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
        PeerLost: gradients are divided, and a rank did not come.

    Example:
        >>> loss_function(model(x), y).backward()
        >>> norm = instep.clip_grad_norm_(model.parameters(), max_norm=0.01)
        >>> float(norm) > 0.01  # before clipping; now it is 0.01
        True
        >>> optimizer.step()
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    watch = clipping.get()
    with nullcontext() if watch is None else watch.recorder.span("clip", lane="compute"):
        norm = grad_norm(gradients)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm}: expected a finite number")
        factor = max_norm / (norm + 1e-6)
        if not factor >= 1.0:  # also when it is nan
            _scale(gradients, factor)
        if watch is not None:
            watch.add(norm, gradients)
    return torch.tensor(norm, dtype=torch.float64, device="cpu")


clip_grad_norm_.__module__ = "instep"


def _marks(gradients: Iterable[Tensor]) -> frozenset[tuple[int, int]]:
    """Others when one of ``gradients`` is another one, or was written to."""
    return frozenset((id(x), x._version) for x in gradients)


def _scale(gradients: Sequence[Tensor], factor: float) -> None:
    with torch.no_grad():  # after backward(create_graph=True) gradients have a graph of their own
        for gradient in gradients:
            if slices_of(gradient) is None:
                gradient.mul_(factor)  # torch._foreach_mul_ rounds the factor to bfloat16 first
        for slices, members in by_slices(gradients):
            slices.scale(members, factor)
