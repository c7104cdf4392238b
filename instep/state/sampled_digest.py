"""A digest of a few elements of the tensors in nested values: do two ranks have the same data?"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from instep.memory import as_bytes

NUM_TENSORS = 16  # at most
NUM_ELEMENTS = 256  # of each, about


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in nested containers and dataclasses, and among the attributes of other objects."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            attributes = getattr(leaf, "__dict__", {}).values()
            yield from (value for value in attributes if isinstance(value, Tensor))


def sampled_digest(values: Any, *, min_distinct: int = 1) -> int:
    """60 bits of a sample of the tensors in ``values``.

    Returns:
        0 where no tensor has ``min_distinct`` distinct values in its sample, or where values cannot be read.
    """
    hashed, distinct = hashlib.blake2b(digest_size=8), 0
    try:
        for x in islice(tensors_in(values), NUM_TENSORS):
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return 0
            # An odd distance: an even one may come to the same column of every row, a border of images.
            at = torch.arange(0, x.numel(), x.numel() // NUM_ELEMENTS | 1, device=x.device)
            x = x.detach()
            sample = (x.flatten()[at] if x.is_contiguous() else x[torch.unravel_index(at, x.shape)]).cpu()
            hashed.update(f"{x.dtype} {tuple(x.shape)}".encode())
            hashed.update(as_bytes(sample).numpy().data)
            distinct = max(distinct, len(set(sample.tolist())))
    except Exception:  # without values, or not to be read now: sparse, meta, vmap, a field that is not set
        return 0
    return int.from_bytes(hashed.digest(), "little") >> 4 if distinct >= min_distinct else 0
