"""Small models, each with one thing that data parallelism can get wrong, and how to train them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.step.micro_batches import MicroBatch
from tests.parity import Training, momentum, numbers

WIDTH = 6


def data(micro_batch: MicroBatch, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The micro-batch of a micro_batch, (4, WIDTH)."""
    return numbers(4, WIDTH, key=f"step {step} leaf {micro_batch.index}", dtype=dtype)


def mean_square(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    model(data(micro_batch, step)).square().mean().backward()


class Dense(nn.Module):
    """Three layers and nothing special."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Tied(nn.Module):
    """Embedding and output layer are one parameter; the position table is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.positions = nn.Parameter(torch.zeros(4, WIDTH), requires_grad=False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 11, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.tokens(tokens) + self.positions)))


def next_token(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    tokens = (data(micro_batch, step)[:, 0].abs() * 100).long() % 11  # (4,)
    F.cross_entropy(model(tokens), tokens.flip(0)).backward()


class Twice(nn.Module):
    """One layer is used twice in a forward, another only where the micro-batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, sometimes: bool) -> Tensor:
        x = torch.tanh(self.shared(x))
        if sometimes:
            x = torch.tanh(self.sometimes(x))
        return self.shared(x)


def used_on_odd_leaves(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    model(data(micro_batch, step), micro_batch.index % 2 == 1).square().mean().backward()


def three_forwards(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    x = data(micro_batch, step)
    outputs = [model(x), model(-x), model(2 * x)]
    (outputs[0] * outputs[1] - outputs[2]).square().mean().backward()


def two_backwards(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    x = data(micro_batch, step)
    model(x).square().mean().backward()
    (0.5 * model(x).exp().mean()).backward()


class Segments(nn.Module):
    """One block, used by three checkpointed segments, so that its gradient comes in three parts."""

    def __init__(self, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.Tanh())
        self.block.rng_block = True
        self.last = nn.Linear(WIDTH, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


def nothing_on_some_leaves(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    micro_batch.weight = 3 * (micro_batch.index % 3)
    if micro_batch.weight:
        model(data(micro_batch, step)[: micro_batch.weight]).square().sum().backward()


def conv_net(norm: Callable[[int], nn.Module] = nn.BatchNorm2d, num_classes: int = 10) -> nn.Module:
    """Images (B, 3, H, W) to logits (B, num_classes)."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1, bias=False), norm(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), norm(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(64, num_classes)),
    )


class Images(nn.Module):
    """Convolutions in channels_last: their gradients are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        self.out = nn.Linear(4, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.features(x.contiguous(memory_format=torch.channels_last)).mean((2, 3)))


def images(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    x = numbers(2, 3, 7, 7, key=f"images {step} {micro_batch.index}")
    model(x).square().mean().backward()


class Residual(nn.Module):
    """A residual net with batch norm, small: stem, one block with a shortcut, head."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.memory_format = memory_format
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6, momentum=0.3),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6))
        self.out = nn.Linear(6, 3)
        self.to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.contiguous(memory_format=self.memory_format))
        x = torch.relu(self.block(x) + self.shortcut(x))
        return self.out(x.mean((2, 3)))


class Norms(nn.Module):
    """Running statistics of all kinds: averages, of instances, in bfloat16, of another layout;
    one norm is used twice, one is checkpointed, one sees forwards without gradients, one is in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.twice = nn.BatchNorm1d(WIDTH)
        self.average = nn.BatchNorm1d(WIDTH, momentum=None, affine=False)
        self.instances = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.transposed = nn.BatchNorm1d(3)
        self.volume = nn.BatchNorm3d(2)
        self.narrow = nn.BatchNorm1d(WIDTH, dtype=torch.bfloat16)
        self.frozen = nn.BatchNorm1d(WIDTH).eval()
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average(x + 1)
        x = self.twice(self.twice(self.first(x)) ** 2)  # (4, WIDTH)
        x = x + checkpoint(self.average, x, use_reentrant=False)
        x = self.frozen(x) + x
        x = x + self.instances(x.view(4, 2, 3)).view(4, WIDTH)
        x = x + self.transposed(x.view(4, 2, 3).transpose(1, 2)).transpose(1, 2).reshape(4, WIDTH)
        x = x + self.volume(x.view(4, 2, 3, 1, 1)).view(4, WIDTH)
        return self.last(x + self.narrow(x.bfloat16()).float())


class Mixed(nn.Module):
    """float32, float64, bfloat16 and complex parameters, one without elements, one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.in_float32 = nn.Linear(WIDTH, WIDTH)
        self.in_float64 = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.in_bfloat16 = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.phase = nn.Parameter(torch.zeros(WIDTH, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_float64(self.in_float32(x).double())
        x = self.in_bfloat16(x.bfloat16()).float()
        return (x * self.phase).abs() * self.scale + self.nothing.sum()


def autocast(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(data(micro_batch, step)).float().square().mean()
    loss.backward()


def gpt(dropout: float = 0.0, checkpointed: bool = False) -> GPT:
    return GPT(
        GPTConfig(
            vocab_size=17, context=8, layers=2, width=16, heads=2, dropout=dropout, checkpoint=checkpointed
        )
    )


def text(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    tokens = (numbers(3, 9, key=f"text {step} {micro_batch.index}").abs() * 1000).long() % 17
    logits = model(tokens[:, :-1].contiguous())
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, fused=False, foreach=False)


def fused(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, fused=True)


# Without random numbers: what they should give can be computed by hand. More: tests/test_placements.py.
PLAIN = {
    "dense": Training(Dense, mean_square, num_leaves=7, optimizer=momentum, clip=0.1, num_steps=4),
    "transformer": Training(gpt, text, num_leaves=12, clip=0.5),
    "tied and frozen": Training(Tied, next_token),
    "used twice, used on odd leaves": Training(Twice, used_on_odd_leaves, num_leaves=5),
    "three forwards": Training(Dense, three_forwards, num_leaves=5),
    "two backwards": Training(Dense, two_backwards, num_leaves=5),
    "no backward on some leaves": Training(Dense, nothing_on_some_leaves, num_leaves=7),
    "channels last, fused": Training(Images, images, num_leaves=5, optimizer=fused),
    "batch norm, channels last": Training(partial(Residual, torch.channels_last), images, num_leaves=7),
    "norms of all kinds": Training(Norms, mean_square, num_leaves=5, num_steps=3),
    "norms, and a rank without a leaf": Training(Norms, mean_square, num_leaves=2),
    "five dtypes": Training(Mixed, mean_square, num_leaves=5, optimizer=sgd),
    "autocast": Training(Dense, autocast, num_leaves=5),
}


def requires_input(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    model(data(micro_batch, step).requires_grad_()).square().mean().backward()


def look_up(model: nn.Module, micro_batch: MicroBatch, step: int) -> None:
    tokens = (data(micro_batch, step)[:, 0].abs() * 100).long() % 11
    model(tokens).square().mean().backward()


# Sums inside a micro-batch that a plain loop makes too, but at another time, and so in another order.
OTHER = {
    "reentrant": Training(lambda: Segments(reentrant=True), requires_input, num_leaves=5),
    "embedding": Training(lambda: nn.Embedding(11, WIDTH), look_up, 5),
}

RANDOM = {
    "dropout": Training(lambda: Dense(dropout=0.3), mean_square, num_leaves=5, clip=0.1),
    "checkpointed transformer with dropout": Training(
        lambda: gpt(dropout=0.2, checkpointed=True), text, num_leaves=7, num_steps=2
    ),
    "reentrant with dropout": Training(lambda: Segments(True, dropout=0.3), requires_input, num_leaves=5),
}
