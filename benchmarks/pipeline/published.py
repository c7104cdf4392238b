"""The figures that the simulator is held to, as they were published."""

from __future__ import annotations

from typing import NamedTuple

ZERO_BUBBLE = 'P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024'
GPIPE = 'Y. Huang et al., "GPipe", NeurIPS 2019'


class Measured(NamedTuple):
    """A row of tables 4, 5 and 9 of ``ZERO_BUBBLE``: times in ms of one rank and micro-batch."""

    model: str
    ranks: int
    micro_batches: int
    chunks: int  # of interleaved: (layers + 2) / ranks, as the first and the last stage have a layer less
    batch: int  # samples in a micro-batch
    forward_ms: float
    input_gradient_ms: float
    weight_gradient_ms: float
    message_ms: float
    rates: dict[str, float]  # bubble rates, by schedule
    samples: dict[str, float]  # per GPU and second, measured


def _row(model: str, sizes: str, ms: str, rates: str, samples: str) -> Measured:
    ranks, micro_batches, chunks, batch = map(int, sizes.split())
    forward, input_gradient, weight_gradient, message = map(float, ms.split())
    return Measured(
        model.strip(), ranks, micro_batches, chunks, batch, forward, input_gradient, weight_gradient, message,
        dict(zip(("1f1b", "interleaved", "zb-h1", "zb-h2"), map(float, rates.split()), strict=True)),
        dict(zip(("zb-h1", "1f1b", "interleaved"), map(float, samples.split()), strict=True)),
    )  # fmt: skip


ROWS = tuple(
    _row(*line.split("|"))
    for line in (
        # model | ranks, micro-batches, chunks, batch | F, I, W, message | four rates | three measured
        "1.5B | 8 24 3 6 | 18.522 18.086 9.337 0.601 | .2431 .1055 .1585 .1083 | 12.9 11.8 13.1",
        "1.5B | 8 32 3 6 | 18.513 18.086 9.331 0.626 | .1985 .0818 .1242 .0837 | 13.4 12.5 13.4",
        "1.5B | 8 64 3 6 | 18.546 18.097 9.321 0.762 | .1240 .0443 .0674 .0444 | 14.2 13.6 13.9",
        "6.2B | 8 24 4 3 | 29.718 29.444 19.927 0.527 | .2347 .0808 .1323 .0698 | 3.88 3.50 4.01",
        "6.2B | 8 32 4 3 | 29.802 29.428 19.530 0.577 | .1898 .0628 .1045 .0559 | 4.00 3.70 4.08",
        "6.2B | 8 64 4 3 | 29.935 29.621 19.388 0.535 | .1091 .0320 .0554 .0294 | 4.20 4.03 4.19",
        "14.6B | 16 48 3 1 | 11.347 11.248 8.132 0.377 | .2552 .1104 .1397 .0672 | 1.61 1.40 1.54",
        "14.6B | 16 64 3 1 | 11.307 11.254 8.101 0.379 | .2082 .0852 .1088 .0516 | 1.67 1.49 1.59",
        "14.6B | 16 128 3 1 | 11.325 11.308 8.109 0.378 | .1251 .0445 .0576 .0266 | 1.76 1.64 1.66",
        "28.3B | 32 96 2 1 | 10.419 10.207 7.715 0.408 | .2646 .1493 .1421 .0641 | 0.87 0.76 0.82",
        "28.3B | 32 128 2 1 | 10.408 10.204 7.703 0.408 | .2168 .1164 .1106 .0490 | 0.90 0.80 0.85",
        "28.3B | 32 256 2 1 | 10.402 10.248 7.698 0.460 | .1352 .0624 .0594 .0257 | 0.96 0.88 0.90",
    )
)
# How far a simulated rate may be from the published one, which has four digits.
WITHIN = {"1f1b": 1e-4, "interleaved": 5e-3, "zb-h1": 5e-3, "zb-h2": 5e-3}

# Table 2 of ``GPIPE``: a transformer on K accelerators with 32 micro-batches, times as fast as one alone.
GPIPE_MICRO_BATCHES = 32
GPIPE_SPEED_UPS = {2: 1.8, 4: 3.4, 8: 6.3}
GPIPE_WITHIN = 0.08

# The README of sail-sg/zero-bubble-pipeline-parallelism, for F = I = W: bubble and memory, 1f1b's are 1.
TO_1F1B = {"1f1b": (1, 1), "zb-h1": (1 / 3, 1), "zb-h2": (0, 2), "zb-v": (0, 1)}


def peak_activations(name: str, ranks: int, micro_batches: int, chunks: int = 1, rank: int = 0) -> int:
    """The most activations that ``rank`` holds by formula, in stages times micro-batches; of zb-v, at most.

    Between I and W all of an activation counts. In micro-batches of a whole rank it is a v-th: interleaved
    holds p (1 + (p-1)/(p v)) of them where p divides m, zb-v p.
    """
    p, m, v = ranks, micro_batches, chunks
    group = -(-m // max(m // p, 1))  # p where p divides m
    most = {
        "naive": 1,
        "gpipe": m,
        "1f1b": p - rank,
        "interleaved": (v - 1) * group + 2 * (p - 1 - rank) + 1,
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-v": 2 * p,
    }
    return min(most[name], m * v)
