"""The images recipe: a small conv net with batch norm learns ten shapes, drawn by a program.

    instep run -n 2 instep/recipes/images.py                 on two ranks, any of which may die
    instep run -n 3 instep/recipes/images.py --steps 200     on three: the same bits
    python instep/recipes/images.py --help                   also: torchrun ... instep/recipes/images.py

An ordinary script on public names, to be read from top to bottom, and to begin one's own with: the data, the
model, the optimizer, the loop, and how good it is in the end.
"""

from __future__ import annotations

from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import instep
from instep.data.shapes import CLASSES, Shapes
from instep.models.conv import SmallConvNet
from instep.recipes.images_config import ImagesConfig, numerical

SHIFT = 2  # pixels, at most


class Augmented:
    """``images``, each shifted and mirrored at random whenever it is read.

    ``instep.Loader`` keys the generator by (seed, epoch, image), so an image is shifted alike in whichever
    process, on whichever rank, and when a step is made again.
    """

    def __init__(self, images: Shapes) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image, label = self.images[i]
        down, right, mirror = torch.randint(2 * SHIFT + 1, (3,)).tolist()
        image = image.roll((down - SHIFT, right - SHIFT), (1, 2))
        return (image.flip(2) if mirror > SHIFT else image), label


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """(B, num_classes), of images (B, 3, 32, 32) uint8."""
    return model(images.float() / 127.5 - 1)


@torch.no_grad()
def accuracy(model: nn.Module, held_out: Shapes, size: int) -> float:
    """The share of the held-out images that the model tells right, each looked at by one rank. Collective."""
    model.eval()
    rank, world_size = instep.get("rank"), instep.get("ws")
    right = []
    for first in range(rank * size, len(held_out), world_size * size):  # ranks take turns
        images, labels = default_collate(
            [held_out[i] for i in range(first, min(first + size, len(held_out)))]
        )
        right.append(logits_of(model, images).argmax(dim=1) == labels)
    model.train()
    return instep.mean(right)  # over the images of all ranks


def main(config: ImagesConfig) -> float:
    """Train as ``config`` says; the accuracy in the end."""
    # Joins whoever has started this process, or is alone; recorded in a new folder in runs/.
    run = instep.Run(seed=config.seed, config=config, contract=numerical(config))

    train = Augmented(Shapes(config.images, seed=config.seed))
    held_out = Shapes(config.held_out, seed=config.seed, first=config.images)
    data = instep.Loader(
        train, config.batch_size, config.micro_batch_size, num_workers=config.workers, seed=config.seed
    )

    torch.manual_seed(config.seed)  # of the initial weights
    net = SmallConvNet(len(CLASSES), widths=[config.width * k for k in (1, 2, 4, 8)])
    model: Any
    optimizer: torch.optim.Optimizer
    if config.shard_stage >= 2:
        model = instep.fully_shard(net, run.mesh, stage=config.shard_stage)
    else:
        model = instep.DataParallel(net, process_group=run.mesh, strategy=config.strategy)
    if config.shard_stage == 1:
        optimizer = instep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=config.lr)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(  # up for a while, then down along a cosine
        optimizer, config.lr, total_steps=config.steps, pct_start=0.15, cycle_momentum=False
    )

    # Whatever changes from step to step: it is kept, and comes back when a rank is lost.
    run.register(model=model, optimizer=optimizer, schedule=schedule, data=data)
    found = float("nan")
    for step in run.steps(config.steps):  # goes on where the newest state is
        with step:  # what a lost rank breaks in here is made again, by all
            losses = []
            for micro_batch in model.micro_batches(data):
                images, labels = micro_batch.data
                loss = F.cross_entropy(logits_of(model, images), labels)
                loss.backward()
                losses.append(loss.detach())
            instep.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step.log(loss=instep.mean(losses))
            if step.is_last or (config.eval_every and (step.number + 1) % config.eval_every == 0):
                found = accuracy(model, held_out, config.micro_batch_size)
                step.log(accuracy=found)
    if run.rank == 0:
        print(f"accuracy {found:.1%} on {config.held_out} held-out images")
    return found


if __name__ == "__main__":
    main(tyro.cli(ImagesConfig))
