"""Rounding of tree nodes by its definition, in numpy: not the package's."""

from __future__ import annotations

import math

import numpy as np

from instep.reduce.node_format import NodeFormat
from instep.reduce.tree import Node
from instep.rng.keys import derive

WORD = (1 << 32) - 1
FORMATS = [
    NodeFormat("bfloat16"),
    NodeFormat("bfloat16", "stochastic", seed=3),
    NodeFormat("int8"),
    NodeFormat("int8", "stochastic", seed=3),
]


def mixed(x: np.ndarray | int) -> np.ndarray | int:
    """Of numbers below 2**32: products fit into 64 bits."""
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16


def random_words(seed: int, step: int, node: Node, parameter: int, num_elements: int) -> np.ndarray:
    """The 32 bits that each element is rounded by, by the formula in ``node_format.py``."""
    key = derive(seed, "node", 1, step, 0, *node)
    elements = np.arange(num_elements, dtype=np.uint64)
    granule = mixed(mixed(parameter + 1) + elements // 16 & WORD)
    granule = mixed(granule ^ (key & WORD)) + (key >> 32) & WORD
    h = (granule ^ mixed((elements % 16 + 1) * 0x9E3779B9 & WORD)) * 0x7FEB352D & WORD
    return (h ^ h >> 15) * 0x846CA68B & WORD


def by_hand(x: np.ndarray, nodes: NodeFormat, step: int, node: Node, parameter: int) -> np.ndarray:
    """The value of ``node`` for all of a parameter, in a declared step."""
    words = np.zeros(len(x), np.uint64)
    if nodes.rounding == "stochastic":
        words = random_words(nodes.seed, step, node, parameter, len(x))
    if nodes.nodes == "bfloat16":
        return to_bfloat16(x, words, nodes.rounding)
    found = np.zeros_like(x)
    for first in range(0, len(x), 4096):
        block = slice(first, first + 4096)
        largest = np.abs(x[block]).max()
        if largest == 0:
            continue
        scale = 2.0 ** math.ceil(math.log2(largest / 127))
        steps, below = x[block].astype(np.float64) / scale, np.floor(x[block].astype(np.float64) / scale)
        draws = (words[block] >> 8) / 2.0**24
        whole = np.rint(steps) if nodes.rounding == "nearest" else below + (steps - below > draws)
        found[block] = (whole * scale + 0.0).astype(np.float32)
    return found


def to_bfloat16(x: np.ndarray, words: np.ndarray, rounding: str) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    if rounding == "nearest":
        bits += 0x7FFF + (bits >> 16 & 1)
    else:
        bits += words >> 16
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)
