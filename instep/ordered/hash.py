"""One hash of all that training carries from step to step, whoever holds which part of it.

``state_sha256`` is the SHA-256 over, for parameters, persistent buffers, then optimizer moments by name,
and the step: name, dtype, shape, and the SHA-256 of each canonical block. Whoever owns a block can hash
it, so a sharded state has the hash of a replicated one. It depends on the kind of CPU and on the builds of
the libraries, as the bits do: compare hashes of one machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.ordered.blocks import BLOCK_ELEMENTS
from instep.ordered.parts import Part, Row, own_runs

Entry = tuple[str, Tensor]
Described = tuple[str, str, Sequence[int], bytes]
"""An entry's name, dtype as torch writes it, shape, and the SHA-256 of each of its blocks in a row."""
DIGEST_BYTES = 32
SHORT = 16  # hex digits of a hash that need not withstand an adversary


def canonical_bytes(x: Tensor) -> memoryview:
    """The bytes of ``x`` in logical order, all NaNs as one: a view where ``x`` is contiguous and on CPU."""
    x = x.detach().cpu()
    if x.is_floating_point() and _may_have_nan(x):
        x = torch.where(torch.isnan(x), torch.nan, x)
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _may_have_nan(x: Tensor) -> bool:
    if x.itemsize == 1:  # float8 has no sum
        return bool(torch.isnan(x).any())
    return math.isnan(x.sum().item())  # in a third of the time; so is inf - inf


def block_digests(x: Tensor) -> Iterator[bytes]:
    """SHA-256 of every block of ``x`` in logical order; all NaNs count as one."""
    data = canonical_bytes(x)
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
    return state_digests(entries, step)[0]


def state_digests(entries: Iterable[Entry], step: int) -> tuple[str, dict[str, str]]:
    """``state_sha256`` and, by name, what ``entry_digests`` gives: every block is hashed once."""
    return described_digests(_described(entries), step)


def entry_digests(entries: Iterable[Entry]) -> dict[str, str]:
    """16 hex digits of each entry's SHA-256, by its name: which part of a state is another."""
    return {one[0]: _short(_to_hash(one)) for one in _described(entries)}


def own_digests(parts: Sequence[Part], rows: Sequence[Row], rank: int) -> bytes:
    """The digests of all blocks that ``rank``, which holds ``parts``, answers for in ``rows``."""
    return b"".join(
        b"".join(block_digests(part.blocks(run.first, run.last)))
        for _, run, part in own_runs(parts, rows, rank)
    )


def whole_digests(everyone: Sequence[bytes], rows: Sequence[Row], step: int) -> tuple[str, dict[str, str]]:
    """``state_digests`` of the state of which each rank has told its ``own_digests``."""
    return described_digests(_put_together(everyone, rows), step)


def described_digests(described: Iterable[Described], step: int) -> tuple[str, dict[str, str]]:
    """``state_digests`` of entries whose blocks are hashed already."""
    whole, parts = hashlib.sha256(f"instep state 1 step {step}\n".encode()), {}
    for one in described:
        data = _to_hash(one)
        whole.update(data)
        parts[one[0]] = _short(data)
    return whole.hexdigest(), parts


def whole_sha256(described: Iterable[Described], step: int) -> str:
    """``state_sha256`` of entries whose blocks are hashed already."""
    return described_digests(described, step)[0]


def described(name: str, x: Tensor) -> Described:
    """``x`` with its blocks hashed, after which it is not needed any more."""
    return name, str(x.dtype), x.shape, b"".join(block_digests(x))


def _described(entries: Iterable[Entry]) -> Iterator[Described]:
    return (described(name, x) for name, x in entries)


def _put_together(everyone: Sequence[bytes], rows: Sequence[Row]) -> Iterator[Described]:
    """Each rank's digests stand in the order of its runs."""
    told = [0] * len(everyone)  # bytes of each rank's that are used
    for row in rows:
        digests = []
        for run in row.runs:
            begin = told[run.rank]
            told[run.rank] += (run.last - run.first) * DIGEST_BYTES
            digests.append(everyone[run.rank][begin : told[run.rank]])
        yield row.name, row.dtype, row.shape, b"".join(digests)


def _to_hash(described: Described) -> bytes:
    """What a hash has to know of an entry."""
    name, dtype, shape, digests = described
    return json.dumps([name, dtype, list(shape)]).encode() + b"\n" + digests


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:SHORT]
