"""Weights and moments have one hash for any tp, with slices of the sequence or without, beside other axes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.tensor.trained import Placed

ONE = Placed({"tp": 1})
ALONGSIDE: dict[str, Any] = {
    "dp 2": {"axes": {"dp": 2, "tp": 2}},
    "dp 2, sequence": {"axes": {"dp": 2, "tp": 2}, "sequence": True},
    "moments over dp": {"axes": {"dp": 2, "tp": 2}, "shards_optimizer": True},
    "pipeline": {"axes": {"pp": 2, "tp": 2}, "pipeline": True},
    "pipeline, sequence": {"axes": {"pp": 2, "tp": 2}, "pipeline": True, "sequence": True},
}


@cache
def digest_of_one(**options: Any) -> str:
    return replace(ONE, **options).digest()


@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequences", "sequence parallelism"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_tp_gives_the_bits_of_one_rank(tp: int, sequence: bool) -> None:
    assert Placed({"tp": tp}, sequence=sequence).digest() == digest_of_one()


@pytest.mark.parametrize("placement", ALONGSIDE)
def test_every_other_axis_beside_tp_gives_the_bits_of_one_rank(placement: str) -> None:
    assert replace(ONE, **ALONGSIDE[placement]).digest() == digest_of_one()


def test_gathered_logits_have_the_bits_of_one_rank() -> None:
    assert Placed({"tp": 2}, gathers_logits=True).digest() == digest_of_one(gathers_logits=True)


def test_rounded_nodes_have_the_bits_of_one_rank() -> None:
    placed = Placed({"dp": 2, "tp": 2}, nodes="bfloat16")
    assert placed.digest() == digest_of_one(nodes="bfloat16") != digest_of_one()


def test_as_many_chunks_as_ranks_give_other_bits() -> None:
    """The control: otherwise the tests above would prove nothing."""
    assert Placed({"tp": 2}, chunks=None).digest() != Placed({"tp": 1}, chunks=None).digest()
