"""The exchange of one leaf per rank of one unit: every slice goes to its owner, who adds it to what it has.

    rank 0: leaf 4   | a0 | a1 |         rank 0 has the sum of leaves 0 to 3 of slice 0, and a0, b0 come
    rank 1: leaf 5   | b0 | b1 |         rank 1 has the sum of leaves 0 to 3 of slice 1, and a1, b1 come

Where ranks can reach into each other's staging memory (backend "shm") nothing is sent: the owner reads the
slices where they lie, and a barrier says that it has. Else every rank sends each other rank one slice. Bytes
that a rank sends for a unit of S bytes: S (W-1)/W per leaf, half of an all-reduce, in one step after the one
for the headers.

Where there are several such rows of ranks, each with leaves of its own, the owners of the same slice add up
theirs after the last round, in the order of the tree too: a slice is to them what a bucket is to replicas.
Headers go over all rows, in every round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.comm import direct
from instep.comm.messages import Messages
from instep.events import Recorder
from instep.memory import PIECE_BYTES
from instep.ordered.exchange import Exchange, mean_scale
from instep.ordered.header import Header
from instep.ordered.tree import rank_major
from instep.shard.ranks import Ranks
from instep.shard.rounds import Round
from instep.shard.staging import SlicedBucket, Staging


class Delivery(Exchange):
    """Brings slices to their owners, one unit after the other, always from the same thread."""

    staging: Staging

    def __init__(self, ranks: Ranks, recorder: Recorder, *, max_parameters: int) -> None:
        super().__init__(ranks.whole, recorder, ordered=True, max_parameters=max_parameters)
        self._row = ranks.row
        self._across = None
        if ranks.column is not None:
            self._across = Exchange(ranks.column, recorder, ordered=True, max_parameters=0)

    def deliver(
        self,
        bucket: SlicedBucket,
        number: int,
        header: Header,
        turn: Round,
        *,
        is_last: bool,
        carried: Sequence[slice] = (),
    ) -> None:
        """Add this rank's slice of a round's leaves, which are in staging buffer ``number`` of their ranks.

        In the last round the sum, over all rows of ranks, becomes the mean. ``carried`` are the parts of the
        slice whose reduced gradient of before counts as a part of every leaf, as if ``.grad`` had
        accumulated it.

        Raises:
            Desync, PeerLost, ValueError: as ``Exchange.run``.
        """
        name = f"the exchange of unit {header.bucket} in round {header.round}"
        headers = self.meet(bucket, header, name)
        scale = mean_scale(headers) if is_last else None
        with self.recorder.span(
            "exchange", lane="communication", num_bytes=bucket.nbytes, bucket=header.bucket
        ):
            if turn.senders:
                self._take(bucket, number, turn, None if self._across else scale, carried, name)
            if self._across is not None and scale is not None:
                self._add_replicas(self._across, bucket, header.num_leaves, turn, scale, name)

    def _take(
        self,
        bucket: SlicedBucket,
        number: int,
        turn: Round,
        scale: float | None,
        carried: Sequence[slice],
        name: str,
    ) -> None:
        """Add this rank's slice of the leaves of its row."""
        shown = self.staging.by_rank(number, bucket)
        if shown is None:
            values = self._receive_slices(bucket, number, turn, name)
        else:
            values = [bucket.own(shown[sender]) for sender in turn.senders]
        for part in carried:
            _add_before(bucket.reduced[part], [value[part] for value in values])
        _add_up(bucket, values, turn, scale)
        if shown is not None:
            self._row.barrier(name)

    def _add_replicas(
        self, across: Exchange, bucket: SlicedBucket, num_leaves: int, turn: Round, scale: float, name: str
    ) -> None:
        """The mean over all rows, from the roots that each row has of this slice."""
        cuts = rank_major(num_leaves, across.group.size)
        across._ordered(bucket.to_exchange(turn.nodes, num_leaves), num_leaves, cuts, scale, name)
        if bucket.reduced is not bucket.kept[0]:
            bucket.reduced.copy_(bucket.kept[0])
        bucket.num_kept = 1

    def _receive_slices(self, bucket: SlicedBucket, number: int, turn: Round, name: str) -> list[Tensor]:
        """This rank's slice of every sender's leaf, by message."""
        row, length = self._row, bucket.slice_length
        size, rank = row.size, row.rank
        staged = self.staging.buffer(number, bucket)
        received = self._receive(bucket, len(turn.senders) * length)
        splits = [length if r in turn.senders else 0 for r in range(size)]
        own_splits = [length if rank in turn.senders else 0] * size
        message = staged[: sum(own_splits)]
        if row.sends_best and bucket.device.type == "cpu":
            parts, out = message.split(own_splits), received.split(splits)
            messages = Messages(row.pg, row.ranks)
            row.run(lambda: direct.all_to_all(parts, messages, out), name)
        else:
            row.all_to_all(received, message, splits, own_splits, name)
        return [part for part in received.split(splits) if part.numel()]


def _add_up(bucket: SlicedBucket, values: Sequence[Tensor], turn: Round, scale: float | None) -> None:
    """Make the sums of ``turn``; with a ``scale`` the root is all, and its mean the reduced gradient.

    The last sum is written where it is kept: what is kept of before stays at its number, so no other one is
    read from there.
    """
    before = bucket.num_kept
    sums = [*bucket.kept[:before], *values]
    homes = {value: bucket.keep(d) for d, value in enumerate(turn.kept)}
    moved = {value for value in homes if value >= before}
    targets = [sums[left] for left, _ in turn.adds]
    if turn.adds and (last := turn.adds[-1][0]) in moved:
        targets[-1] = homes[last]
        moved.remove(last)
    most = PIECE_BYTES // bucket.dtype.itemsize
    for start in range(0, bucket.slice_length, most):
        piece = slice(start, min(start + most, bucket.slice_length))
        terms = [x[piece] for x in sums]
        for (left, right), target in zip(turn.adds, targets, strict=True):
            terms[left] = torch.add(terms[left], terms[right], out=target[piece])
        for value, home in homes.items():
            if scale is not None and scale != 1.0:
                torch.mul(terms[value], scale, out=home[piece])
            elif value in moved:
                home[piece].copy_(terms[value])
            if scale is not None and bucket.reduced is not home:
                bucket.reduced[piece].copy_(home[piece])
    bucket.num_kept = len(turn.kept)


def _add_before(carried: Tensor, values: Sequence[Tensor]) -> None:
    """Each of ``values`` becomes what ``.grad`` would be, had it held ``carried`` before: in its dtype."""
    before = carried.clone()
    for value in values:
        value.copy_(before + value.to(before.dtype))
