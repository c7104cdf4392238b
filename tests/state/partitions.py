"""Random tensors in random partitions: boxes, and flat ranges of boxes, each held by one rank or several."""

from __future__ import annotations

import math
from random import Random

import torch
from torch import Tensor

from instep.state.shards import MODEL, OPTIMIZER, Box, Shard, held_shape
from tests.state_oracle import Entry

RANKS = 4
SHAPES = [(), (0, 3), (7,), (4096,), (9001,), (70, 130), (130, 70), (64, 128), (3, 40, 77), (2, 3, 5, 300)]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]


def pieces(shape: tuple[int, ...], random: Random) -> list[tuple[Box | None, int, int]]:
    """A partition into at most one piece per rank: boxes that are split, then flat ranges of them."""
    whole: Box = tuple((0, size) for size in shape)
    boxes = [whole]
    while random.random() < 0.7 and len(boxes) < RANKS and math.prod(shape):
        box = boxes.pop(random.randrange(len(boxes)))
        dim = random.randrange(len(shape)) if shape else 0
        if not shape or box[dim][1] - box[dim][0] < 2:
            boxes.append(box)
            break
        (start, stop), at = box[dim], random.randrange(box[dim][0] + 1, box[dim][1])
        boxes += [(*box[:dim], ends, *box[dim + 1 :]) for ends in ((start, at), (at, stop))]
    found = [(box, 0, math.prod(stop - start for start, stop in box)) for box in boxes]
    while random.random() < 0.5 and len(found) < RANKS:
        box, first, last = found.pop(random.randrange(len(found)))
        at = random.randrange(first, last) if last else 0
        found += [(box, *ends) for ends in ((first, at), (at, last)) if ends[0] < ends[1]]
        if not last:
            found.append((box, 0, 0))
            break
    return [(None if box == whole else box, first, last) for box, first, last in found]


def shards(tensors: dict[str, Tensor], seed: int, rank: int) -> list[Shard]:
    """What ``rank`` has of ``tensors``; a piece may be held by several ranks."""
    random, mine = Random(seed), []
    for place, (name, x) in enumerate(tensors.items()):
        found = pieces(tuple(x.shape), random)
        owners = [*range(len(found)), *(random.randrange(len(found)) for _ in range(RANKS - len(found)))]
        random.shuffle(owners)
        box, first, last = found[owners[rank]]
        inside = x[tuple(slice(*ends) for ends in box)] if box else x
        value = inside.reshape(-1)[first:last].view(held_shape(tuple(x.shape), first, last, box)).clone()
        holders = tuple(r for r, piece in enumerate(owners) if piece == owners[rank])
        mine.append(Shard(name, tuple(x.shape), x.dtype, first, last, (place, ""), box, value, holders))
    return mine


def drawn(seed: int) -> dict[str, Tensor]:
    random, found = Random(seed), {}
    generator = torch.Generator().manual_seed(seed)
    for i in range(3):
        shape, dtype = random.choice(SHAPES), random.choice(DTYPES)
        kind = OPTIMIZER if i == 2 else MODEL
        x = torch.randn(shape, generator=generator)
        x.masked_fill_(x < -2, torch.nan if i else 0.0)
        found[f"{kind}m/{i}"] = x.to(dtype)
    return found


def entries(tensors: dict[str, Tensor]) -> list[Entry]:
    return [(name.partition(":")[2], x) for name, x in tensors.items()]
