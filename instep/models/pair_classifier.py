"""Classifiers of sentence pairs by Hugging Face's ``transformers``: new small ones, or from a folder.

New ones begin with weights of 1 / sqrt(width), as SmolLM2 did: the libraries' 0.02 is meant for a width of
768 and more, and in a small model the products of queries and keys would begin too small to learn from.
Positions, and which sentence it is, are added to tokens and begin smaller, so that a token is most like the
same token in another place. Needs ``instep[hf]``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

try:
    import transformers
except ImportError as error:
    raise ImportError(f"{error}: for Hugging Face's libraries, pip install 'instep[hf]'") from error

PLACES = 0.2  # how large positions and sentences begin beside tokens

__all__ = ["freeze", "load_classifier", "new_classifier"]


def new_classifier(
    kind: str,
    *,
    vocab_size: int,
    pad: int,
    layers: int,
    width: int,
    heads: int,
    max_tokens: int,
    dropout: float = 0.0,
) -> Any:
    """BERT-like ("bert"), or as SmolLM2 is ("llama"): rotary positions, one head of keys and values for two
    of queries, and as many output as input embeddings, the same ones. It says 0 or 1."""
    sizes = {
        "vocab_size": vocab_size,
        "pad_token_id": pad,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": max_tokens,
        "initializer_range": width**-0.5,
    }
    if kind == "llama":
        config = transformers.LlamaConfig(
            **sizes, num_key_value_heads=heads // 2, tie_word_embeddings=True, use_cache=False
        )
        return transformers.LlamaForSequenceClassification(config)
    config = transformers.BertConfig(
        **sizes, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    model = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight.mul_(PLACES)
        model.bert.embeddings.token_type_embeddings.weight.mul_(PLACES)
    return model


def load_classifier(folder: Path) -> Any:
    """The model in ``folder`` (config.json, model.safetensors), in float32, with a new classifier on top.

    A language model's output layer, or that of another classifier, is left out. Only safetensors are read:
    nothing is unpickled, and no code of the folder runs.
    """
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    if model.config.pad_token_id is None:
        model.config.pad_token_id = model.config.eos_token_id
    model.config.use_cache = False
    return model


def freeze(model: Any, layers: int) -> None:
    """Train neither the embeddings of ``model`` nor its first ``layers`` blocks."""
    base = model.base_model
    if hasattr(base, "encoder"):
        embeddings, blocks = base.embeddings, base.encoder.layer
    else:
        embeddings, blocks = base.embed_tokens, base.layers
    for part in (embeddings, *blocks[:layers]):
        part.requires_grad_(False)
