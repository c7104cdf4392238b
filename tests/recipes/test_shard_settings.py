"""What the text recipe's settings of sharding do not go with is refused, with the way out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from instep.recipes.text_config import Config, ParallelConfig, check_rows, check_world, tiny, validate
from instep.run.settings import RecordConfig


def config(**parallel: object) -> Config:
    return replace(tiny(), parallel=ParallelConfig(**parallel))  # type: ignore[arg-type]


STAGES = [
    ({"shard_stage": 4}, "parallel.shard_stage: expected 0, 1, 2 or 3, got 4"),
    ({"shard_stage": 2, "strategy": "flat"}, "with parallel.strategy flat.*; leave"),
    ({"shard_stage": 3, "ordered": False}, "with parallel.ordered false.*; leave"),
]
GROUPS = [
    ({"shard": 2}, "parallel.shard 2 with parallel.shard_stage 0, where nothing is divided: set"),
    ({"shard_stage": 1, "shard": 0}, "parallel.shard: expected 1 or more, or -1 for all ranks, got 0"),
]


@pytest.mark.parametrize(("parallel", "said"), [*STAGES, *GROUPS], ids=str)
def test_what_a_stage_does_not_go_with_is_refused(parallel: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        validate(config(**parallel))


def test_no_rank_that_has_a_part_of_a_gradient_can_hash_it() -> None:
    leaves = RecordConfig(leaves=True)
    with pytest.raises(ValueError, match=r"shard_stage 2 with record\.leaves.*; set"):
        validate(replace(config(shard_stage=2), record=leaves))
    validate(replace(config(shard_stage=1), record=leaves))


def test_every_stage_may_be_asked_for() -> None:
    validate(config(shard_stage=3))


@pytest.mark.parametrize(
    ("num_ranks", "said"),
    [
        (7, "7 ranks for shard groups of parallel.shard 2: use 6 or 8 ranks, another"),
        (1, "1 rank for shard groups of parallel.shard 2: use 2 ranks, another"),
    ],
)
def test_ranks_that_are_no_whole_shard_groups_are_refused(num_ranks: int, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_rows(num_ranks, 2)
    asked = config(shard_stage=3, shard=2)
    with pytest.raises(ValueError, match=re.escape(said)):
        check_world(asked, num_ranks)
    with pytest.raises(ValueError, match=re.escape(said)):
        validate(replace(asked, ranks=num_ranks))


def test_whole_shard_groups_and_what_a_launcher_could_start_again_are_not() -> None:
    check_rows(6, 3)
    check_rows(5, 1)
    check_rows(5, -1)
    asked = config(shard_stage=3, shard=2)
    check_world(asked, 4)
    check_world(asked, 3, restarted=True)
