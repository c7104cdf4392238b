"""All-gather and all-to-all of tensors, by messages where these are faster: over gloo, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.comm import direct
from instep.comm.perform import perform
from instep.net.messages import Messages
from instep.net.process_group import Group


def all_gather(group: Group, flat: Tensor, operation: str, mine: Tensor | None = None) -> None:
    """Every rank's part of ``flat``, a W-th of it, is in its place on all ranks; this rank's comes from
    ``mine``, or is there already."""
    if group.size == 1:
        return
    whole = flat.view(torch.uint8)
    parts = whole.split(len(whole) // group.size)
    own = parts[group.rank] if mine is None else mine.view(torch.uint8)
    if group.prefers_messages and flat.device.type == "cpu":
        if mine is not None:
            parts[group.rank].copy_(own)
        messages = Messages(group.pg, group.ranks)
        group.run(lambda: perform(direct.all_gather, parts, messages), operation)
    else:
        group.all_gather(whole, own, operation)


def all_to_all(
    group: Group, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], operation: str
) -> None:
    """As ``Group.all_to_all``: part d of ``x`` goes to rank d, ``out`` holds the parts in sender order."""
    if group.prefers_messages and x.device.type == "cpu":
        parts, targets = x.split(list(in_splits)), out.split(list(out_splits))
        messages = Messages(group.pg, group.ranks)
        group.run(lambda: perform(direct.all_to_all, parts, messages, out=targets), operation)
    else:
        group.all_to_all(out, x, out_splits, in_splits, operation)
