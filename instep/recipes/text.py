"""The text recipe at work: a GPT on bytes, its loss, what a run says of it. Its config: ``text_config``.

Nothing but the recipe knows of text; the loop that trains, and the run, are told by what is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep.data.order import micro_batch_indices
from instep.data.text import ByteText, TextSplits, next_tokens, open_text
from instep.elastic.rendezvous import WorkerSpec
from instep.mesh.process_group import Group
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.ordered.generators import seed_generator
from instep.ordered.keys import derive, initialize
from instep.recipes.memory_estimate import formula, num_moments
from instep.recipes.text_config import Config, validate
from instep.run.losses import gather
from instep.train.run import run as run_recipe
from instep.train.worker import work as train

LOSS_UNIT = "nats per byte"
NUM_BYTES = 256
TRIAL_MODEL = GPTConfig(vocab_size=64, context=16, layers=2, width=32, heads=2, dropout=0.1)


def text_loss(model: nn.Module, windows: Tensor, *, device: torch.device, autocast: str) -> Tensor:
    """Mean cross-entropy in nats per byte of ``windows`` (B, T + 1)."""
    inputs, targets = next_tokens(windows)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast == "bf16"):
        logits = model(inputs.to(device))
    return F.cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    text: ByteText,
    group: Group,
    *,
    num_windows: int,
    micro_size: int,
    device: torch.device,
    autocast: str,
    before_gather: Callable[[], None] = lambda: None,
) -> float:
    """Mean loss over ``num_windows`` windows at even distances through ``text``. Collective.

    Ranks take turns at micro-batches; the result does not depend on how many they are.
    """
    num_windows = min(num_windows, len(text))
    chosen = [i * len(text) // num_windows for i in range(num_windows)]
    batches = [chosen[i : i + micro_size] for i in range(0, num_windows, micro_size)]
    was_training = model.training
    model.eval()
    sums = {
        i: text_loss(model, text.windows(batches[i]), device=device, autocast=autocast).item()
        * len(batches[i])
        for i in range(group.rank, len(batches), group.size)
    }
    model.train(was_training)
    before_gather()
    return math.fsum(gather(sums, len(batches), group)) / num_windows


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


class TextRecipe:
    """A GPT on bytes: what ``instep train`` trains."""

    loss_unit = LOSS_UNIT

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def work(self) -> Callable[[WorkerSpec, Config], None]:
        """As in ``Recipe``."""
        return work

    @property
    def items_per_step(self) -> int:
        """Tokens, which are bytes."""
        return self.config.batch.global_size * self.config.model.context

    def replaced(self, config: Config) -> TextRecipe:
        """As in ``Recipe``."""
        return TextRecipe(config)

    def validate(self) -> None:
        """As in ``Recipe``."""
        validate(self.config)

    def make_model(self) -> GPT:
        """The model that the config says."""
        return GPT(GPTConfig(**asdict(self.config.model)))

    def open(self) -> TextSplits:
        """The text, in two parts."""
        return open_text(self.config.data, self.config.model.context)

    def training(self, data: TextSplits) -> ByteText:
        """The part that is trained on."""
        return data.train

    def read(self, data: TextSplits, step: int, micro_batch: int) -> Tensor:
        """The windows of a micro-batch, (B, T + 1) int64."""
        indices = micro_batch_indices(
            len(data.train),
            step=step,
            leaf=micro_batch,
            num_leaves=self.config.num_leaves,
            micro_size=self.config.batch.micro_size,
            seed=self.config.seed,
        )
        return data.train.windows(indices)

    def example(self) -> Tensor:
        """Windows of bytes that no text has, (B, T + 1) int64."""
        generator = torch.Generator()
        seed_generator(generator, derive(0, "canary", "text"))
        shape = (self.config.batch.micro_size, self.config.model.context + 1)
        return torch.randint(NUM_BYTES, shape, generator=generator)

    def loss(self, model: nn.Module, data: Tensor, device: torch.device) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        return text_loss(model, data, device=device, autocast=self.config.autocast)

    def held_out_loss(
        self,
        model: nn.Module,
        data: TextSplits,
        group: Group,
        device: torch.device,
        before_gather: Callable[[], None],
    ) -> float:
        """As in ``Recipe``."""
        return held_out_loss(
            model,
            data.held_out,
            group,
            num_windows=self.config.eval.windows,
            micro_size=self.config.batch.micro_size,
            device=device,
            autocast=self.config.autocast,
            before_gather=before_gather,
        )

    def memory_estimate(self, *, ranks: int) -> dict[str, int | float]:
        """As in ``Recipe``."""
        config = self.config
        return formula(
            GPTConfig(**asdict(config.model)),
            num_moments(config.optim),
            config.batch.micro_size,
            autocast=config.autocast == "bf16",
            stage=config.parallel.shard_stage,
            ranks=ranks,
            one_copy=config.parallel.one_copy,
        )


def work(spec: WorkerSpec, config: Config) -> None:
    """A new process trains as ``config`` says."""
    train(spec, TextRecipe(config))


def run(config: Config) -> int:
    """Train as ``config`` says, on ranks that are already there or on ranks of this host; the exit code."""
    return run_recipe(TextRecipe(config))
