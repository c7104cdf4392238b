"""Output of several ranks, folded."""

from __future__ import annotations

import pytest

from instep.notebook import folding
from instep.notebook.folding import Folding, parse_ranks, span


@pytest.fixture
def shown():
    return []


def folded(ranks, shown):
    return Folding(ranks, lambda stream, text: shown.append((stream, text)))


def test_a_line_that_all_ranks_print_is_shown_once(shown):
    output = folded([0, 1, 2], shown)
    for rank in (2, 0, 1):
        output.add(rank, "stdout", "epoch 0\n")
        output.show()
    assert shown == [("stdout", "[0-2] epoch 0\n")]
    assert output.wait_s is None


def test_other_lines_wait_for_each_other_and_are_then_grouped_by_rank(shown, monkeypatch):
    output = folded([0, 1, 2], shown)
    for rank, text in ((2, "a\nb\n"), (0, "a\nc\n"), (1, "a\nb\n")):
        output.add(rank, "stdout", text)
    output.show()
    assert shown == [("stdout", "[0-2] a\n")]
    assert output.wait_s is not None
    monkeypatch.setattr(folding, "DELAY_S", 0)
    output.show()
    assert shown[1:] == [("stdout", "[0] c\n"), ("stdout", "[1-2] b\n")]


def test_lines_between_two_common_ones_are_grouped_by_rank(shown):
    output = folded([0, 1], shown)
    for rank in (0, 1):
        output.add(rank, "stdout", f"step 0\nloss {rank}\nnorm {rank}\nstep 1\n")
    output.add(1, "stdout", "alone\n")
    output.show(everything=True)
    lines = [
        "[0-1] step 0",
        "[0] loss 0",
        "[0] norm 0",
        "[1] loss 1",
        "[1] norm 1",
        "[0-1] step 1",
        "[1] alone",
    ]
    assert "".join(text for _, text in shown) == "\n".join([*lines, ""])


def test_the_beginning_of_a_line_waits_for_its_end(shown, monkeypatch):
    monkeypatch.setattr(folding, "DELAY_S", 0)
    output = folded([0], shown)
    output.add(0, "stderr", "10 %\r50 %\r")
    output.show()
    assert shown == []
    output.add(0, "stderr", "100 %")
    output.show(everything=True)
    assert shown == [("stderr", "[0] 100 %\n")]


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([0, 1, 2, 3], "0-3"), ([0, 2, 3], "0,2-3"), ([4, 1], "1,4")]
)
def test_ranks_are_written_and_read(ranks, text):
    assert span(ranks) == text
    assert parse_ranks(f"[{text}]", 5) == sorted(ranks)
    assert parse_ranks("all", 2) == [0, 1]


@pytest.mark.parametrize("text", ["", "[]", "two", "5", "-1", "0-5"])
def test_other_texts_name_no_ranks(text):
    with pytest.raises(ValueError, match="expected ranks"):
        parse_ranks(text, 5)
