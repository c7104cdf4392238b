"""The canary: one fixed forward and backward whose gradient every rank must reproduce before it takes part.

Versions and flags say what ought to compute alike; the canary computes. It runs the model's own layers, on
tensors of training's shapes, so on the same kernels, but on a copy of the model, with weights that depend on
nothing but their names: a rank that joins at step 1000 gives the hash that the run gave at its start.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from instep.checkpoint.fleeting import Fleeting
from instep.errors import ContractBroken
from instep.mesh.device import generators
from instep.mesh.group import Group
from instep.ordered.hash import Described, described, whole_sha256
from instep.ordered.keys import derive, seed_generator

LossOf = Callable[[nn.Module], Tensor]
"""The loss of a model on one micro-batch, which is the same at each call."""
OPERATION = "the comparison of canaries"
DIGITS = 16  # of a hash, in a message


def canary(module: nn.Module, loss_of: LossOf, *, seed: int, device: torch.device) -> str:
    """Hex SHA-256 of the loss and the gradients that ``loss_of`` has on a copy of ``module``.

    The copy's weights, its buffers and what is drawn in forward depend on ``seed`` and names alone; it is in
    training or evaluation mode as ``module`` is. Nothing of ``module`` changes, nor do the random generators,
    and hooks of a wrapper do not run. Takes a forward, a backward, and the memory of a second model with
    gradients, until it returns; of a ``module`` on the meta device, that of one unit.
    """
    model = copy.deepcopy(module)
    _fill_buffers(model)
    with _drawing(seed, device), torch.enable_grad():
        if any(p.is_meta for p in model.parameters()):
            loss, gradients = Fleeting(model, partial(_fill, seed), device).gradients(loss_of)
        else:
            loss, gradients = _gradients(model, loss_of, seed)
    return whole_sha256([described("loss", loss), *gradients], 0)


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


def _gradients(model: nn.Module, loss_of: LossOf, seed: int) -> tuple[Tensor, list[Described]]:
    """As ``Fleeting.gradients``, with the whole model in memory."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            _fill(seed, name, p)
    loss = loss_of(model)
    loss.backward()
    came = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return loss, [described(name, _dense(x)) for name, x in came]


def _fill(seed: int, name: str, p: Tensor) -> None:
    """Values from the name alone.

    Matrices keep the size of what passes through them, and vectors are near one, so that neither numbers nor
    gradients vanish or overflow.
    """
    generator = torch.Generator()
    seed_generator(generator, derive(seed, "canary", name))
    kind = p.dtype if p.is_complex() else torch.float32
    drawn = torch.randn(p.shape, generator=generator, dtype=kind)
    p.copy_(drawn.mul_(max(p.shape[1:].numel(), 1) ** -0.5) if p.ndim > 1 else drawn.mul_(0.1).add_(1))


@torch.no_grad()
def _fill_buffers(model: nn.Module) -> None:
    """Those that training changes; others, which a state dict does not carry, are constants, and stay."""
    kept = model.state_dict(keep_vars=True)
    for name, b in model.named_buffers():
        if name in kept:
            b.fill_(b.is_floating_point())


@contextmanager
def _drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the default generators draw from ``seed``; then they go on where they were."""
    used = generators(device)
    before = [generator.get_state() for generator in used]
    try:
        for generator in used:
            seed_generator(generator, derive(seed, "canary"))
        yield
    finally:
        for generator, state in zip(used, before, strict=True):
            generator.set_state(state)


def _dense(x: Tensor) -> Tensor:
    return x.to_dense() if x.is_sparse else x
