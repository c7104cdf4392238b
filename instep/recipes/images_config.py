"""The options of the images recipe: a conv net on drawn shapes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from instep.checkpoint.manifest import Scalar
from instep.run.toml import scalars


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Train a small conv net with batch norm to tell ten shapes apart, with the same bits on any number of
    ranks."""

    steps: int = 600
    """Optimizer steps of the whole run; the learning rate's schedule ends there."""
    seed: int = 0
    """Key of the initial weights, the images, their order, and how they are shifted and mirrored."""
    width: int = 16
    """Channels of the first of four convolutions; each of the others has twice those of the one before."""
    lr: float = 5e-3
    """Learning rate after warm-up."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    batch_size: int = 64
    """Images per optimizer step, over all ranks."""
    micro_batch_size: int = 16
    """Images per forward and backward, which are normalised together."""
    workers: int = 0
    """Processes that draw images for a rank; with 0, the rank does it itself."""
    images: int = 20_000
    """How many images to train on; every epoch has each of them once."""
    held_out: int = 1_000
    """How many others to evaluate on."""
    eval_every: int = 100
    """Steps between two evaluations; 0 evaluates at the end only."""
    strategy: Literal["naive", "flat", "overlap", "bucketed"] = "bucketed"
    """How gradients get from the micro-batches to every rank, in stages 0 and 1."""
    shard_stage: Literal[0, 1, 2, 3] = 0
    """What is divided among the ranks: 0 nothing, 1 the optimizer's state, 2 the gradients too, 3 the weights
    too."""


# No bit of the weights depends on these.
PLACEMENT = frozenset({"workers", "strategy", "shard_stage", "eval_every"})


def numerical(config: ImagesConfig) -> dict[str, Scalar]:
    """The settings that the bits of the weights may depend on."""
    return scalars(config, without=PLACEMENT)
