"""Do all ranks hold the same model, and wrap it in the same way? Asked once, when it is wrapped.

Two ranks whose layers of the same shape are registered in another order would average the gradient of one
with that of the other, and nothing later could tell. So names, order, shapes, dtypes and requires_grad are
compared, by a hash first, and in full only to name the first difference. So are the options, because
``ordered=False`` on one rank alone would start another collective than the others have started.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from instep.mesh.group import Group
from instep.ordered.hash import block_digests
from instep.step.agree import first_difference


def manifest(module: nn.Module) -> list[str]:
    """One line per parameter and buffer of ``module``, in registration order."""
    lines = [
        f"parameter {_describe(name, p)}, requires_grad={p.requires_grad}"
        for name, p in module.named_parameters()
    ]
    return lines + [f"buffer {_describe(name, b)}" for name, b in module.named_buffers()]


def agree_on_structure(module: nn.Module, options: Mapping[str, object], group: Group) -> None:
    """Check that every rank of ``group`` has the same manifest, and the same ``options``. Collective.

    Raises:
        ValueError: they differ; on every rank, naming the first difference.
    """
    mine = manifest(module), [f"{name}={value!r}" for name, value in options.items()]
    text = json.dumps(mine).encode()
    operation = "the comparison of models"
    digests = group.all_gather_bytes(hashlib.sha256(text).digest(), operation)
    if len(set(digests)) == 1:
        return
    others = [
        json.loads(data) for data in group.all_gather_bytes(text, "the comparison of models, line by line")
    ]
    if found := first_difference([entries for entries, _ in others], group.ranks):
        raise ValueError(
            f"the ranks hold different models; the first difference is entry {found[0]}: {found[1]}: build "
            "the same modules in the same order"
        )
    found = first_difference([options for _, options in others], group.ranks)
    difference = "" if found is None else f": entry {found[0]}: {found[1]}"
    raise ValueError(f"the ranks wrap their models with different options{difference}")


def agree_on_values(module: nn.Module, group: Group) -> None:
    """Check that every rank of ``group`` has the same bits in every parameter and buffer. Collective.

    Raises:
        ValueError: they differ; on every rank, naming the first parameter or buffer and the odd ranks.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    mine = b"".join(hashlib.sha256(b"".join(block_digests(x))).digest() for _, x in tensors)
    everyone = group.all_gather_bytes(mine, "the comparison of values")
    for i, (name, _) in enumerate(tensors):
        digests = [data[32 * i : 32 * i + 32] for data in everyone]
        odd = [rank for rank, digest in zip(group.ranks, digests, strict=True) if digest != digests[0]]
        if odd:
            raise ValueError(
                f"{name!r} has other values on rank {', '.join(map(str, odd))} than on {group.ranks[0]}: "
                "load the same checkpoint everywhere, or pass init_sync=True to take rank 0's values"
            )


def broadcast_values(module: nn.Module, group: Group, *, but: Container[int] = ()) -> None:
    """Overwrite every parameter and buffer with those of the group's first rank. Collective.

    Those with an identity in ``but`` are left alone, and those on the meta device, which have no values.
    """
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if id(x) in but or x.is_meta:
            continue
        mine = x.detach().contiguous()
        # As bytes: backends know some dtypes and not others.
        value = mine.reshape(-1).view(torch.uint8).clone()
        if value.numel():
            group.broadcast(value, f"the broadcast of {name!r}")
        if not torch.equal(value, mine.reshape(-1).view(torch.uint8)):
            x.detach().copy_(value.view(x.dtype).view(x.shape))


def _describe(name: str, x: Tensor) -> str:
    return f"{name!r}, shape {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}"
