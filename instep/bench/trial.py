"""A model that takes no time, for a proof that the ranks of this machine train what one process does."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.ordered.keys import derive, initialize

TRIAL_MODEL = GPTConfig(vocab_size=64, context=16, layers=2, width=32, heads=2, dropout=0.1)


def trial(rank: int) -> tuple[nn.Module, Tensor]:
    """A model small enough to take no time, and a batch of ``rank``; the ranks' batches differ in size."""
    module = GPT(TRIAL_MODEL)
    initialize(module, seed=0)
    generator = torch.Generator().manual_seed(derive(0, "proof", rank) % (1 << 31))
    tokens = torch.randint(TRIAL_MODEL.vocab_size, (2 + rank, TRIAL_MODEL.context + 1), generator=generator)
    return module, tokens


def trial_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss that goes with ``trial``."""
    logits = model(tokens[:, :-1].contiguous())  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
