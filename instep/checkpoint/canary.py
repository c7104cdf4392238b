"""The canary: one fixed forward and backward whose gradient every rank must reproduce before it takes part.

Versions and flags say what ought to compute alike; the canary computes, and is one more field of the
contract. Its model is small and always the same, with weights that depend on nothing but their names: a rank
that joins at step 1000 gives the hash that the run gave at its start.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from instep.rng.generators import seed_generator
from instep.rng.keys import derive
from instep.state.hash import described, state_digests

DIGITS = 16  # of the hash
SHAPES = {
    "up": (64, 96),
    "up.bias": (64,),
    "norm": (64,),
    "norm.bias": (64,),
    "down": (32, 64),
    "down.bias": (32,),
}


def canary(device: torch.device) -> str:
    """A short hash of the loss and the gradients of one fixed micro-batch on ``device``: linear layers, a
    norm, attention and cross entropy. It touches no random generator of the process."""
    with torch.inference_mode(False), torch.enable_grad():
        weights = {name: _filled(name, shape).to(device).requires_grad_() for name, shape in SHAPES.items()}
        x = torch.linspace(-2, 2, 16 * 96, device="cpu").view(16, 96).to(device)
        up = F.linear(x, weights["up"], weights["up.bias"])
        hidden = F.gelu(F.layer_norm(up, (64,), weights["norm"], weights["norm.bias"]))
        rows = F.linear(hidden, weights["down"], weights["down.bias"]).view(1, 1, 16, 32)  # batch, head
        attended = F.scaled_dot_product_attention(rows, rows, rows, is_causal=True).view(16, 32)
        loss = F.cross_entropy(attended, torch.arange(16, device=device))
        gradients = torch.autograd.grad(loss, list(weights.values()))
    named = zip(("loss", *weights), (loss, *gradients), strict=True)
    return state_digests([described(name, value.detach()) for name, value in named], 0)[0][:DIGITS]


def _filled(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values from the name alone: matrices keep the size of what passes through, vectors are near one."""
    generator = torch.Generator("cpu")
    seed_generator(generator, derive(0, "canary", name))
    drawn = torch.randn(shape, generator=generator, device="cpu")
    return drawn.mul_(shape[1] ** -0.5) if len(shape) > 1 else drawn.mul_(0.1).add_(1)
