"""Rounding of tree nodes by its definition, element by element: slow, and not the package's."""

from __future__ import annotations

import math

import numpy as np

from instep.ordered.keys import derive
from instep.ordered.node_format import NodeFormat
from instep.ordered.tree import Node

WORD = (1 << 32) - 1
FORMATS = [
    NodeFormat("bfloat16"),
    NodeFormat("bfloat16", "stochastic", seed=3),
    NodeFormat("int8"),
    NodeFormat("int8", "stochastic", seed=3),
]


def mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16


def random_word(seed: int, step: int, node: Node, parameter: int, element: int) -> int:
    """The 32 bits that an element is rounded by, by the formula in ``rounding.py``, in Python's integers."""
    key = derive(seed, "node", 1, step, 0, *node)
    granule = mixed(mixed(parameter + 1) + element // 16 & WORD)
    granule = mixed(granule ^ key & WORD) + (key >> 32) & WORD
    h = (granule ^ mixed((element % 16 + 1) * 0x9E3779B9 & WORD)) * 0x7FEB352D & WORD
    return (h ^ h >> 15) * 0x846CA68B & WORD


def by_hand(x: np.ndarray, nodes: NodeFormat, step: int, node: Node, parameter: int) -> np.ndarray:
    """The value of ``node`` for all of a parameter, in a declared step, element by element."""
    words = [0] * len(x)
    if nodes.rounding == "stochastic":
        words = [random_word(nodes.seed, step, node, parameter, i) for i in range(len(x))]
    if nodes.nodes == "bfloat16":
        return np.array([to_bfloat16(v, w, nodes.rounding) for v, w in zip(x, words, strict=True)])
    found = np.zeros_like(x)
    for first in range(0, len(x), 4096):
        block = slice(first, first + 4096)
        largest = np.abs(x[block]).max()
        if largest == 0:
            continue
        scale = 2.0 ** math.ceil(math.log2(largest / 127))
        steps, below = x[block].astype(np.float64) / scale, np.floor(x[block].astype(np.float64) / scale)
        draws = np.array([word >> 8 for word in words[block]]) / 2.0**24
        whole = np.rint(steps) if nodes.rounding == "nearest" else below + (steps - below > draws)
        found[block] = (whole * scale + 0.0).astype(np.float32)
    return found


def to_bfloat16(x: np.float32, word: int, rounding: str) -> np.float32:
    bits = int(np.float32(x).view(np.uint32))
    if rounding == "nearest":
        bits += 0x7FFF + (bits >> 16 & 1)
    else:
        bits += word >> 16
    return np.uint32(bits & 0xFFFF0000).view(np.float32)
