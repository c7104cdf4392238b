"""The ordered all-reduce of one bucket: data movement, then adds in the order of the sum tree.

     rank 0: roots a, b        rank 1: root c                W = 2 slices of every root
    | a0 | a1 |                | c0 | c1 |
    | b0 | b1 |
         \\      all-to-all      /
     rank 0 owns slice 0:  a0 b0 c0        rank 1 owns slice 1:  a1 b1 c1
       ((a0 + b0) + c0) * scale              ((a1 + b1) + c1) * scale       the tree's order, elementwise
         \\      all-gather      /
    | g0 | g1 |  on both

No collective that does arithmetic takes part, so neither the backend's algorithm nor the number of ranks
can choose an order. Bytes that a rank sends for a bucket of S bytes and r roots: (r + 1) S (W-1)/W; with
one root as many as a ring all-reduce. Two communication steps instead of 2(W-1), and one before them for
the headers. Where ranks can reach into each other's buckets (backend "shm") nothing is sent: each adds its
slices where they lie.

G: micro-batches in the step. W: ranks. R: roots of all ranks together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from instep.comm import direct
from instep.comm.messages import Messages
from instep.comm.perform import perform
from instep.errors import Desync, PeerLost
from instep.events import Recorder
from instep.memory import PIECE_BYTES, align_bytes, allocate
from instep.mesh.process_group import Group
from instep.ordered.buckets import Bucket, Bundle
from instep.ordered.header import (
    Header,
    disagreement,
    header_length,
    pack,
    unpack,
    whereabouts,
    words_of,
)
from instep.ordered.tree import Sum, plan_sum


class OrderedAllReduce:
    """Reduces buckets over ``group``, one after the other, always from the same thread.

    Keeps one scratch buffer for what it receives: R/W of the largest bucket.
    """

    def __init__(self, group: Group, recorder: Recorder, *, ordered: bool, max_parameters: int) -> None:
        self.group = group
        self.recorder = recorder
        self.ordered = ordered
        self.header_length = header_length(max_parameters)
        self.offsets_ns = (0,) * group.size  # of the ranks' clocks to that of the first
        self._scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.compare: Callable[[Sequence[Header]], None] | None = None  # is shown the headers of a reduction
        self.buffers: list[int] = []  # what the ranks said of theirs, with the last bucket
        self.fed: list[int] = []  # and of what their micro-batches were given

    @property
    def scratch(self) -> list[Tensor]:
        """The buffers that it keeps."""
        return list(self._scratch.values())

    def run(self, bucket: Bucket, header: Header, leaves: Sequence[Sequence[int]]) -> None:
        """Turn the ``counter.roots`` of ``bucket`` into the mean gradient in ``bucket.home``.

        ``leaves[r]`` are the leaves of rank r. The sum over all G leaves is multiplied once by
        1 / (sum of the ranks' weights).

        Raises:
            Desync: the ranks are not in the same exchange; raised on every rank alike.
            PeerLost: a rank did not come.
            ReplicasDiffer: what ``compare`` raises, before a gradient is sent; on every rank alike.
            ValueError: the weights of all ranks sum to zero.
        """
        name = f"the exchange of bucket {header.bucket}"
        scale = mean_scale(self.meet(bucket, header, name))
        span = self.recorder.span(
            "exchange", lane="communication", num_bytes=bucket.nbytes, bucket=header.bucket
        )
        with _losing_in(header), span:
            if self.ordered:
                self._ordered(bucket, header.num_leaves, leaves, scale, name)
            else:
                self._unordered(bucket, scale, name)

    def meet(self, bucket: Bundle, header: Header, name: str) -> list[Header]:
        """The headers of all ranks, once all are there, and which of them have gradients, in ``presence``.

        Raises:
            Desync, PeerLost, ReplicasDiffer: as ``run``.
        """
        begun_ns = time.monotonic_ns()
        with _losing_in(header):
            headers = self._agree(bucket, header, name)
        self._record(headers, begun_ns)
        return headers

    def come_to(self, header: Header, words: Sequence[int], name: str) -> list[list[int]]:
        """The ``words`` of every rank, at most ``NUM_WORDS``, once all have come to ``header.act``.

        Raises:
            Desync, PeerLost: as ``run``.
        """
        with _losing_in(header):
            rows = self._tell(header, (), name, words)
            self._require_agreement(unpack(rows, 0)[0], name)
        return words_of(rows, len(words))

    def leave(self, header: Header, name: str) -> None:
        """Tell the others, where they expect a bucket, that this rank sends nothing more in this step."""
        self._tell(replace(header, left=1), (), name)

    def _record(self, headers: Sequence[Header], begun_ns: int) -> None:
        """Since ``begun_ns`` this rank was in ``_agree``; until when was that for want of the last rank?"""
        agreed_ns, mine = time.monotonic_ns(), headers[self.group.rank]
        ahead_ns = self.offsets_ns[self.group.rank]
        launched = [
            h.launched_ns - offset + ahead_ns for h, offset in zip(headers, self.offsets_ns, strict=True)
        ]
        last = max(range(self.group.size), key=launched.__getitem__)
        until_ns = min(max(begun_ns, launched[last]), agreed_ns)

        def put(name: str, start_ns: int, end_ns: int, peer: int = -1) -> None:
            self.recorder.put(name, start_ns, end_ns, lane="communication", bucket=mine.bucket, peer=peer)

        put("queued", min(mine.ready_ns, begun_ns), begun_ns)
        if last != self.group.rank and until_ns > begun_ns:
            put("wait", begun_ns, until_ns, self.group.ranks[last])
        put("agree", until_ns, agreed_ns)

    def _tell(self, header: Header, flags: Sequence[bool], name: str, words: Sequence[int] = ()) -> Tensor:
        """``header`` and ``flags``, or ``words``, of every rank, packed: (W, length) words."""
        length = self.header_length
        out = torch.empty(self.group.size * length, dtype=torch.int64, device="cpu")
        self.group.all_gather(out, pack(header, flags, length, words), name)
        return out.view(self.group.size, length)

    def _agree(self, bucket: Bundle, header: Header, name: str) -> list[Header]:
        slots = bucket.slots
        flags = [*(slot.present for slot in slots), *(slot.frozen for slot in slots)]
        headers, by_rank = unpack(self._tell(header, flags, name), len(flags))
        self._require_agreement(headers, name)
        bucket.presence = [row[: len(slots)] for row in by_rank]
        bucket.frozen = [row[len(slots) :] for row in by_rank]
        self.buffers = [header.buffers for header in headers]
        self.fed = [header.fed for header in headers]
        if self.compare is not None and header.bucket == header.round == 0:
            self.compare(headers)
        return headers

    def _require_agreement(self, headers: Sequence[Header], name: str) -> None:
        problem = disagreement(headers, self.group.ranks)
        if problem is None:
            return
        if any(h.left for h in headers):  # who has left the step does not compare anything any more
            raise Desync(str(problem))
        raise self.group.out_of_step(problem, name)

    def _ordered(
        self, bucket: Bucket, num_leaves: int, leaves: Sequence[Sequence[int]], scale: float, name: str
    ) -> None:
        plan = plan_sum(tuple(map(tuple, leaves)), num_leaves)
        if self._in_place(bucket, plan, scale, name):
            return
        values = self._slices(bucket, plan.counts, name)
        for left, right in plan.adds:
            torch.add(values[left], values[right], out=values[left])
        root = values[plan.root]
        if scale != 1.0:
            root.mul_(scale)
        if self.group.size > 1:
            self._gather(bucket, root, name)

    def _in_place(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> bool:
        """The same sums, where every rank can reach into the buckets of the others; False where not.

        A rank adds its slice of all ranks' roots, and writes the sum into all ranks' homes: nothing is sent.
        """
        shown = self.group.expose([*(root for _, root in bucket.counter.roots), bucket.home], name)
        if shown is None:
            return False
        every_root = [root for tensors in shown for root in tensors[:-1]]
        homes = [tensors[-1] for tensors in shown]
        first, most = self.group.rank * bucket.slice_length, PIECE_BYTES // bucket.dtype.itemsize
        for start in range(first, first + bucket.slice_length, most):
            piece = slice(start, min(start + most, first + bucket.slice_length))
            values = [root[piece] for root in every_root]
            for left, right in plan.adds:
                torch.add(values[left], values[right], out=values[left])
            if scale != 1.0:
                values[plan.root].mul_(scale)
            for home in homes:
                if home.data_ptr() != every_root[plan.root].data_ptr():
                    home[piece].copy_(values[plan.root])
        self.group.barrier(name)
        return True

    def _slices(self, bucket: Bucket, counts: Sequence[int], name: str) -> Sequence[Tensor]:
        """This rank's slice of every root, by sender; ``counts[r]`` roots come from rank r."""
        own_roots = [buffer for _, buffer in bucket.counter.roots]
        size, length = self.group.size, bucket.slice_length
        if size == 1:
            return own_roots
        received = self._receive(bucket, sum(counts) * length)
        message = _by_owner(own_roots, size, length, bucket.home)
        splits = [count * length for count in counts]
        own_splits = [len(own_roots) * length] * size
        if self._by_messages(bucket):
            parts, out = message.split(own_splits), received.split(splits)
            messages = Messages(self.group.pg, self.group.ranks)
            self.group.run(lambda: direct.all_to_all(parts, messages, out), name)
        else:
            self.group.all_to_all(received, message, splits, own_splits, name)
        return list(received.view(-1, length))

    def _gather(self, bucket: Bucket, root: Tensor, name: str) -> None:
        """Everybody's slice of the sum, into the home of ``bucket``."""
        if self._by_messages(bucket):
            parts = bucket.home.split(bucket.slice_length)
            parts[self.group.rank].copy_(root)
            messages = Messages(self.group.pg, self.group.ranks)
            self.group.run(lambda: perform(direct.all_gather, parts, messages), name)
        else:
            self.group.all_gather(bucket.home, root, name)

    def _by_messages(self, bucket: Bundle) -> bool:
        return self.group.sends_best and bucket.device.type == "cpu"

    def _unordered(self, bucket: Bucket, scale: float, name: str) -> None:
        """The plain all-reduce, whose order is the backend's; here to be compared with."""
        if not bucket.counter.roots:
            bucket.home.zero_()
        self.group.all_reduce(bucket.home, name)
        if scale != 1.0:
            bucket.home.mul_(scale)

    def _receive(self, bucket: Bundle, num_elements: int) -> Tensor:
        kind = (bucket.device, bucket.dtype)
        if kind not in self._scratch or self._scratch[kind].numel() < num_elements:
            nbytes = num_elements * bucket.dtype.itemsize
            self._scratch[kind] = allocate(nbytes, align_bytes(bucket.device), bucket.device).elements(
                bucket.dtype
            )
        return self._scratch[kind][:num_elements]


@contextmanager
def _losing_in(header: Header) -> Iterator[None]:
    """A ``PeerLost`` out of the block says in which step it came."""
    try:
        yield
    except PeerLost as lost:
        # The group keeps the error, and raises it again: it stays as it is. All that it says is said again.
        message = f"{whereabouts(header)}: {lost}"
        raise PeerLost(message, ranks=lost.ranks, operation=lost.operation) from None


def mean_scale(headers: Sequence[Header]) -> float:
    """What the sum over all leaves is multiplied by.

    Raises:
        ValueError: the weights of all ranks sum to zero.
    """
    weight = sum(h.weight for h in headers)
    if weight == 0:
        raise ValueError("the weights of all micro-batches of the step sum to 0: there is nothing to average")
    return 1.0 / weight


def _by_owner(own_roots: Sequence[Tensor], size: int, length: int, home: Tensor) -> Tensor:
    """The roots as one message: first everything for rank 0, then for rank 1, ..."""
    if len(own_roots) == 1:
        return own_roots[0]  # W slices in a row already
    if not own_roots:
        return home[:0]
    return torch.stack([root.view(size, length) for root in own_roots], dim=1).view(-1)
