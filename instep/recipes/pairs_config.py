"""What the pairs recipe is told: a classifier of sentence pairs, its data, and how it is trained. Pure.

What is trained by it stands in ``pairs``, which needs torch, transformers and tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from instep.checkpoint.manifest import Scalar
from instep.recipes.ranges import ABOVE_0, FROM_0, STAGES, UP_TO_1, Range, check_settings
from instep.run.toml import scalars

PAIRS_RANGES: dict[str, Range] = {
    **dict.fromkeys(("layers", "width", "heads", "vocab_size", "context", "steps", "lr"), ABOVE_0),
    **dict.fromkeys(("batch_size", "micro_batch_size"), ABOVE_0),
    **dict.fromkeys(("seed", "warmup_steps", "clip", "weight_decay", "freeze", "lora", "eval_every"), FROM_0),
    "dropout": UP_TO_1,
    "shard_stage": STAGES,
}


@dataclass(frozen=True, kw_only=True)
class PairsConfig:
    """Fine-tune a classifier of sentence pairs through Hugging Face's libraries, with the same bits on any
    number of ranks."""

    data: str = ""
    """Pairs as MRPC has them (sentence1, sentence2, label; train, validation): a folder, or a name on the hub
    such as nyu-mll/glue:mrpc, read by the package datasets. By default sentences of Python's own
    documentation, and paraphrases of them by rule."""
    weights: Path | None = None
    """A folder with config.json, model.safetensors and tokenizer.json to start from, such as that of
    SmolLM2-360M; by default new weights, and a tokenizer trained on the pairs."""
    model: Literal["bert", "llama"] = "bert"
    """The new model: BERT-like, or as SmolLM2 is (grouped-query attention, rotary positions)."""
    layers: int = 2
    """Its number of blocks."""
    width: int = 128
    """Length of the vector that stands for a token between its blocks."""
    heads: int = 4
    """Its attention heads; llama has one head of keys and values for every two of them."""
    dropout: float = 0.0
    """Share of the activations that is zeroed in training; of bert alone, as llama has none."""
    vocab_size: int = 2000
    """Tokens of the trained tokenizer."""
    context: int = 64
    """Tokens of a pair; what is longer is cut off."""

    steps: int = 800
    """Optimizer steps of the whole run; the learning rate's schedule ends there."""
    batch_size: int = 64
    """Pairs per step, over all ranks."""
    micro_batch_size: int = 16
    """Pairs per forward and backward."""
    lr: float = 1e-3
    """Learning rate after warm-up."""
    warmup_steps: int = 50
    """Steps in which the learning rate rises linearly; then it falls with a cosine."""
    weight_decay: float = 0.01
    """Decoupled, of all parameters."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    weigh: Literal["samples", "tokens"] = "samples"
    """What counts alike in the loss: each pair, or each token, so that long pairs count more."""
    seed: int = 0
    """Key of the initial weights, the order of the data, and dropout."""

    freeze: int = 0
    """Train neither the embeddings nor the first so many blocks; 0 trains all."""
    lora: int = 0
    """Rank of low-rank updates, by the package peft, in the place of the model's own weights; 0: none."""
    gradient_checkpointing: bool = False
    """Compute each block again in backward instead of keeping its activations: the same bits."""
    bf16: bool = False
    """Matrix products of forward in bfloat16; weights and gradients stay float32."""
    shard_stage: int = 0
    """What the ranks divide instead of each keeping it: 0 nothing, 1 the optimizer's state, 2 the gradients
    too, 3 the weights too. The same bits."""
    eval_every: int = 200
    """Steps between two evaluations on the held-out pairs; 0 evaluates at the end only."""


def validate(config: PairsConfig) -> None:
    """Raise ``ValueError``, naming the setting and the fix, for a config that cannot be run."""
    check_settings(config, PAIRS_RANGES)
    if config.batch_size % config.micro_batch_size:
        raise ValueError(
            f"batch_size {config.batch_size} is no multiple of micro_batch_size {config.micro_batch_size}: "
            "all micro-batches of a step have one size"
        )
    if config.width % config.heads or config.heads % 2:
        raise ValueError(
            f"width {config.width} with heads {config.heads}: expected an even number of heads, and a width "
            "that is a multiple of it"
        )
    if config.lora and config.freeze:
        raise ValueError("lora with freeze: lora trains none of the model's own weights; leave freeze out")


# No bit of the weights depends on these.
PLACEMENT = frozenset({"shard_stage", "eval_every", "gradient_checkpointing"})


def numerical(config: PairsConfig) -> dict[str, Scalar]:
    """The settings that the bits of the weights may depend on."""
    return scalars(config, without=PLACEMENT)
