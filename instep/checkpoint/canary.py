"""The canary: one fixed forward and backward whose gradient every rank must reproduce before it takes part.

Versions and flags say what ought to compute alike; the canary computes. Its model is small and always the
same, with weights that depend on nothing but their names: a rank that joins at step 1000 gives the hash that
the run gave at its start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from instep.errors import ContractBroken
from instep.net.process_group import Group
from instep.rng.generators import seed_generator
from instep.rng.keys import derive
from instep.state.hash import described, state_digests

OPERATION = "the comparison of canaries"
DIGITS = 16  # of a hash, in a message
SHAPES = {
    "up": (64, 96),
    "up.bias": (64,),
    "norm": (64,),
    "norm.bias": (64,),
    "down": (32, 64),
    "down.bias": (32,),
}


def canary(device: torch.device) -> str:
    """Hex SHA-256 of the loss and the gradients of one fixed micro-batch on ``device``: linear layers, a
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
    return state_digests([described(name, value.detach()) for name, value in named], 0)[0]


def _filled(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values from the name alone: matrices keep the size of what passes through, vectors are near one."""
    generator = torch.Generator("cpu")
    seed_generator(generator, derive(0, "canary", name))
    drawn = torch.randn(shape, generator=generator, device="cpu")
    return drawn.mul_(shape[1] ** -0.5) if len(shape) > 1 else drawn.mul_(0.1).add_(1)


def agree_on_canary(group: Group, digest: str, recorded: str | None = None) -> None:
    """Raise ``ContractBroken``, on all ranks alike, unless all have the same ``digest``. Collective.

    With ``recorded``, the digest that the run has had so far, it has to be that one. Otherwise the majority
    is right; where there is none, all are named.
    """
    everyone = [data.decode(errors="replace") for data in group.all_gather_bytes(digest.encode(), OPERATION)]
    agreed, votes = Counter(everyone).most_common(1)[0]
    right = recorded or (agreed if 2 * votes > group.size else None)
    odd = [rank for rank, its in zip(group.ranks, everyone, strict=True) if its != right]
    if not odd:
        return
    digests = ", ".join(
        f"rank {rank} {its[:DIGITS]}" for rank, its in zip(group.ranks, everyone, strict=True)
    )
    raise ContractBroken(
        f"{_verdict(odd, right, recorded)}: {digests}. The gradient of one fixed micro-batch must have the "
        "same bits on every rank and at every start: look for another kind of processor, library build or "
        "number of threads, an environment variable that chooses kernels, or faulty hardware"
    )


def _verdict(odd: Sequence[int], right: str | None, recorded: str | None) -> str:
    names = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
    if recorded:
        return f"{names} would compute other bits than this run, whose canary is {recorded[:DIGITS]}"
    if right is None:
        return f"{names} compute other bits than each other, and no majority says which is right"
    return f"{names} would compute other bits than the majority, whose canary is {right[:DIGITS]}"
