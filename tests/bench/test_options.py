"""Sizes and counts as people write them, and the options that take them."""

import pytest

from instep.bench.options import (
    BucketsOptions,
    CollectivesOptions,
    ScalingOptions,
    StepsOptions,
    parse_count,
    parse_size,
    sizes_of,
    split_words,
)
from instep.bench.workloads import WORKLOADS


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


def test_a_workload_is_what_the_options_say_of_it():
    asked = StepsOptions(preset="medium", batch=32, context=64, optimizer="adamw")
    [name] = asked.settings
    chosen = asked.workload(name)
    assert (chosen.config.width, chosen.config.layers, chosen.config.heads) == (1024, 24, 16)
    assert (chosen.batch, chosen.tokens, chosen.optimizer) == (32, 64, "adamw")


def test_an_mlp_has_a_batch_of_its_own_unless_one_is_given():
    [name] = StepsOptions(preset="mlp-0.53M").settings
    assert StepsOptions(preset="mlp-0.53M").workload(name) == WORKLOADS["mlp-0.53M"]
    assert StepsOptions(preset="mlp-0.53M", batch=8).workload(name).batch == 8
    StepsOptions(preset="mlp-0.53M", batch=8).check()


def test_what_nothing_is_said_of_is_as_it_was():
    assert StepsOptions().settings == ("communication",)
    assert StepsOptions(setting="both").settings == ("communication", "compute")
    assert StepsOptions().workload("compute").batch == 8
    assert BucketsOptions().workload("buckets").tokens == 64
    assert BucketsOptions(params="5M", context=8).workload("link").batch == 4


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (StepsOptions(preset="tiny"), "expected a size among small, medium, large, xl, 2.7B, got 'tiny'"),
        (StepsOptions(preset="xl", params="5M"), "both say how large the model is"),
        (StepsOptions(batch=4, setting="compute"), "both say how much a rank computes"),
        (StepsOptions(preset="mlp-8.4M", context=8), "an MLP has vectors, no tokens"),
        (BucketsOptions(preset="mlp-8.4M"), "expected a size among small, .* got 'mlp-8.4M'"),
        (BucketsOptions(context=0), "expected --context of at least 1, got 0"),
        (BucketsOptions(backend="shm", link=True), "hosts share no memory, and here no GPU"),
        (ScalingOptions(ranks=(2, 2)), "expected at least two numbers of ranks"),
        (ScalingOptions(ranks=(1, 3)), "4 windows in a step cannot be shared alike by 3 ranks"),
    ],
)
def test_what_contradicts_itself_is_refused(options, line):
    with pytest.raises(ValueError, match=line):
        options.check()


def test_work_per_rank_can_be_had_on_any_number_of_ranks():
    ScalingOptions(ranks=(1, 3), work="weak").check()
