"""Broadcast of a large tensor: scatter it down the tree, then let everybody pass parts around the ring.

The tree's root sends all of x log2 W times. Here it sends every part once; the ranks, idle before, do the
rest. W = 4, root 0, x = abcd:

     scatter    0: abcd -> 2: cd       0: ab -> 1: b, 2: cd -> 3: d       each part goes to its owner
     ring       a b c d -> everybody, in W-1 rotations

W ranks, x of S bytes: ceil(log2 W) + W - 1 steps; the root sends at most 2 S (W-1)/W bytes;

    (ceil(log2 W) + W - 1) alpha + 2 S (W-1)/W beta

instead of the tree's ceil(log2 W) (alpha + S beta): better where S is large and W more than two. Source:
van de Geijn's algorithm, as in Thakur, Rabenseifner, Gropp 2005 (see ``tree``), on broadcast.
"""

from __future__ import annotations

from torch import Tensor

from instep.comm import ring
from instep.comm.binomial import children, parent, subtree
from instep.comm.cuts import edges
from instep.comm.messages import Messages, chunks, flat


def broadcast(x: Tensor, messages: Messages, root: int = 0) -> None:
    """``x`` of rank ``root`` overwrites everybody's."""
    _scatter(x, messages, root)
    parts = chunks(x, messages.size)
    ring.all_gather([parts[(rank - root) % messages.size] for rank in range(messages.size)], messages)


def _scatter(x: Tensor, messages: Messages, root: int) -> None:
    """Part v of ``x`` goes to the v-th rank from ``root``, within one message for all below a child."""
    size = messages.size
    at = edges(x.numel(), size)
    v = (messages.rank - root) % size

    def below(node: int) -> Tensor:
        nodes = subtree(node, size)
        return flat(x)[at[nodes.start] : at[nodes.stop]]

    if v:
        messages.recv(below(v), (parent(v) + root) % size)
    for child in children(v, size):
        messages.send(below(child), (child + root) % size)
