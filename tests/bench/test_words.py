"""Sizes and counts as people write them, and the options that take them."""

import pytest

from instep.bench.options import Collectives, sizes_of
from instep.bench.words import duration_text, parse_count, parse_size, size_text, words


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512", 512),
        ("1KB", 1000),
        ("64 kb", 64_000),
        ("1MiB", 1 << 20),
        ("1.5M", 1_500_000),
        ("1GB", 10**9),
        ("2GiB", 2 << 30),
        ("8B", 8),
    ],
)
def test_sizes_are_decimal_unless_they_say_otherwise(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "KB", "1TB", "-1KB", "1..5M", "0", "1KBB", "."])
def test_what_is_no_size_is_refused_in_its_own_words(text):
    with pytest.raises(ValueError, match="expected a size such as"):
        parse_size(text)


def test_parameters_are_counted_in_millions():
    assert parse_count("70M") == 70_000_000


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(996, "996 B"), (1000, "1 KB"), (64_000, "64 KB"), (10**8, "100 MB"), (10**9, "1 GB")],
)
def test_sizes_are_said_as_they_are_written(nbytes, text):
    assert size_text(nbytes) == text


def test_durations_have_the_unit_that_makes_them_short():
    assert [duration_text(us) for us in (1.5, 1500, 2e6)] == ["1.5 µs", "1.5 ms", "2 s"]


def test_lists_may_be_separated_by_commas_or_by_spaces():
    assert words(("gloo,shm", "ring,gloo")) == ("gloo", "shm", "ring")


def test_without_words_the_sizes_go_from_a_kilobyte_to_a_hundred_megabytes():
    sizes = sizes_of(Collectives())
    assert (sizes[0], sizes[-1]) == (1000, 10**8)
    assert sizes_of(Collectives(full=True))[-1] == 10**9
    assert sizes_of(Collectives(sizes=("1KB,2KB",))) == (1000, 2000)
