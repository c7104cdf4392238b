"""Routing: the choice of experts, and the rows of the experts' blocks in which tokens are computed.

The rounding of a matrix product depends on its shape and, in some kernels, on the row. So each expert
computes its tokens in the order of the micro-batch, in blocks of B rows, one product per block; zeros fill
the last block. Shapes and rows do not depend on which rank has the expert:

    token             0   1   2   3   4          K = 1, E = 2, B = 2
    chosen expert     1   0   1   1   0
    expert 0          | 1 4 |                    one block
    expert 1          | 0 2 | 3 - |              two blocks, one row of zeros

An expert without tokens computes one block of zeros, so its weights always have a gradient.

Letters: N tokens of a micro-batch, K experts per token, E experts, R ranks along ep, B rows of a block. A
*pair* is a token and one of its K slots: pair = token * K + slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from instep.errors import Desync
from instep.events import EXPERT_DISPATCH
from instep.mesh.mesh import Mesh


def choose(scores: Tensor, top_k: int) -> Tensor:
    """The ``top_k`` experts of the highest ``scores`` (N, E) of each token, highest first: (N, K) int64.

    Of equal scores the expert with the lower number is first; ``torch.topk`` promises no order.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k].contiguous()


def capacity_of(num_pairs: int, num_experts: int, factor: float | None) -> int:
    """The most pairs that an expert computes of a micro-batch: its equal share times ``factor``, rounded up.

    Source: W. Fedus et al., "Switch Transformers", arXiv 2101.03961, equation 3.
    """
    return num_pairs if factor is None else math.ceil(num_pairs / num_experts * factor)


@dataclass(frozen=True, eq=False)
class Routes:
    """The rows of one micro-batch's pairs, and the messages that return their results to the tokens.

    All ranks along ep have all tokens, and so the same routes. Rank r computes the r-th part of the experts,
    and adds up the results of the r-th slice of tokens: ceil(N / R) of them, the last one fewer.
    """

    mesh: Mesh | None  # None: one rank has all experts
    rank: int  # along ep
    num_pairs: int
    load: Tensor  # (E,) int64, the number of pairs per expert, with dropped ones
    blocks: list[int]  # of each expert of this rank
    block: int  # B
    pairs: Tensor  # of this rank's experts, ascending
    rows: Tensor  # the row of each, among the rows of all blocks of this rank
    slice_pairs: int  # pairs of a slice
    returned: Tensor  # the pairs of this rank's slice, in the order in which ranks send them
    sends: list[int]  # results to each rank
    receives: list[int]  # results from each rank

    @property
    def num_rows(self) -> int:
        """Of all blocks of this rank."""
        return sum(self.blocks) * self.block


def make_routes(chosen: Tensor, num_experts: int, capacity: int, block: int, mesh: Mesh | None) -> Routes:
    """The routes of a micro-batch whose tokens have ``chosen`` (N, K) experts.

    An expert drops the pairs beyond its ``capacity``, the last tokens of the micro-batch first. Waits for the
    device twice, for the numbers of blocks and messages. Collective: an all-gather of a checksum.

    Raises:
        Desync: on all ranks, if one has chosen otherwise: messages would have other lengths.
    """
    size, rank = (1, 0) if mesh is None else (mesh.along["ep"].size, mesh.along["ep"].rank)
    num_tokens, top_k = chosen.shape
    expert = chosen.flatten()  # (N * K,)
    pair = torch.arange(len(expert), device=chosen.device)
    load = torch.bincount(expert, minlength=num_experts)
    order = expert.argsort(stable=True)  # by expert, then by pair
    place = torch.empty_like(pair)  # among the pairs of its expert
    place[order] = pair - (load.cumsum(0) - load)[expert[order]]
    num_blocks = ((load.clamp(max=capacity) + block - 1) // block).clamp(min=1)
    row = (num_blocks.cumsum(0) - num_blocks)[expert] * block + place

    per_rank = num_experts // size
    slice_pairs = -(-num_tokens // size) * top_k
    owner = expert // per_rank
    kept = place < capacity
    counts = torch.bincount((pair // slice_pairs * size + owner)[kept], minlength=size * size)
    *moves, checksum = torch.cat([counts, (expert * (pair + 1)).sum().view(1)]).tolist()
    if mesh is not None:
        require_same_choice(checksum, mesh)
    first = rank * per_rank
    blocks = num_blocks.tolist()
    pairs = pair[kept & (owner == rank)]
    returned = pair[kept & (pair // slice_pairs == rank)]
    return Routes(
        mesh=mesh,
        rank=rank,
        num_pairs=len(expert),
        load=load,
        blocks=blocks[first : first + per_rank],
        block=block,
        pairs=pairs,
        rows=row[pairs] - sum(blocks[:first]) * block,
        slice_pairs=slice_pairs,
        returned=returned[owner[returned].argsort(stable=True)],
        sends=moves[rank::size],
        receives=moves[rank * size : (rank + 1) * size],
    )


def require_same_choice(checksum: int, mesh: Mesh) -> None:
    """Raise ``Desync`` on all ranks along ep unless their checksums of the chosen experts are equal."""
    group = mesh.along["ep"].group
    with mesh.recorder.span(EXPERT_DISPATCH, lane="host"):
        own = checksum.to_bytes(8, "little")
        told = group.all_gather_bytes(own, "the comparison of routes", lengths=[8] * group.size)
    odd = [rank for rank, its in zip(group.ranks, told, strict=True) if its != told[0]]
    if odd:
        raise Desync(
            f"rank {', '.join(map(str, odd))} chose other experts than rank {group.ranks[0]} for the tokens "
            "of a micro-batch, which ranks along ep compute together: give them the same samples (by "
            "micro_batch.index, or by mesh.data.rank instead of mesh.rank), weights and seeds"
        )
