"""Sentence pairs: what a paraphrase is, that no sentence alone tells the answer, and what is held out."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from instep.data import pairs
from instep.data.pairs import PairSplits, SentencePair, open_pairs, paraphrase, words_of

ROOT = Path(__file__).parent.parent.parent


class Always(Random):
    """Draws the least number: every rule is tried, and the first of several words is taken."""

    def random(self) -> float:
        return 0.0


@pytest.fixture(scope="module")
def splits() -> PairSplits:
    return open_pairs()


def overlap(pair: SentencePair) -> float:
    one, other = set(words_of(pair.first)), set(words_of(pair.second))
    return len(one & other) / len(one | other)


def test_half_of_the_pairs_are_paraphrases(splits):
    for split in splits:
        assert Counter(pair.label for pair in split) == {0: len(split) // 2, 1: len(split) // 2}
    assert len(splits.train) > 10_000 and len(splits.held_out) > 800


def test_no_held_out_sentence_was_trained_on(splits):
    first = [{tuple(words_of(pair.first)) for pair in split} for split in splits]
    assert not first[0] & first[1]


def test_the_first_sentence_alone_tells_nothing(splits):
    for split in splits:
        labels: dict[str, Counter[int]] = {}
        for pair in split:
            labels.setdefault(pair.first, Counter())[pair.label] += 1
        assert all(found[0] == found[1] for found in labels.values())


def test_words_of_the_second_sentence_are_as_frequent_beside_either_answer(splits):
    for split in splits:
        counts = [
            Counter(words_of(" ".join(p.second for p in split if p.label == label))) for label in (0, 1)
        ]
        assert counts[0] == counts[1]


def test_counting_shared_words_tells_many_pairs_and_not_all(splits):
    pairs = splits.held_out
    best = max(sum((overlap(p) > at / 50) == p.label for p in pairs) / len(pairs) for at in range(50))
    assert 0.8 < best < 0.92


@pytest.mark.slow
def test_every_process_has_the_same_pairs(splits):
    code = (
        "import hashlib; from instep.data.pairs import open_pairs; "
        "print(hashlib.sha256(repr(tuple(open_pairs())).encode()).hexdigest())"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)
    assert printed.strip() == hashlib.sha256(repr(tuple(splits)).encode()).hexdigest()


@pytest.mark.parametrize(
    ("sentence", "otherwise"),
    [
        ("Stop it if it is open now", "In case it is opened now, this stops it"),
        ("It reads lines when asked for", "As soon as asked for, it reads lines"),
        ("Return the name of a file", "File's title is given back"),
        ("Abcd efgh ijkl mnop qrst", "In short, abcd efgh ijkl mnop qrst"),
    ],
)
def test_a_paraphrase_says_it_otherwise(sentence, otherwise):
    assert paraphrase(sentence, Always()) == otherwise


@pytest.mark.parametrize(
    ("rule", "sentence", "otherwise"),
    [
        (pairs._front, "Close it if it is open", "if it is open, close it"),
        (pairs._front, "If it is open, close it", "close it if it is open"),
        (pairs._front, "Read one more line from the file", "from the file, read one more line"),
        (pairs._passive, "Return the name of a file", "the name of a file is returned"),
        (pairs._passive, "Writes all lines to disk", "all lines are written to disk"),
        (pairs._passive, "Return None", None),
        (pairs._third_person, "Creates a socket", "create a socket"),
        (pairs._third_person, "Create a socket", "This creates a socket"),
        (pairs._possessive, "Set the name of the file", "Set the file's name"),
        (pairs._swap, "Names or values", "values or Names"),
        (pairs._swap, "Names and other values", None),
        (pairs._drop_articles, "The end of a line", "end of line"),
        (pairs._synonyms, "Remove a directory", "delete a folder"),
        (pairs._synonyms, "Nothing here", None),
    ],
)
def test_a_rule_says_it_otherwise_where_it_applies(rule, sentence, otherwise):
    assert rule(sentence, Always()) == otherwise


def test_partners_exchange_words_that_are_their_own():
    sentences = "Return the name of a socket", "Return the owner of a file"
    said = "Hand back name of socket", "Hand back owner of file"
    rare = {"name", "socket", "owner", "file"}
    exchanged = "Hand back owner of file", "Hand back name of socket"
    assert pairs._exchanged(sentences, said, rare) == exchanged
    assert pairs._exchanged(sentences, said, {"name", "owner", "file"}) is None


def test_a_share_that_cannot_be_held_out_is_refused():
    with pytest.raises(ValueError, match=r"expected 0 < held_out <= 0\.5, got 1"):
        open_pairs(held_out=1)


def test_a_library_without_source_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(pairs, "library", lambda: tmp_path)
    with pytest.raises(ValueError, match=f"found 0 sentences in {tmp_path}: install"):
        open_pairs()
