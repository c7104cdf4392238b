"""Sentence pairs as tokens: trained alike everywhere, put together with separators, padded to the longest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer, models, pre_tokenizers

from instep.data.tokens import EncodedPair, PadTogether, encode, load_tokenizer, train_tokenizer

ROOT = Path(__file__).parent.parent.parent
TEXTS = [
    f"the {a} {b} {c}" for a in ("red", "blue", "old") for b in ("fox", "bird") for c in ("runs", "flies")
]
SHORT, LONG = EncodedPair([2, 9, 3], [0, 0, 0], 1, 7), EncodedPair([2, 8, 3, 6, 3], [0, 0, 0, 1, 1], 0, 4)


def test_every_process_trains_the_same_tokenizer():
    """WordPiece numbers its pieces in another order in each process, and then has others: every rank would
    read other tokens."""
    code = (
        "import hashlib; from instep.data.pairs import read_sentences; "
        "from instep.data.tokens import train_tokenizer; "
        "print(hashlib.sha256(train_tokenizer(read_sentences(), 1000).to_str().encode()).hexdigest())"
    )
    printed = {
        subprocess.check_output(
            [sys.executable, "-c", code],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)},
        )
        for threads in ("1", "3")
    }
    assert len(printed) == 1


def test_a_pair_has_separators_and_says_which_sentence_a_token_is_of():
    tokenizer = train_tokenizer(TEXTS, 400)
    (pair,) = encode([("The red fox", "the OLD bird", 1)], tokenizer, 64)
    tokens = [tokenizer.id_to_token(token) for token in pair.tokens]
    assert tokens == ["[CLS]", "Ġthe", "Ġred", "Ġfox", "[SEP]", "Ġthe", "Ġold", "Ġbird", "[SEP]"]
    assert pair.sentences == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert (pair.label, pair.number) == (1, 0)


def test_a_pair_is_cut_off_at_the_most_tokens_and_keeps_its_separators():
    tokenizer = train_tokenizer(TEXTS, 400)
    (pair,) = encode([("red fox runs " * 9, "old bird", 0)], tokenizer, 8)
    tokens = [tokenizer.id_to_token(token) for token in pair.tokens]
    assert len(tokens) == 8 and tokens[0] == "[CLS]" and tokens.count("[SEP]") == 2


def test_a_loaded_tokenizer_separates_by_its_end_of_text(tmp_path):
    words = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "red": 1, "fox": 2}, unk_token="<|endoftext|>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (pair,) = encode([("red fox", "fox", 1)], load_tokenizer(tmp_path, 0), 64)
    assert pair.tokens == [1, 2, 0, 2, 0] and pair.sentences == [0, 0, 0, 1, 1]


def test_a_micro_batch_is_padded_to_its_own_longest():
    batch = PadTogether(5, sentences=True)([SHORT, LONG])
    assert batch["inputs"]["input_ids"].tolist() == [[2, 9, 3, 5, 5], [2, 8, 3, 6, 3]]
    assert batch["inputs"]["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["inputs"]["token_type_ids"].tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]
    assert batch["labels"].tolist() == [1, 0] and batch["index"].tolist() == [7, 4]
    assert PadTogether(5, sentences=False)([SHORT])["inputs"]["input_ids"].shape == (1, 3)


@pytest.mark.parametrize(("by_tokens", "weights"), [(False, [1, 1]), (True, [3, 5])])
def test_a_pair_weighs_one_or_its_tokens(by_tokens, weights):
    batch = PadTogether(5, sentences=False, by_tokens=by_tokens)([SHORT, LONG])
    assert batch["weights"].tolist() == weights and batch["weights"].dtype == torch.int64
