"""Sentence pairs: is the second a paraphrase of the first, or not? Made of Python's own documentation.

The sentences are those of the docstrings in the standard library's source: real English that every machine
with Python has, so that nothing is shipped or downloaded, as for ``data/text.py``. Another Python has other
sentences: ranks on hosts whose Pythons differ are noticed, since their loaders deal out other lengths.

A paraphrase is made by rules: other words for the same, a clause moved to the front, the passive, articles
left out. What makes the task more than counting a word is how the pairs are put together:

    sentence   paraphrase    its partner, which is much like it     paraphrase
    a          p(a)          b                                      p(b)

    (a, p(a)) the same   (a, p(b)) not   (b, p(b)) the same   (b, p(a)) not

Every sentence, and every paraphrase, stands once on each side of the answer. So one of the two alone tells
nothing, nor does a word that only rules write. Counting shared words would still tell most pairs: of a
quarter of the partners each gets its own paraphrase in the pair that is not the same, but with two words of
the other's, "Return the name of a socket" beside "Hand back a socket's owner". Sentences are dealt to
training and held-out before they have partners: no held-out pair has a sentence that was trained on.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from instep.data.text import NOT_LIBRARY, walk

__all__ = ["PairSplits", "SentencePair", "open_pairs", "paraphrase", "read_sentences"]

DOCSTRING = re.compile(r'^\s*[rR]?"""(.*?)"""', re.MULTILINE | re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
PLAIN = re.compile(r"[A-Z][A-Za-z ,'\-]+[.]?")  # no code, no numbers, no quotes
MIN_WORDS, MAX_WORDS = 5, 20
COMMON = 200  # sentences; a word of more says little about what a sentence is about
HARDER = 0.25  # share of the pairs of partners that exchange words
EXCHANGED = 2  # words


class SentencePair(NamedTuple):
    """Two sentences, and 1 if the second is a paraphrase of the first, else 0."""

    first: str
    second: str
    label: int


class PairSplits(NamedTuple):
    """Two lists of pairs that share no sentence; in each, half of the pairs are paraphrases."""

    train: list[SentencePair]
    held_out: list[SentencePair]


def open_pairs(*, held_out: float = 0.1, variants: int = 2) -> PairSplits:
    """Pairs of the standard library's sentences; ``held_out`` is the share of sentences that is held out.

    Of a sentence to train on there are ``variants`` paraphrases, each with a pair of either label.

    Raises ``ValueError`` for a share outside of (0, 0.5], or a Python without the source of its library.
    """
    if not 0 < held_out <= 0.5:
        raise ValueError(f"expected 0 < held_out <= 0.5, got {held_out}: it is a share of the sentences")
    sentences = read_sentences()
    Random("split").shuffle(sentences)
    cut = max(2, int(len(sentences) * held_out))
    train, rest = sentences[cut:], sentences[:cut]
    if len(train) < 2 or len(rest) < 2:
        raise ValueError(
            f"expected the docstrings of the standard library, found {len(sentences)} sentences in "
            f"{library()}: install the library's source, or bring pairs of your own"
        )
    return PairSplits(
        [pair for variant in range(variants) for pair in _pairs(train, str(variant))],
        list(_pairs(rest, "held out")),
    )


def library() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_sentences() -> list[str]:
    """Plain sentences of all docstrings, in the order of their files, those with the same words once."""
    found: dict[tuple[str, ...], str] = {}
    files = (file for file in walk(library(), NOT_LIBRARY) if file.suffix == ".py")
    for file in sorted(files, key=lambda f: f.relative_to(library()).as_posix()):
        for docstring in DOCSTRING.findall(file.read_text("utf-8", "replace")):
            for paragraph in re.split(r"\n\s*\n", docstring):
                for sentence in SENTENCE_END.split(" ".join(paragraph.split())):
                    words = words_of(sentence)
                    if MIN_WORDS <= len(words) <= MAX_WORDS and PLAIN.fullmatch(sentence):
                        found.setdefault(tuple(words), sentence.rstrip("."))
    return list(found.values())


def words_of(sentence: str) -> list[str]:
    """The words of a sentence in lower case."""
    return re.findall(r"[a-z]+", sentence.lower())


def _pairs(sentences: Sequence[str], key: str) -> Iterator[SentencePair]:
    paraphrases = [paraphrase(sentence, Random(f"{key}/{sentence}")) for sentence in sentences]
    having = _having(sentences)
    rare = {word for word in having if len(having[word]) <= COMMON}
    for i, j in _partners(sentences, having):
        others = paraphrases[j], paraphrases[i]
        random = Random(f"{key}/{sentences[i]}/{sentences[j]}")
        if random.random() < HARDER:
            others = (
                _exchanged((sentences[i], sentences[j]), (paraphrases[i], paraphrases[j]), rare) or others
            )
        for one, another in zip((i, j), others, strict=True):
            yield SentencePair(sentences[one], paraphrases[one], 1)
            yield SentencePair(sentences[one], another, 0)


def _having(sentences: Sequence[str]) -> dict[str, list[int]]:
    """For each word the sentences that have it."""
    having: dict[str, list[int]] = {}
    for i, sentence in enumerate(sentences):
        for word in dict.fromkeys(words_of(sentence)):
            having.setdefault(word, []).append(i)
    return having


def _partners(sentences: Sequence[str], having: dict[str, list[int]]) -> Iterator[tuple[int, int]]:
    """Each sentence with another that is much like it, by the share of their words that both have, and that
    no sentence before it has taken; of an odd number the last stays alone."""
    words = [set(words_of(sentence)) for sentence in sentences]
    free = dict.fromkeys(range(len(sentences)))

    def likeness(i: int, j: int) -> float:
        return len(words[i] & words[j]) / len(words[i] | words[j])

    while len(free) > 1:
        i = next(iter(free))
        del free[i]
        alike = {j for word in words[i] if len(having[word]) <= COMMON for j in having[word] if j in free}
        j = max(alike, key=lambda j: (likeness(i, j), -j)) if alike else next(iter(free))
        del free[j]
        yield i, j


def _exchanged(
    sentences: tuple[str, str], paraphrases: tuple[str, str], rare: set[str]
) -> tuple[str, str] | None:
    """The paraphrases, of which each has got two rarer words of the other's sentence for two of its own."""
    said = [paraphrase.split(" ") for paraphrase in paraphrases]
    own = [set(words_of(sentence)) & rare for sentence in sentences]
    places = [
        [k for k, word in enumerate(said[n]) if word.lower() in own[n] - own[1 - n]][-EXCHANGED:]
        for n in (0, 1)
    ]
    if min(map(len, places)) < EXCHANGED:
        return None
    for k, m in zip(*places, strict=True):
        said[0][k], said[1][m] = said[1][m], said[0][k]
    return " ".join(said[0]), " ".join(said[1])


# The rules. Each gives the sentence said otherwise, or None where it does not apply.

Rule = Callable[[str, Random], str | None]


def _table(text: str) -> dict[str, list[str]]:
    entries = (entry.split(" = ") for entry in text.replace("\n", " ").split(";"))
    return {word.strip(): [other.strip() for other in others.split("/")] for word, others in entries}


SYNONYMS = _table("""
return = give back / yield / hand back; returns = gives back / yields / hands back;
returned = given back / handed back; create = make / build; creates = makes / builds;
created = made / built; construct = build / make; get = fetch / obtain; gets = fetches / obtains;
retrieve = fetch / get; remove = delete / take out; removed = deleted / taken out;
delete = remove / erase; check = test / verify; checks = tests / verifies; specified = given / named;
given = specified / supplied; optional = not required; default = standard; raise = throw;
raises = throws; raised = thrown; exception = error; error = failure; use = employ / apply;
uses = employs / applies; used = employed / applied; using = with the help of / by means of;
call = invoke; called = invoked; calls = invokes; function = routine; method = function; object = thing;
string = text; strings = texts; directory = folder; dictionary = mapping / dict; argument = parameter;
arguments = parameters; list = sequence; number = count; current = present; new = fresh;
convert = turn / transform; find = look for / locate; found = located; write = put; set = assign;
add = append / put in; send = transmit; start = begin; stop = end; whether = if;
if = in case / provided that; when = as soon as / whenever; must = has to; should = ought to;
can = is able to; may = might; all = every one of; each = every; only = just; also = in addition;
otherwise = else; contains = holds / has; containing = with / holding; corresponding = matching;
value = content; name = title; path = location; type = kind; empty = blank; available = at hand;
same = identical; true = yes; false = no; open = opened; because = since; option = choice;
options = choices; represents = stands for; representing = that stands for; support = help;
determine = find out / decide; display = show; print = show; execute = run; run = execute;
allow = permit; change = alter / modify; ignored = skipped; first = initial; last = final;
associated = connected; provide = offer; provides = offers; required = needed; possible = feasible;
wait = hold on; data = information
""")
REGULAR = """
return add construct convert test format check open configure print generate move load log insert install
start join append pack list display perform extract clear reset call mark encode dump register
create parse raise remove delete initialize close execute produce use receive handle change
retrieve compute validate compile store replace update release invoke determine ensure
"""
VERBS = {verb: (f"{verb}s", verb + ("d" if verb.endswith("e") else "ed")) for verb in REGULAR.split()} | {
    "set": ("sets", "set"),
    "get": ("gets", "fetched"),
    "read": ("reads", "read"),
    "write": ("writes", "written"),
    "send": ("sends", "sent"),
    "find": ("finds", "found"),
    "make": ("makes", "made"),
    "run": ("runs", "run"),
    "copy": ("copies", "copied"),
    "stop": ("stops", "stopped"),
    "split": ("splits", "split"),
    "put": ("puts", "put"),
    "build": ("builds", "built"),
}  # imperative: third person, participle
BASES = {third: verb for verb, (third, _) in VERBS.items()}
OPENERS = ("This", "It", "Here one can", "Used to", "The task here is to", "What it does is to")
CLAUSES = "if|when|unless|while|until|after|before|because"
PLACES = "in|from|by|using|with|for|on|to|at"
ARTICLES = re.compile(r"\b(a|an|the) ")


def _front(sentence: str, _: Random) -> str | None:
    """ "Close it if it is open" -> "If it is open, close it"; the other way round, too."""
    if found := re.fullmatch(rf"((?:{CLAUSES}) [^,]+), ([^,]+)", sentence, re.IGNORECASE):
        return f"{found[2]} {_lower(found[1])}"
    found = re.fullmatch(rf"([^,]+ [^,]+?),? ((?:{CLAUSES}) [^,]+)", sentence)
    found = found or re.fullmatch(rf"([^,]+ [^,]+ [^,]+) ((?:{PLACES}) (?:a|an|the) [^,]+)", sentence)
    return f"{found[2]}, {_lower(found[1])}" if found else None


def _passive(sentence: str, random: Random) -> str | None:
    """ "Return the name of a file" -> "The name of a file is returned"."""
    verb, rest = sentence.split(" ", 1)
    base = BASES.get(verb.lower(), verb.lower())
    found = re.fullmatch(
        rf"((?:a|an|the|all|any) .+?)((?:,| \b(?:{CLAUSES}|{PLACES}|as|which|that)\b).*)?", rest
    )
    if base not in VERBS or not found:
        return None
    be = "are" if found[1].startswith("all") else "is"
    return f"{found[1]} {be} {VERBS[base][1]}{found[2] or ''}"


def _third_person(sentence: str, random: Random) -> str | None:
    """ "Return a name" -> "This returns a name"; the other way round, too."""
    verb, _, rest = sentence.partition(" ")
    if verb.lower() in BASES:
        return f"{BASES[verb.lower()]} {rest}"
    if verb.lower() not in VERBS:
        return None
    opener = OPENERS[int(random.random() * len(OPENERS))]
    inflected = VERBS[verb.lower()][0] if opener in OPENERS[:2] else verb.lower()
    return f"{opener} {inflected} {rest}"


def _possessive(sentence: str, _: Random) -> str | None:
    """ "the name of the file" -> "the file's name"."""
    changed = re.sub(r"\b(?:the|a) (\w+) of (the|a|an) (\w+)\b", r"\2 \3's \1", sentence)
    return None if changed == sentence else changed


def _swap(sentence: str, _: Random) -> str | None:
    """ "names or values" -> "values or names"."""
    changed = re.sub(
        rf"\b(\w+) (and|or) (\w+)(?=$|,| (?:{PLACES}|{CLAUSES}|is|are)\b)", r"\3 \2 \1", sentence
    )
    return None if changed == sentence else changed


def _drop_articles(sentence: str, _: Random) -> str | None:
    changed = ARTICLES.sub("", _lower(sentence))
    return None if changed == _lower(sentence) else changed


def _synonyms(sentence: str, random: Random, share: float = 0.6) -> str | None:
    """Other words for some of its words."""
    words = sentence.split(" ")
    for i, word in enumerate(words):
        bare = word.rstrip(",").lower()
        if bare in SYNONYMS and random.random() < share:
            others = SYNONYMS[bare]
            words[i] = others[int(random.random() * len(others))] + word[len(bare) :]
    changed = " ".join(words)
    return None if changed == sentence else changed


RULES: tuple[tuple[Rule, float], ...] = (
    (_possessive, 0.5),
    (_passive, 0.5),
    (_third_person, 0.3),
    (_front, 0.5),
    (_swap, 0.5),
    (_synonyms, 0.9),
    (_drop_articles, 0.3),
)


def paraphrase(sentence: str, random: Random) -> str:
    """``sentence`` said otherwise, by rules that ``random`` chooses; where none applies, with words added."""
    said = sentence
    for rule, chance in RULES:
        if random.random() < chance:
            said = rule(said, random) or said
    for rule in (partial(_synonyms, share=1.0), _front, _drop_articles):
        if words_of(said) == words_of(sentence):
            said = rule(said, random) or said
    if words_of(said) == words_of(sentence):
        said = f"in short, {_lower(sentence)}"
    return said[0].upper() + said[1:]


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
