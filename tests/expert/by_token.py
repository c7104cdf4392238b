"""A mixture of experts by its definition: one token after the other, in Python."""

from __future__ import annotations

import torch
from torch import Tensor

from instep.expert import MoE
from tests.parity import fill


def layer_of(
    num_experts: int, top_k: int = 2, *, width: int = 13, ff_width: int = 29, **options: object
) -> MoE:
    """A layer of odd sizes whose weights depend on their names alone, in blocks of 32."""
    layer = MoE(width, ff_width, num_experts, top_k, block=32, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in layer.named_parameters():
            fill(name, p)
    return layer


def by_token(layer: MoE, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The output of ``layer`` for ``tokens`` (N, D), and its auxiliary loss."""
    E, K = layer.num_experts, layer.top_k
    limit = len(tokens) * K
    if layer.capacity_factor is not None:
        limit = -int(-len(tokens) * K / E * layer.capacity_factor // 1)
    counts, computed, outputs = [0] * E, [0] * E, []
    mean = torch.zeros(E, dtype=tokens.dtype)
    for token in tokens:
        probabilities = torch.softmax(layer.router.weight @ token, 0)
        mean = mean + probabilities / len(tokens)
        scores = (probabilities + layer.balance_bias).tolist()
        chosen = sorted(range(E), key=lambda e: (-scores[e], e))[:K]
        total = sum(probabilities[e] for e in chosen) if layer.normalise else 1.0
        output = torch.zeros_like(token)
        for e in chosen:
            counts[e] += 1
            if computed[e] < limit:
                computed[e] += 1
                inner = torch.nn.functional.gelu(layer.up[e] @ token)
                output = output + probabilities[e] / total * (layer.down[e] @ inner)
        outputs.append(output)
    shares = torch.tensor(counts, dtype=tokens.dtype) / sum(counts)
    return torch.stack(outputs), E * (shares * mean).sum()
