"""The state hash once more, written down from its definition: of whole tensors, on one rank."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.reduce.blocks import BLOCK_ELEMENTS

Entry = tuple[str, Tensor]


def state_entries(module: nn.Module, optimizer: Optimizer | None = None) -> list[Entry]:
    """Parameters, persistent buffers, then "moment/parameter", in registration order; tied ones once."""
    kept = module.state_dict()
    parameters: list[Entry] = list(module.named_parameters())
    entries = parameters + [(name, b) for name, b in module.named_buffers() if name in kept]
    for name, p in parameters if optimizer is not None else ():
        state = optimizer.state.get(p, {})
        entries += [(f"{key}/{name}", state[key]) for key in sorted(state) if torch.is_tensor(state[key])]
    return entries


def state_digests(entries: Iterable[Entry], step: int) -> tuple[str, dict[str, str]]:
    whole, parts = hashlib.sha256(f"instep state 1 step {step}\n".encode()), {}
    for name, x in entries:
        head = json.dumps([name, str(x.dtype), list(x.shape)]).encode()
        data = head + b"\n" + b"".join(hashlib.sha256(block).digest() for block in _blocks(x))
        whole.update(data)
        parts[name] = hashlib.sha256(data).hexdigest()[:16]
    return whole.hexdigest(), parts


def state_sha256(entries: Iterable[Entry], step: int) -> str:
    return state_digests(entries, step)[0]


def sampled_blocks(entries: Iterable[Entry], step: int, every: int) -> list[tuple[str, int, str]]:
    numbered = enumerate((name, i, block) for name, x in entries for i, block in enumerate(_blocks(x)))
    return [
        (name, i, f"{zlib.crc32(block):08x}")
        for number, (name, i, block) in numbered
        if (number + step) % every == 0
    ]


def _blocks(x: Tensor) -> Iterator[bytes]:
    """The bytes of each block in logical order, all NaNs as one."""
    flat = x.detach().cpu().resolve_conj().contiguous().view(-1)
    flat = torch.where(flat.isnan(), torch.nan, flat) if flat.is_floating_point() else flat
    for start in range(0, len(flat), BLOCK_ELEMENTS):
        yield flat[start : start + BLOCK_ELEMENTS].view(torch.uint8).numpy().tobytes()
