"""What a schedule costs by formula, to be printed beside what is simulated and measured.

p ranks, m micro-batches, v stages per rank; F, I, W: what a rank computes for one micro-batch in all its
stages (forward, input-gradient, weight-gradient), s = F + I + W; C: what a message takes. The cost is the
longest time of any rank from its first computation to its last:

    naive         m (p s + 2(p-1) C)
    gpipe         (m+p-1) s + 2(p-1) C
    1f1b          (m+p-1) s + (2(p-1) m/p + 2(p-2)) C       a round trip every p micro-batches
    interleaved   m s + (p-1) s/v + (2p(v-1) + 2(p-1)) C    v times the messages, a v-th of the bubble
    zb-h1         m s + (p-1)(F+I-W) + 4(p-1) C
    zb-h2         m s + (p-1)(F+I-2W) + 2(p-1) C
    zb-v          m s + (6p-8) C                            with F = I = W

They are exact for equal stages and messages that are short beside computation; 1f1b's C with p dividing m,
interleaved with p dividing m, zb-h1 from p micro-batches on, zb-h2 and zb-v from 2p - 1 on. One rank sends
nothing. The bubble rate is (cost - m s) / cost.

Source: P. Qi et al., "Zero Bubble Pipeline Parallelism", 2024, but for the terms in C, which are derived:
those of 1f1b, zb-h1 and zb-h2 give its table 5 to the last digit. Its interleaved figures are p C lower.
"""

from __future__ import annotations


def cost_s(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    forward_s: float,
    input_gradient_s: float,
    weight_gradient_s: float,
    message_s: float = 0.0,
) -> float:
    """The longest time of any rank from its first computation to its last, in seconds.

    Raises:
        ValueError: there is no formula for a schedule of this name.
    """
    p, m, v = ranks, micro_batches, chunks
    s = forward_s + input_gradient_s + weight_gradient_s
    forms = {
        "naive": (m * (p - 1) * s, m * 2 * (p - 1)),
        "gpipe": ((p - 1) * s, 2 * (p - 1)),
        "1f1b": ((p - 1) * s, 2 * (p - 1) * m / p + 2 * (p - 2)),
        "interleaved": ((p - 1) * s / v, 2 * p * (v - 1) + 2 * (p - 1)),
        "zb-h1": ((p - 1) * (s - 2 * weight_gradient_s), 4 * (p - 1)),
        "zb-h2": ((p - 1) * (s - 3 * weight_gradient_s), 2 * (p - 1)),
        "zb-v": (0.0, 6 * p - 8),
    }
    if name not in forms:
        raise ValueError(f"expected a schedule of {', '.join(forms)}, got {name!r}")
    fill_s, messages = forms[name]
    return m * s + fill_s + (messages * message_s if p > 1 else 0.0)


def is_exact(name: str, ranks: int, micro_batches: int) -> bool:
    """Whether ``cost_s`` is that of equal stages and messages that take nothing, not less."""
    least = {"zb-h1": ranks, "zb-h2": 2 * ranks - 1, "zb-v": 2 * ranks - 1}.get(name, 1)
    return micro_batches >= least and (name != "interleaved" or micro_batches % ranks == 0)
