"""The star: every gradient goes to one rank, and every weight comes from there.

        1   2   3            1   2   3          a worker's link: S in, S out
         \\  |  /              ^  ^  ^
          v v v                \\ | /           the server's: (W-1) S in, (W-1) S out
      0: the ordered sum    0: the new weights

No rank but the server adds anything, and no worker hears from another (but for the headers that go before
every bucket, some hundred bytes). A worker whose leaves make r roots sends r S bytes.

S: bytes of a bucket. W: ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.events import Recorder, Span
from instep.mesh.group import Group
from instep.ordered.buckets import Bucket
from instep.ordered.exchange import Exchange
from instep.ordered.tree import plan_sum

SERVER = 0  # rank in the group


class Star(Exchange):
    """Half an all-reduce: the roots go to the server, which adds them. ``give`` brings the weights back.

    The server's scratch holds what all workers send, and later what they are sent: (W-1) S bytes.
    """

    def __init__(self, parameters: Sequence[Tensor], group: Group, recorder: Recorder) -> None:
        super().__init__(group, recorder, ordered=True, max_parameters=len(parameters))
        self.parameters = parameters

    def give(self, buckets: Sequence[Bucket]) -> None:
        """Overwrite the parameters of every rank with the server's. Collective."""
        if self.group.size == 1:
            return
        num_workers, nothing = self.group.size - 1, [0] * self.group.size
        for bucket in buckets:
            pairs = [(slot, self.parameters[slot.position].detach()) for slot in bucket.slots]
            name, length = f"the weights of bucket {bucket.index}", bucket.num_elements
            if self.group.rank == SERVER:
                message = self._receive(bucket, num_workers * length)
                for slot, parameter in pairs:
                    bucket.view(slot, message).copy_(parameter)
                message.view(num_workers, length)[1:] = message[:length]
                with self._span("send", message, bucket):
                    self.group.all_to_all(message[:0], message, nothing, [0] + [length] * num_workers, name)
            else:
                message = self._receive(bucket, length)
                with self._span("receive", message, bucket):
                    self.group.all_to_all(message, message[:0], [length, *nothing[1:]], nothing, name)
                for slot, parameter in pairs:
                    parameter.copy_(bucket.view(slot, message))

    def _ordered(
        self, bucket: Bucket, num_leaves: int, leaves: Sequence[Sequence[int]], scale: float, name: str
    ) -> None:
        own_roots = [buffer for _, buffer in bucket.counter.roots]
        if self.group.rank != SERVER:
            message = own_roots[0] if len(own_roots) == 1 else torch.cat([bucket.home[:0], *own_roots])
            nothing = [0] * self.group.size
            with self._span("send", message, bucket):
                self.group.all_to_all(message[:0], message, nothing, [message.numel(), *nothing[1:]], name)
            return
        plan = plan_sum(tuple(map(tuple, leaves)), num_leaves)
        values = [*own_roots, *self._from_workers(bucket, plan.counts[1:], name)]
        with self.recorder.span("aggregate", lane="communication", bucket=bucket.index):
            # The first root of the first rank has leaf 0 and lies in the bucket's home: so does the sum.
            for left, right in plan.adds:
                torch.add(values[left], values[right], out=values[left])
            if scale != 1.0:
                bucket.home.mul_(scale)

    def _from_workers(self, bucket: Bucket, counts: Sequence[int], name: str) -> Sequence[Tensor]:
        """The roots of all workers, in their order; ``counts[r - 1]`` come from rank r."""
        if self.group.size == 1:
            return []
        received = self._receive(bucket, sum(counts) * bucket.num_elements)
        with self._span("receive", received, bucket):
            splits = [0] + [count * bucket.num_elements for count in counts]
            self.group.all_to_all(received, received[:0], splits, [0] * self.group.size, name)
        return list(received.view(-1, bucket.num_elements))

    def _span(self, name: str, message: Tensor, bucket: Bucket) -> Span:
        return self.recorder.span(name, lane="communication", num_bytes=message.nbytes, bucket=bucket.index)
