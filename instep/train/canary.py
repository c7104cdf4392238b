"""The text recipe's canary: the model at work on one micro-batch of bytes that nobody wrote."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from instep.checkpoint.canary import canary
from instep.ordered.keys import derive, seed_generator
from instep.train.config import Config
from instep.train.losses import text_loss

SEED = 0  # of all runs: what a machine computes has nothing to do with a run's seed
NUM_BYTES = 256


def synthetic_windows(config: Config) -> Tensor:
    """One micro-batch of training's shape, (micro_size, context + 1) int64, the same at every call."""
    generator = torch.Generator()
    seed_generator(generator, derive(SEED, "canary", "text"))
    shape = (config.batch.micro_size, config.model.context + 1)
    return torch.randint(NUM_BYTES, shape, generator=generator)


def text_canary(module: nn.Module, config: Config, device: torch.device) -> str:
    """The canary of ``module``, wrapped or not yet; nothing of it changes."""
    windows = synthetic_windows(config)

    def loss_of(model: nn.Module) -> Tensor:
        return text_loss(model, windows, device=device, autocast=config.autocast)

    return canary(module, loss_of, seed=SEED, device=device)
