"""How much memory the state of training takes on a rank, by formula: to hold what is counted against.

A weight and its gradient are of the parameter's type, and the optimizer keeps what it keeps for each element:
in float32 that is 16 bytes per parameter with AdamW, 12 with SGD and momentum, 8 with plain SGD. Source: S.
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054,
section 3.1, without the halves. Its stages divide them among the W ranks of a shard group, here for AdamW:

    stage 0    weight 4      gradient 4      moments 8          16
    stage 1    4             4               8 / W              8 + 8 / W
    stage 2    4             4 / W           8 / W              4 + 12 / W
    stage 3    4 / W         4 / W           8 / W              16 / W, and what is gathered

Of a pipeline these are a rank's own layers, whose moments a sharded optimizer divides among the ranks that
have the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from instep.checkpoint.registered import Registered
from instep.state.homes import Home, autograd_leaf, homes, offered, shape_of, undivided

Parts = Counter[tuple[str, int]]
"""Bytes, by what they are for and by the number of ranks that divide them."""


def state_bytes(registered: Registered) -> dict[str, int | float] | None:
    """Bytes of one rank: "parameters", "gradients", "optimizer", and "bytes_per_parameter" of all three.

    After a step, when optimizers have their state; None where this rank has none of it to judge by.
    """
    parts, seen, lived_in = Parts(), dict[int, Tensor](), homes_of(registered)
    for name, module in registered.modules().items():
        stage = stage_of(registered.models[name])
        for p in module.parameters():
            if id(p) not in seen:
                seen[id(p)] = p
                _add_parameter(parts, p, lived_in.get(id(p)), stage)
    for optimizer in registered.optimizers.values():
        each = _bytes_per_element(optimizer)
        if each is None:
            return None
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for shares, its in _by_shares(trained, lived_in).items():
            parts["optimizer", shares] += round(each * sum(shape_of(p).numel() for p in its))
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for (purpose, ranks), whole in parts.items():
        found[purpose] += -(-whole // ranks)
    size = sum(shape_of(p).numel() for p in seen.values())
    per_parameter = round(sum(found.values()) / max(size, 1), 2)
    return {
        "bytes_per_parameter": int(per_parameter) if per_parameter.is_integer() else per_parameter,
        **found,
    }


def stage_of(model: Any) -> int:
    """Of ``fully_shard``, as the wrapped ``model`` says; else 0."""
    return int((getattr(model, "placement", None) or {}).get("stage", 0))


def homes_of(registered: Registered) -> dict[int, Home]:
    """Where parameters live, by their identity, of those whose memory is divided, or stepped in pieces: the
    innermost home."""
    found = [there for module in registered.modules().values() for there in homes(module.parameters())]
    divided = [offered(optimizer) for optimizer in registered.optimizers.values()]
    found += [there for its in divided if its is not None for there in its.homes]
    return {id(p): there for there in found for p in there.parameters}


def _by_shares(parameters: Iterable[Tensor], lived_in: Mapping[int, Home]) -> dict[int, list[Tensor]]:
    """Those of which this rank has some, by the number of ranks that they are divided among."""
    found: dict[int, list[Tensor]] = {}
    for p in parameters:
        there = lived_in.get(id(p))
        found.setdefault(1 if there is None else there.num_shares(p), []).append(p)
    found.pop(0, None)
    return found


def _add_parameter(parts: Parts, p: Tensor, there: Home | None, stage: int) -> None:
    ranks = 1 if there is None else there.num_shares(p)
    if not ranks:
        return
    # What is gathered may be of another type than the pieces that are stepped.
    kept = p if there is None or not there.held else there.held[0].tensor
    size, whole = shape_of(p).numel(), autograd_leaf(p)
    nbytes = size * kept.itemsize
    keeps_whole = there is None or there.resident or stage == 2
    if keeps_whole:
        parts["parameters", 1] += size * whole.itemsize
    if not keeps_whole or whole.dtype != kept.dtype:  # else what is stepped is a part of the whole one
        parts["parameters", ranks] += nbytes
    if p.requires_grad:
        parts["gradients", ranks if stage >= 2 else 1] += nbytes


def _bytes_per_element(optimizer: Optimizer) -> float | None:
    """That ``optimizer`` keeps for each element of what it steps, in tensors of the same shape."""
    divided = offered(optimizer) or undivided(optimizer)
    found = [(x.tensor, divided.state_of(x)) for x in divided.held.values() if x.tensor.numel()]
    if not found:
        return None
    stepped = [(tensor, state) for tensor, state in found if state]
    kept = sum(
        value.numel() * value.itemsize
        for tensor, state in stepped
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == tensor.shape and name != "step"
    )
    return kept / max(sum(tensor.numel() for tensor, _ in stepped), 1)
