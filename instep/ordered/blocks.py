"""Canonical blocks: the pieces of a parameter over which norms and hashes are formed.

Norms of shards depend on where the shards begin. Norms of fixed blocks do not, as long as every shard
edge lies on a block edge; the same holds for hashes. A block never spans two parameters.
"""

from __future__ import annotations

BLOCK_ELEMENTS = 4096
