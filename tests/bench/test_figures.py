"""Sizes, bandwidths, ratios, tables, labels, models of a size, and options that contradict each other."""

import json
import os
import socket
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.bench.bandwidth import bus_factor, cache_bytes, whole_count
from instep.bench.options import (
    BucketsOptions,
    CollectivesOptions,
    ScalingOptions,
    StepsOptions,
    parse_size,
    sizes_of,
)
from instep.bench.tables import checked_out, environment, markdown, paired_ratio, show
from instep.bench.variants import full_model
from instep.bench.workloads import MLPS, WORKLOADS, Workload, gpt_of_size
from instep.models.config import num_parameters
from instep.timeline.palette import colours
from instep.timeline.style import spread


@pytest.mark.parametrize(
    ("collective", "of_two", "of_four"),
    [
        ("all_reduce", 1.0, 1.5),
        ("all_gather", 0.5, 0.75),
        ("reduce_scatter", 0.5, 0.75),
        ("all_to_all", 0.5, 0.75),
        ("broadcast", 1.0, 1.0),
        ("reduce", 1.0, 1.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(collective, of_two, of_four):
    assert bus_factor(collective, 2) == of_two
    assert bus_factor(collective, 4) == of_four


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("size", [1, 1000, 64_000, 10**8])
def test_messages_are_whole_parts_and_not_larger_than_asked(size, num_ranks):
    count = whole_count(size, num_ranks)
    assert count % num_ranks == 0
    assert count >= num_ranks
    assert 4 * count <= max(size, 4 * num_ranks)
    assert 4 * (count + num_ranks) > size


def test_the_last_level_cache_is_the_largest_that_the_system_names(tmp_path):
    for index, size in enumerate(("32K", "32K", "1024K", "32768K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == 32 << 20


def test_a_name_has_the_same_colour_whoever_stands_beside_it():
    alone, together = colours(["shm"]), colours(["new", "gloo", "shm", "other"])
    assert alone["shm"] == together["shm"]
    assert len(set(together.values())) == 4


@given(st.dictionaries(st.text(min_size=1), st.floats(-100, 100), min_size=1, max_size=8))
def test_labels_keep_their_order_and_their_distance(heights):
    found = spread(heights, gap=10)
    places = [found[name] for name in sorted(heights, key=lambda name: heights[name])]
    assert all(above - below > 10 - 1e-6 for below, above in pairwise(places))


def test_labels_stay_beside_the_axes():
    found = spread({"a": 95.0, "b": 98.0, "c": 99.0, "d": 1.0}, gap=10, low=0, high=100)
    assert found == {"d": 1.0, "a": 80.0, "b": 90.0, "c": 100.0}


ROWS = [{"backend": "gloo", "size(B)": 1000, "time(us)": 12.345}, {"backend": "shm", "size(B)": 64000}]


def test_a_disturbance_of_both_members_of_a_pair_leaves_their_ratio():
    disturbed = [1.0, 5.0, 1.0, 40.0, 1.0]
    found = paired_ratio([2 * x for x in disturbed], disturbed)
    assert found == (2, 2, 2)


def test_the_spread_of_a_ratio_is_its_quartiles():
    assert paired_ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5) == (3, 2, 4)
    with pytest.raises(ValueError, match="expected pairs, got 1 and 2"):
        paired_ratio([1.0], [1.0, 2.0])


def test_markdown_has_numbers_on_the_right_and_gaps_where_there_is_nothing():
    assert markdown(ROWS).splitlines() == [
        "| backend | size(B) | time(us) |",
        "| --- | ---: | ---: |",
        "| gloo | 1,000 | 12.3 |",
        "| shm | 64,000 |  |",
    ]


def test_a_table_is_aligned_and_within_a_hundred_columns_when_piped(capsys):
    wide = [{f"column {i}(GB/s)": 1234567.0 for i in range(9)} | row for row in ROWS]
    for rows in (ROWS, wide):
        show(rows, "A title", notes=["a note"])
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "A title"
        assert "a note" in lines
        assert max(map(len, lines)) <= 100
        assert len({len(line) for line in lines if "gloo" in line or "shm" in line}) == 1


def test_the_environment_names_no_host_and_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", [f"{tmp_path}/__main__.py", "bench", "--json", f"{tmp_path}/a.json"])
    found = environment()
    assert set(found) - {"commit"} == {"cpu", "cores", "torch", "python", "command", "date"}
    assert found.get("commit") == checked_out()  # none in an installed package
    assert found["command"] == "instep bench --json a.json"
    assert os.sep not in found["command"]
    assert socket.gethostname() not in json.dumps(found)


@pytest.mark.parametrize("context", [64, 128, 1024])
def test_a_model_has_nearly_as_many_parameters_as_were_asked_for(context):
    params = 200_000
    while params < 10**9:
        made = gpt_of_size(params, context)
        assert num_parameters(made) == pytest.approx(params, rel=1 / 8), params
        assert made.layers == 10 and made.width / made.heads >= 20
        params = params * 11 // 10


def test_a_model_that_would_be_narrower_than_16_is_refused():
    least = num_parameters(gpt_of_size(39_000, 128))
    assert gpt_of_size(least, 128).width == 16
    with pytest.raises(ValueError, match=rf"expected at least {least:,} parameters, got {least - 1:,}"):
        gpt_of_size(least - 1, 128)


@pytest.mark.parametrize(
    ("preset", "millions"), [("small", 124.4), ("medium", 354.8), ("large", 774.0), ("xl", 1557.6)]
)
def test_a_preset_has_the_size_that_was_published(preset, millions):
    published = Workload("a", 1, batch=1, what="a", tokens=1024, preset=preset, vocab=50257)
    assert published.gradient_bytes / 4e6 == pytest.approx(millions, abs=0.05)
    assert published.text.startswith(f"{preset}: ")
    assert "a vocabulary of 50,257" in published.text


@pytest.mark.parametrize("name", MLPS)
def test_an_mlp_has_the_size_that_it_is_called_by(name):
    chosen = WORKLOADS[name]
    made = sum(p.numel() for p in full_model(chosen.model).parameters())
    assert made == chosen.num_parameters == chosen.gradient_bytes / 4
    assert f"mlp-{made / 1e6:.2g}M" == chosen.name == name
    assert chosen.text == f"an MLP of {made / 1e6:.2g} M parameters, 32 vectors per rank"


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


def test_without_words_the_sizes_go_from_a_kilobyte_to_a_hundred_megabytes():
    sizes = sizes_of(CollectivesOptions())
    assert (sizes[0], sizes[-1]) == (1000, 10**8)
    assert sizes_of(CollectivesOptions(full=True))[-1] == 10**9
    assert sizes_of(CollectivesOptions(sizes=("1KB,2KB",))) == (1000, 2000)


def test_an_mlp_has_a_batch_of_its_own_unless_one_is_given():
    [name] = StepsOptions(preset="mlp-0.53M").settings
    assert StepsOptions(preset="mlp-0.53M").workload(name) == WORKLOADS["mlp-0.53M"]
    assert StepsOptions(preset="mlp-0.53M", batch=8).workload(name).batch == 8
    StepsOptions(preset="mlp-0.53M", batch=8).check()


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
