"""The size of a transformer, and what follows from it by arithmetic: pure, so planning needs no torch.

``GPTConfig(context=1024, **preset("small")._asdict())`` is the usual way from a name to a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "EXPERT_BLOCK",
    "PRESETS",
    "GPTConfig",
    "Preset",
    "num_parameters",
    "preset",
]


EXPERT_BLOCK = 64  # rows of one product of an expert


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """How large a transformer is and how it is trained; ``ValueError`` for a shape that cannot be built."""

    vocab_size: int = 256
    """Number of tokens; 256 for bytes."""
    context: int
    """Largest number of tokens that attend to each other."""
    layers: int
    """Number of transformer blocks."""
    width: int
    """Length of the vector that stands for a token between the blocks (d_model)."""
    heads: int
    """Number of attention heads; each is ``width / heads`` wide."""
    ff_width: int | None = None
    """Width inside the feed-forward part (d_ff); four times ``width`` where it is None."""
    dropout: float = 0.0
    """Share of the embedding's and of each residual branch's outputs that is zeroed in training."""
    tied: bool = True
    """Whether the output layer uses the embedding's weights."""
    checkpoint: bool = False
    """Whether each block is computed again in backward instead of keeping its activations."""
    experts: int = 0
    """Number of experts in the place of each feed-forward part, each ``ff_width`` wide; 0: no experts."""
    top_k: int = 2
    """Experts per token."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "width", "heads", "ff_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        if self.width % self.heads:
            raise ValueError(
                f"expected heads to divide width, got width({self.width}) % heads({self.heads}) = "
                f"{self.width % self.heads}: choose a width that is a multiple of heads"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"expected 0 <= dropout < 1, got {self.dropout}: it is a share")
        if self.experts < 0 or (self.experts and not 1 <= self.top_k <= self.experts):
            raise ValueError(
                f"expected experts 0 or 1 <= top_k <= experts, got experts {self.experts}, top_k {self.top_k}"
            )

    @property
    def d_ff(self) -> int:
        """``ff_width``, or its default."""
        return 4 * self.width if self.ff_width is None else self.ff_width


def num_parameters(config: GPTConfig) -> int:
    """Number of weights of ``GPT(config)``, tied ones counted once."""
    width, d_ff = config.width, config.d_ff
    norm = 2 * width
    attention = (width + 1) * 3 * width + (width + 1) * width  # query, key and value; out
    if config.experts:  # router; up and down without biases
        feed_forward = config.experts * (width + 2 * width * d_ff)
    else:
        feed_forward = (width + 1) * d_ff + (d_ff + 1) * width
    block = 2 * norm + attention + feed_forward
    embedding = (config.vocab_size + config.context) * width
    output = 0 if config.tied else config.vocab_size * width
    return embedding + config.layers * block + norm + output


class Preset(NamedTuple):
    """d_model, d_ff, number of blocks and of attention heads."""

    width: int
    ff_width: int
    layers: int
    heads: int


# Transformer sizes that papers and benchmarks use. Sources: small to xl, A. Radford et al., "Language models
# are unsupervised multitask learners", 2019, table 2; 2.7B, T. Brown et al., "Language models are few-shot
# learners", NeurIPS 2020, table 2.1. Numbers of heads that the first does not print are those of its released
# models.
PRESETS = {
    "small": Preset(width=768, ff_width=3072, layers=12, heads=12),
    "medium": Preset(width=1024, ff_width=4096, layers=24, heads=16),
    "large": Preset(width=1280, ff_width=5120, layers=36, heads=20),
    "xl": Preset(width=1600, ff_width=6400, layers=48, heads=25),
    "2.7B": Preset(width=2560, ff_width=10240, layers=32, heads=32),
}


def preset(name: str) -> Preset:
    """The size called ``name``; ``ValueError`` that lists the names for one that is not there."""
    if name not in PRESETS:
        raise ValueError(f"expected a size among {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]
