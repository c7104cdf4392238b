"""The config: what it refuses and in which words, what the bits may depend on, the rates that it draws."""

from dataclasses import replace

import pytest

from instep.pipeline import schedules
from instep.recipes import text_config
from instep.recipes.text_config import (
    Config,
    OptimConfig,
    ParallelConfig,
    check_world,
    learning_rate,
    local_ranks,
    merge,
    numerical,
    schedule_of,
    validate,
)
from instep.replicate.strategies import STRATEGIES

HEIGHT = 5


def changed(**topics: object) -> Config:
    """The default recipe with settings changed: ``changed(steps=3, batch={"micro_size": 2})``."""
    return merge(text_config.default(), topics, source="test")


@pytest.mark.parametrize(
    ("topics", "message"),
    [
        (
            {"batch": {"global_size": 30}},
            "batch.global_size 30 is no multiple of batch.micro_size 4: use 28 or 32",
        ),
        ({"batch": {"global_size": 3}}, "use 4, or another micro-batch"),
        ({"batch": {"micro_size": 0}}, "batch.micro_size: expected a number above 0, got 0"),
        ({"ranks": 9}, r"9 ranks, but only 8 micro-batches \(global 32 / micro 4\): use at most 8 ranks"),
        ({"ranks": -1}, "ranks: expected 0 or more, got -1"),
        ({"model": {"width": 130}}, r"model: .*width\(130\) % heads\(4\) = 2"),
        ({"model": {"dropout": 1.0}}, "model: expected 0 <= dropout < 1, got 1.0"),
        ({"optim": {"lr": float("nan")}}, "optim.lr: expected a finite number, got nan"),
        ({"optim": {"betas": [0.9, 1.0]}}, "optim.betas: expected a number from 0 to below 1, got 1.0"),
        ({"optim": {"min_lr_ratio": 1.5}}, "optim.min_lr_ratio: expected a number from 0 to 1, got 1.5"),
        ({"checkpoint": {"keep": 1}}, "checkpoint.keep: expected 2 or more, got 1"),
        ({"parallel": {"strategy": "flatt"}}, "naive, flat, overlap, bucketed, got 'flatt'"),
        ({"autocast": "fp16"}, "autocast: expected one of off, bf16, got 'fp16'"),
        (
            {"parallel": {"nodes": "fp8"}},
            "parallel.nodes: expected one of float32, bfloat16, int8, got 'fp8'",
        ),
        (
            {"parallel": {"schedule": "2f2b"}},
            "parallel.schedule 2f2b: expected one of naive, .*, or the path of a text file.*No such file",
        ),
        (
            {"parallel": {"schedule": "gpipe"}},
            "parallel.schedule gpipe with parallel.pp 1, .* leave schedule",
        ),
        ({"parallel": {"shard_stage": 4}}, "parallel.shard_stage: expected 0, 1, 2 or 3, got 4"),
        ({"parallel": {"shard_stage": 2, "strategy": "flat"}}, "with parallel.strategy flat.*; leave"),
        ({"parallel": {"shard_stage": 3, "ordered": False}}, "with parallel.ordered false.*; leave"),
        ({"parallel": {"shard": 2}}, "shard 2 with parallel.shard_stage 0, where nothing is divided: set"),
        (
            {"parallel": {"shard_stage": 1, "shard": 0}},
            "shard: expected 1 or more, or -1 for all ranks, got 0",
        ),
        ({"parallel": {"shard_stage": 2}, "record": {"leaves": True}}, r"stage 2 with record\.leaves.*; set"),
        (
            {"parallel": {"shard_stage": 3, "shard": 2}, "ranks": 7},
            "7 ranks for shard groups of parallel.shard 2: use 6 or 8 ranks, another",
        ),
        (
            {"parallel": {"shard_stage": 3, "shard": 2}, "ranks": 1},
            "1 rank for shard groups of parallel.shard 2: use 2 ranks, another",
        ),
        ({"parallel": {"chunks": 2}}, "parallel.chunks 2 with parallel.pp 1, where no rank has a stage of"),
        ({"parallel": {"ep": 2}}, "parallel.ep 2 with model.experts 0: expected experts to be a multiple"),
        ({"model": {"experts": 4}, "parallel": {"ep": 3}}, "parallel.ep 3 with model.experts 4: expected"),
        ({"model": {"experts": 4, "top_k": 5}}, "model: expected experts 0 or 1 <= top_k <= experts, got"),
        (
            {"model": {"experts": 4}, "parallel": {"pp": 2}},
            "experts 4 with parallel.pp 2 and optim.aux_loss 0.01: .* set optim.aux_loss 0 and optim.balance",
        ),
        (
            {"model": {"experts": 4}, "parallel": {"ep": 2, "shard_stage": 3}},
            "parallel.ep 2 with parallel.shard_stage 3: .* set parallel.shard_stage 1, or parallel.ep 1",
        ),
        (
            {"model": {"experts": 4}, "parallel": {"ep": 2, "nodes": "int8"}},
            "parallel.ep 2 with parallel.nodes int8: leave nodes out",
        ),
        (
            {"model": {"experts": 4, "width": 40}, "parallel": {"shard_stage": 2}},
            "model.width 40 and parallel.shard_stage 2: .* set a multiple of 32",
        ),
        ({"parallel": {"cuts": "3"}}, "parallel.cuts 3 with parallel.pp 1, .* set parallel.pp 2 or more"),
    ],
)
def test_a_config_that_cannot_run_is_refused_by_name(topics, message):
    with pytest.raises(ValueError, match=message):
        validate(changed(**topics))


def test_a_schedule_of_ones_own_is_a_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(str(schedules.gpipe(2, 4)))
    mine = changed(parallel={"pp": 2, "schedule": str(path)})
    validate(mine)
    assert schedule_of(mine.parallel) == path.read_text()


def test_the_strategies_are_those_that_exist():
    names = list(STRATEGIES)
    for name in names:
        validate(changed(parallel={"strategy": name}))
    with pytest.raises(ValueError, match=f"expected one of {', '.join(names)}, got"):
        validate(changed(parallel={"strategy": "none of them"}))


def test_a_launcher_that_starts_too_many_ranks_or_no_whole_shard_groups_is_refused():
    check_world(changed(), 8)
    with pytest.raises(ValueError, match="9 ranks, but only 8 micro-batches"):
        check_world(changed(), 9)
    groups = changed(parallel={"shard_stage": 3, "shard": 2})
    check_world(groups, 4)
    check_world(groups, 3, restarted=True)
    with pytest.raises(ValueError, match=r"7 ranks for shard groups of parallel\.shard 2: use 6 or 8 ranks"):
        check_world(groups, 7)


@pytest.mark.parametrize(
    ("ranks", "threads", "num_cores", "expected"),
    [(0, 1, 2, 2), (0, 1, 64, 8), (0, 4, 6, 1), (0, 4, 2, 1), (3, 1, 2, 3)],
)
def test_ranks_fill_the_cores_unless_their_number_is_given(ranks, threads, num_cores, expected):
    assert local_ranks(changed(ranks=ranks, parallel={"threads": threads}), num_cores) == expected


def test_numerical_has_nothing_of_placement():
    placed = changed(
        ranks=3,
        run_dir="elsewhere",
        data="some.txt",
        resume=True,
        stop_after=5,
        timeout_s=1.0,
        parallel={"strategy": "naive", "bucket_mb": 0.1, "backend": "gloo"},
        checkpoint={"every": 1, "keep": 9},
        eval={"every": 1, "windows": 1},
        model={"checkpoint": True},
    )
    assert numerical(placed) == numerical(text_config.default())


def test_numerical_has_everything_else():
    base = numerical(text_config.default())
    for name in ("steps", "seed", "model.layers", "batch.micro_size", "optim.betas.1", "parallel.threads"):
        assert name in base
    unordered = numerical(replace(text_config.default(), parallel=ParallelConfig(ordered=False)))
    assert {name for name in base if base[name] != unordered[name]} == {"parallel.ordered"}
    with_experts = numerical(changed(model={"experts": 4}))
    assert dict(with_experts.items() - base.items()) == {
        "model.experts": 4,
        "model.top_k": 2,
        "optim.aux_loss": 0.01,
        "optim.balance_rate": 0.0,
    }
    rounded = numerical(replace(text_config.default(), parallel=ParallelConfig(nodes="int8")))
    assert dict(rounded.items() - base.items()) == {"parallel.nodes": "int8", "parallel.rounding": "nearest"}
    assert all(isinstance(value, str | int | float | bool) for value in base.values())


def drawn(optim: OptimConfig, num_steps: int) -> str:
    """Columns are steps, rows are fifths of the full rate."""
    rates = [learning_rate(optim, step, num_steps) / optim.lr for step in range(num_steps)]
    rows = range(HEIGHT, 0, -1)
    return "\n".join("".join(".#"[round(rate * HEIGHT) >= row] for rate in rates) for row in rows)


def picture(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_warm_up_is_a_ramp_and_then_comes_half_a_cosine():
    assert drawn(OptimConfig(lr=3e-4, warmup_steps=5, min_lr_ratio=0.2), num_steps=15) == picture(
        """
        ....####.......
        ...######......
        ..#########....
        .###########...
        ###############
        """
    )


def test_a_constant_rate_stays_where_warm_up_has_left_it():
    assert drawn(OptimConfig(lr=2.0, warmup_steps=5, schedule="constant"), num_steps=9) == picture(
        """
        ....#####
        ...######
        ..#######
        .########
        #########
        """
    )


@pytest.mark.parametrize(("warmup", "num_steps"), [(0, 1), (1, 1), (1, 2), (5, 5), (9, 5)])
def test_a_run_too_short_for_the_shape_still_has_rates(warmup, num_steps):
    optim = OptimConfig(lr=1.0, warmup_steps=warmup, min_lr_ratio=0.0)
    assert all(0 <= learning_rate(optim, step, num_steps) <= 1 for step in range(num_steps))
