"""How long a step should take over a link, from three measured numbers and the sizes of the buckets. Pure.

    naive     compute + wire + tensors x 3 latency             nothing overlaps
    flat      compute + wire + 3 latency
    overlap   max(compute, wire + tensors x 3 latency) + last  the last tensor leaves when backward has ended
    bucketed  max(compute, wire + buckets x 3 latency) + last  so does the last bucket
    server    compute + 2 (W - 1) S / rate                     all gradients and weights through one link

    compute   a step without synchronisation         wire   an all-reduce of S bytes in one piece
    last      the last message's bytes / rate         W      ranks

Each of our exchanges is three messages: a header, slices there, slices back. What the arithmetic leaves out:
before backward begins there is nothing to send, so forward hides nothing, and a step cannot be shorter than
forward + max(backward, wire).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MESSAGES = 3  # per exchange


@dataclass(frozen=True)
class Link:
    """What was measured of the computation and of the link, in seconds and bytes per second."""

    compute_s: float
    wire_s: float
    latency_s: float
    bytes_per_s: float
    num_ranks: int

    def predict(self, strategy: str, bucket_bytes: Sequence[int]) -> float:
        """Seconds per step of ``strategy``, which sends messages of ``bucket_bytes`` in this order."""
        latencies_s = MESSAGES * self.latency_s * len(bucket_bytes)
        match strategy:
            case "naive" | "flat":
                return self.compute_s + self.wire_s + latencies_s
            case "server":
                return self.compute_s + 2 * self.line_rate_s(sum(bucket_bytes)) * (self.num_ranks - 1)
            case "overlap" | "bucketed" | "DDP":
                return max(self.compute_s, self.wire_s + latencies_s) + self.around_s(bucket_bytes[-1])
        raise ValueError(f"strategy {strategy!r}: expected naive, flat, overlap, bucketed, DDP or server")

    def line_rate_s(self, num_bytes: float) -> float:
        """How long the link takes for them at its rate, in one direction."""
        return num_bytes / self.bytes_per_s

    def around_s(self, num_bytes: float) -> float:
        """The least for an all-reduce of them: 2 (W - 1) / W times their bytes over every link."""
        return self.line_rate_s(num_bytes) * 2 * (self.num_ranks - 1) / self.num_ranks
