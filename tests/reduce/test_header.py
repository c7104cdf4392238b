"""Headers arrive as they were sent, and every rank reads the same verdict in them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.reduce.header import (
    AGREED,
    NUM_FIELDS,
    UPDATE,
    VERSION,
    Header,
    disagreement,
    header_length,
    pack,
    unpack,
)

GOOD = Header(
    version=VERSION,
    declared=1,
    step=12,
    exchange=0,
    bucket=3,
    num_elements=4096,
    num_leaves=8,
    weight=64,
    ready_ns=10**18,
    launched_ns=10**18,
    left=0,
)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
headers = st.builds(Header, *[int64 for _ in Header._fields])


@given(st.integers(0, 200), st.lists(headers, min_size=1, max_size=5), st.data())
@settings(deadline=None)
def test_headers_and_flags_arrive_as_they_were_sent(num_parameters, sent, data):
    length, num_flags = header_length(num_parameters), 2 * num_parameters
    flags = [data.draw(st.integers(0, (1 << num_flags) - 1)) for _ in sent]
    rows = torch.stack(
        [pack(header, bits, num_flags, length) for header, bits in zip(sent, flags, strict=True)]
    )
    assert rows.shape == (len(sent), length)
    assert unpack(rows, num_flags) == (sent, flags)


@pytest.mark.parametrize("num_parameters", [0, 1, 31, 32, 62, 63, 64, 124, 125, 1000])
def test_no_flag_is_lost_at_the_edge_of_a_word(num_parameters):
    length, num_flags = header_length(num_parameters), 2 * num_parameters
    chosen = {0, num_parameters - 1, num_parameters, num_flags - 1} & set(range(num_flags))
    for flags in [*(1 << i for i in chosen), (1 << num_flags) - 1]:
        assert unpack(pack(GOOD, flags, num_flags, length)[None], num_flags) == ([GOOD], [flags])


@pytest.mark.parametrize("field", sorted(set(AGREED) - {"op"}))
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_odd_rank_is_named_with_both_values(field, odd):
    ranks = [10, 20, 30]
    sent = [GOOD] * 3
    sent[odd] = GOOD._replace(**{field: 77})
    verdict = disagreement(sent, ranks)
    others = ", ".join(str(rank) for i, rank in enumerate(ranks) if i != odd)
    assert verdict is not None
    does, _ = AGREED[field]
    value = {"declared": "a declared step", "hooked": "instep's exchange"}.get(field, getattr(GOOD, field))
    said = f"the ranks are out of step: rank {ranks[odd]} {does.format(77)}; ranks {others}: {value}"
    assert verdict.what == said
    assert verdict.in_short == f"rank {ranks[odd]} is out of step"


def test_the_first_thing_that_differs_is_told_with_its_fix():
    late = GOOD._replace(step=11, exchange=1, bucket=0)
    verdict = disagreement([GOOD, late], [0, 1])
    assert verdict is not None
    said = str(verdict)
    assert "rank 1 is at optimizer step 11; rank 0: 12. Each rank must call optimizer.step()" in said
    assert "bucket" not in said


def test_ranks_that_do_different_things_are_told_what_in_words():
    steps = GOOD._replace(op=UPDATE)
    assert str(disagreement([steps, GOOD, steps], [4, 5, 6])).startswith(
        "the ranks are out of step: rank 5 is in the exchange of gradients; ranks 4, 6: optimizer.step(). "
    )


@given(st.lists(st.tuples(headers, st.lists(int64, min_size=3, max_size=3)), min_size=1, max_size=5))
@settings(deadline=None)
def test_a_few_words_travel_with_a_header(sent):
    rows = torch.stack([pack(header, 0, 0, header_length(0), words) for header, words in sent])
    assert unpack(rows, 0)[0] == [header for header, _ in sent]
    assert rows[:, NUM_FIELDS : NUM_FIELDS + 3].tolist() == [words for _, words in sent]


def test_a_rank_that_left_is_named_before_all_else():
    verdict = disagreement([GOOD, GOOD._replace(left=1, bucket=0), GOOD._replace(left=1)], [3, 5, 7])
    assert verdict is not None
    assert verdict.what.startswith("ranks 5, 7 left step 12 ")
    assert "nothing was reduced" in verdict.what
