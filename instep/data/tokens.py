"""Sentence pairs as padded tokens, by Hugging Face's ``tokenizers``: train one or load it, encode, pad.

A micro-batch is padded to its own longest pair, not to the longest of all; ``Loader(lengths=)`` then puts
pairs of similar lengths together. Needs ``instep[hf]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
except ImportError as error:
    raise ImportError(f"{error}: for Hugging Face's libraries, pip install 'instep[hf]'") from error

__all__ = ["EncodedPair", "PadTogether", "encode", "load_tokenizer", "train_tokenizer"]

PAD, UNKNOWN, BEGIN, SEPARATOR = SPECIAL = "[PAD]", "[UNK]", "[CLS]", "[SEP]"


class EncodedPair(NamedTuple):
    """A pair as numbers: its tokens, the sentence (0 or 1) that each is of, its label, its own number."""

    tokens: list[int]
    sentences: list[int]
    label: int
    number: int


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Pieces of the words in ``texts``, in lower case; the same ones in every process.

    Each rank trains its own, so WordPiece will not do: ``tokenizers`` numbers its ##pieces in the order of a
    hash map, by which equal counts are told apart, and that is another one in every process.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    _separate(tokenizer, f"{BEGIN} $A {SEPARATOR} $B:1 {SEPARATOR}:1", (BEGIN, SEPARATOR))
    return tokenizer


def load_tokenizer(folder: Path, end: int | None) -> Tokenizer:
    """That of ``folder``/tokenizer.json; ``end`` is the token at the end of a text, if there is one.

    A model that was trained on one text at a time has no separator: its end of text separates two.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if end is not None:
        token = tokenizer.id_to_token(end)
        _separate(tokenizer, f"$A {token} $B:1 {token}:1", (token,))
    return tokenizer


def _separate(tokenizer: Tokenizer, pair: str, special: Iterable[str]) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        pair=pair, special_tokens=[(token, tokenizer.token_to_id(token)) for token in special]
    )


def encode(pairs: Sequence[tuple[str, str, int]], tokenizer: Tokenizer, max_tokens: int) -> list[EncodedPair]:
    """Each of ``pairs`` (two texts and a label), cut off after ``max_tokens``."""
    tokenizer.enable_truncation(max_tokens)
    tokenizer.no_padding()
    encoded = tokenizer.encode_batch([(first, second) for first, second, _ in pairs])
    return [
        EncodedPair(its.ids, its.type_ids, label, i)
        for i, (its, (_, _, label)) in enumerate(zip(encoded, pairs, strict=True))
    ]


class PadTogether:
    """Makes a micro-batch of B pairs, padded to the longest, L; a ``collate_fn``.

    ``inputs`` of the model: ``input_ids`` and ``attention_mask``, (B, L), and with ``sentences``
    ``token_type_ids``, (B, L). ``labels`` and ``index``: (B,). ``weights``, (B,) int64: 1 for each pair, or
    with ``by_tokens`` its number of tokens.
    """

    def __init__(self, pad: int, *, sentences: bool, by_tokens: bool = False) -> None:
        self.pad, self.sentences, self.by_tokens = pad, sentences, by_tokens

    def __call__(self, pairs: Sequence[EncodedPair]) -> dict[str, Any]:
        lengths = torch.tensor([len(pair.tokens) for pair in pairs])
        longest = int(lengths.max())
        inputs = {
            "input_ids": _padded([pair.tokens for pair in pairs], longest, self.pad),
            "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        }
        if self.sentences:
            inputs["token_type_ids"] = _padded([pair.sentences for pair in pairs], longest, 0)
        return {
            "inputs": inputs,
            "labels": torch.tensor([pair.label for pair in pairs]),
            "index": torch.tensor([pair.number for pair in pairs]),
            "weights": lengths if self.by_tokens else torch.ones_like(lengths),
        }


def _padded(rows: Sequence[list[int]], longest: int, pad: int) -> Tensor:
    return torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
