"""A decoder-only transformer: pre-norm, learned positions, GELU.

    tokens (B, T)
       |  Embedding         token + position, dropout
       |  Block x layers    x + attention(norm(x)), then x + feed_forward(norm(x))
       |  Head              norm, then one logit per token of the vocabulary
    logits (B, T, V)

The embedding, every block and the head are declared blocks: each is entered with a generator of its own, and
a pipeline may cut between any two of them.

Source: A. Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.3.
Letters: B windows, T tokens of a window, V vocabulary size, D width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from instep.expert.moe import MoE
from instep.models.config import EXPERT_BLOCK, GPTConfig, num_parameters

__all__ = ["GPT", "Attention", "Block", "Embedding", "FeedForward", "GPTConfig", "Head", "num_parameters"]

INIT_STD = 0.02


class Embedding(nn.Module):
    """Tokens (B, T) int64 to vectors (B, T, D): what the token is plus where it stands."""

    rng_block: ClassVar[bool] = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        context = self.positions.num_embeddings
        if tokens.dim() != 2 or tokens.shape[1] > context:
            raise ValueError(
                f"expected tokens of shape (B, T) with T <= context({context}), got {tuple(tokens.shape)}: "
                "cut the windows shorter or build the model with a larger context"
            )
        positions = self.positions.weight[: tokens.shape[1]]  # (T, D)
        return self.dropout(self.tokens(tokens) + positions)


class Attention(nn.Module):
    """Causal self-attention: token t reads the tokens up to t, in H subspaces at once.

    Dropout is on the output alone: on the attention weights it would keep the fused CPU kernel from running,
    and forward and backward of (B, H, T, D / H) = (16, 4, 128, 32) would take three times as long.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, -1, self.head_width))  # a rank may have some of the heads
        query, key, value = split.permute(2, 0, 3, 1, 4)  # (B, H, T, D / H) each
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """The same two-layer network for every token."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.d_ff)
        self.down = nn.Linear(config.d_ff, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


def feed_forward(config: GPTConfig) -> nn.Module:
    """The feed-forward part of a block: one network for every token, or several to choose from."""
    if not config.experts:
        return FeedForward(config)
    sizes = config.width, config.d_ff, config.experts, config.top_k
    return MoE(*sizes, block=EXPERT_BLOCK, dropout=config.dropout)


class Block(nn.Module):
    """(B, T, D) to (B, T, D): both branches read a normalised copy and add to the residual stream."""

    rng_block: ClassVar[bool] = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = feed_forward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Head(nn.Module):
    """(B, T, D) to logits (B, T, V)."""

    rng_block: ClassVar[bool] = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class GPT(nn.Module):
    """Tokens (B, T) int64 to logits (B, T, V); logits at t depend on the tokens up to t.

    At construction the weights are drawn from torch's default generator (not on the meta device);
    ``init_parameter`` draws any of them again. In forward each block is one checkpoint if the config says so.
    A tied output weight is one parameter with two names; ``named_parameters`` gives the embedding's.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)
        if config.tied:
            self.head.out.weight = self.embedding.tokens.weight
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                self.init_parameter(name, parameter, torch.default_generator)

    def pipeline_layers(self) -> list[tuple[str, Callable[..., Tensor]]]:
        """What ``forward`` does, layer by layer: the path of each, and how it is called."""
        blocks: list[tuple[str, Callable[..., Tensor]]] = []
        for i, block in enumerate(self.blocks):
            call = partial(checkpoint, block, use_reentrant=False) if self.config.checkpoint else block
            blocks.append((f"blocks.{i}", call))
        return [("embedding", self.embedding), *blocks, ("head", self.head)]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.config.checkpoint and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill ``parameter``, which ``named_parameters`` calls ``name``, in place, from ``generator`` alone.

        Norms are the identity, biases zero, weights N(0, 0.02**2). The two layers of a block that write to
        the residual stream have their deviation divided by sqrt(2 * layers), so that the variance of the
        stream does not grow with the number of blocks.
        """
        module, _, kind = name.rpartition(".")
        if kind == "bias":
            nn.init.zeros_(parameter)
        elif module.endswith("norm"):
            nn.init.ones_(parameter)
        elif name.removesuffix(".weight").endswith(("attention.out", "feed_forward.down")):
            fill_normal(parameter, INIT_STD / (2 * self.config.layers) ** 0.5, generator)
        else:
            fill_normal(parameter, INIT_STD, generator)


@torch.no_grad()
def fill_normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill ``parameter`` in place from N(0, std**2).

    The numbers are drawn into a new contiguous float32 tensor on the generator's device and then copied:
    drawn in place, a transposed layout would get them in another order, and a GPU another stream.
    """
    device = generator.device
    drawn = torch.randn(parameter.shape, generator=generator, device=device, dtype=torch.float32)
    parameter.copy_(drawn.mul_(std))
