"""One hash of all that training carries from step to step, whoever holds which part of it.

``state_sha256`` is the SHA-256 over, for parameters, persistent buffers, then optimizer moments by name,
and the step: name, dtype, shape, and the SHA-256 of each canonical block. Whoever owns a block can hash
it, so a sharded state has the hash of a replicated one. It depends on the kind of CPU and on the builds of
the libraries, as the bits do: compare hashes of one machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.ordered.blocks import BLOCK_ELEMENTS

Entry = tuple[str, Tensor]


def block_digests(x: Tensor) -> Iterator[bytes]:
    """SHA-256 of every block of ``x`` in logical order; all NaNs count as one."""
    x = x.detach().cpu()
    if x.is_floating_point() and bool(torch.isnan(x).any()):
        x = torch.where(torch.isnan(x), torch.nan, x)
    data = x.contiguous().reshape(-1).view(torch.uint8).numpy().data
    width = BLOCK_ELEMENTS * x.element_size()
    for start in range(0, len(data), width):
        yield hashlib.sha256(data[start : start + width]).digest()


def state_entries(module: nn.Module, optimizer: Optimizer | None = None) -> list[Entry]:
    """Parameters, persistent buffers, moments, each with its name, in the order of the manifest.

    Registration order; tied parameters once. A moment is called "moment/parameter name".
    """
    parameters = list(module.named_parameters())
    entries: list[Entry] = [(name, p) for name, p in parameters]
    entries += persistent_buffers(module)
    if optimizer is not None:
        for name, p in parameters:
            moments = optimizer.state.get(p, {})
            entries += [
                (f"{key}/{name}", moments[key]) for key in sorted(moments) if torch.is_tensor(moments[key])
            ]
    return entries


def persistent_buffers(module: nn.Module) -> list[Entry]:
    """The buffers that a state dict carries, by name, in registration order."""
    kept = module.state_dict(keep_vars=True)
    return [(name, b) for name, b in module.named_buffers() if name in kept]


def state_sha256(entries: Iterable[Entry], step: int) -> str:
    """Hex digest of ``entries`` after ``step`` optimizer steps."""
    whole = hashlib.sha256(f"instep state 1 step {step}\n".encode())
    for name, x in entries:
        whole.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode() + b"\n")
        for digest in block_digests(x):
            whole.update(digest)
    return whole.hexdigest()
