"""Sizes and counts as people write them, and the options that take them."""

import pytest

from instep.bench.options import CollectivesOptions, parse_count, parse_size, sizes_of, split_words


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


def test_lists_may_be_separated_by_commas_or_by_spaces():
    assert split_words(("gloo,shm", "ring,gloo")) == ("gloo", "shm", "ring")


def test_without_words_the_sizes_go_from_a_kilobyte_to_a_hundred_megabytes():
    sizes = sizes_of(CollectivesOptions())
    assert (sizes[0], sizes[-1]) == (1000, 10**8)
    assert sizes_of(CollectivesOptions(full=True))[-1] == 10**9
    assert sizes_of(CollectivesOptions(sizes=("1KB,2KB",))) == (1000, 2000)
