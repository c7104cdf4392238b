"""What an exchange costs: measured alone, by the size of a bucket, and the steps that this predicts.

The samples are exchanges of ``DataParallel`` itself, one parameter of each size, while nothing is computed.
In a step, exchanges and computation compete for the processor. ``timeline.predict.HidingCost`` predicts what
that costs from the processor time of an exchange, which is measured here as well.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from instep.bench.worlds import FEWEST_SAMPLES, World, slowest_rank
from instep.comm.cost import AlphaBeta, busy_share, fit
from instep.net.device import synchronize
from instep.replicate.wrapper import DataParallel
from instep.timeline.predict import OVERLAPPING, HidingCost, even_backward

# The smallest are sent in one message, and a link lets the beginning of any message pass at once (``hosts``):
# most sizes are some megabytes, as buckets are.
SIZES = (4_000, 64_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000, 32_000_000)
BUDGET_S = 15.0

Samples = Mapping[str, Sequence[Sequence[float]]]
"""By size in bytes: seconds of exchanges on this rank, and of its processor in each."""


@dataclass(frozen=True)
class ExchangeCost:
    """The cost of one bucket's exchange: ``flight`` is elapsed time, ``work`` processor time of a rank.

    ``busy``: the share of the ranks' exchanges that find no idle core while all ranks compute.
    """

    flight: AlphaBeta
    work: AlphaBeta
    busy: float
    num_ranks: int

    @classmethod
    def of(cls, by_rank: Sequence[Samples], *, on_gpu: bool = False) -> ExchangeCost:
        """Fitted to what all ranks of this host have measured."""
        flight, work = (
            fit([*found], [*found.values()]) for found in (medians(by_rank, which) for which in (0, 1))
        )
        busy = 0.0 if on_gpu else busy_share(len(by_rank), 1, os.cpu_count() or 1)
        return cls(flight, work, busy, len(by_rank))

    def words(self, alone_s: Mapping[int, float]) -> str:
        """In one line, beside what the smallest exchange took."""
        flight, work, smallest = self.flight, self.work, min(alone_s)
        return (
            f"exchanges alone: alpha {1e6 * flight.latency_s:,.0f} us ({smallest:,} bytes took "
            f"{1e6 * alone_s[smallest]:,.0f}), beta {1e9 * flight.s_per_byte:.3f} ns/byte; of these "
            f"{1e6 * work.latency_s:,.0f} us and {1e9 * work.s_per_byte:.3f} ns/byte are processor time"
        )

    def step_s(self, strategy: str, sizes: Sequence[int], forward_s: float, backward_s: float) -> float:
        """Seconds of a step whose gradients leave in buckets of ``sizes``, in this order.

        A parameter server sends all of them and all weights through one link, to one rank after the other.
        That is W times what an exchange sends, 2 (W - 1) S bytes.
        """
        if strategy == "server":
            return forward_s + backward_s + self.flight.time_s(self.num_ranks * sum(sizes))
        outcome = even_backward(sizes, backward_s, self.flight, overlaps=strategy in (*OVERLAPPING, "DDP"))
        hiding = HidingCost(self.busy, self.work.s_per_byte * sum(sizes), self.work.latency_s)
        return forward_s + backward_s + outcome.exposed_s + hiding.cost_s(outcome)


def medians(by_rank: Sequence[Samples], which: int) -> dict[int, float]:
    """Seconds of an exchange (0) or of a processor in it (1) on the slowest rank, by size."""
    return {
        int(size): statistics.median(slowest_rank([rank[size][which] for rank in by_rank]))
        for size in by_rank[0]
    }


class _OneParameter(nn.Module):
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_bytes // 4, device=device))

    def forward(self) -> Tensor:
        return self.weight.sum()


def measure_exchanges(
    world: World, pg: ProcessGroup, total: int, samples: int, *, ordered: bool = True
) -> Samples:
    """Exchanges of up to ``total`` bytes over ``pg``, the sizes in turns, after one each. Collective."""
    models = {
        size: DataParallel(
            _OneParameter(size, world.device),
            process_group=pg,
            strategy="flat",
            ordered=ordered,
            init_sync=False,
        )
        for size in sorted({min(size, total) for size in SIZES})
    }
    found: dict[str, list[list[float]]] = {str(size): [[], []] for size in models}
    number, began = 0, time.monotonic()
    while number <= samples:
        for size, model in models.items():
            for kept, seconds in zip(found[str(size)], _exchange(world, model), strict=True):
                kept.extend([seconds] * (number > 0))
        if number == 0:
            fitting = int(BUDGET_S / world.slowest(time.monotonic() - began))
            samples = min(samples, max(FEWEST_SAMPLES, fitting))
        number += 1
    for model in models.values():
        model.close()
    return found


def _exchange(world: World, model: DataParallel) -> tuple[float, float]:
    """Seconds of one exchange, waking up and copying included, and of this process's cores meanwhile."""
    with model.no_sync():
        model().backward()
    world.barrier()
    began, work_s = time.perf_counter(), time.process_time()
    model.sync_gradients()
    synchronize(world.device)
    exchange_s, work_s = time.perf_counter() - began, time.process_time() - work_s
    model.zero_grad()
    return exchange_s, work_s
