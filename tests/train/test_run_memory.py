"""The formulas against what is counted, and the line that people read."""

import re
from dataclasses import replace

import pytest
import torch

from instep.models.config import GPTConfig, num_parameters
from instep.models.transformer import GPT
from instep.recipes.memory_estimate import activation_bytes, formula, num_moments
from instep.recipes.text import text_loss
from instep.run.memory_usage import activations, everyone, memory_usage, run_memory, words
from instep.train.optimizers import make_optimizer
from instep.train.run_config import OptimConfig
from tests.parity import world_of_one
from tests.train.test_trainer import config, trained
from tests.world import world

SMALL = GPTConfig(layers=3, width=64, heads=2, context=32)
SHAPES = {
    "small": (SMALL, "off"),
    "wide feed-forward": (replace(SMALL, ff_width=512), "off"),
    "dropout": (replace(SMALL, dropout=0.1), "off"),
    "deep, untied": (replace(SMALL, layers=6, tied=False), "off"),
    "bf16": (SMALL, "bf16"),
    "bf16 and dropout": (replace(SMALL, dropout=0.1), "bf16"),
    "computed again": (replace(SMALL, dropout=0.1, checkpoint=True), "off"),
    "computed again in bf16": (replace(SMALL, checkpoint=True), "bf16"),
}


@pytest.mark.parametrize(("config", "autocast"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("micro_size", [1, 4])
def test_activations_are_as_many_as_the_formula_says(config, autocast, micro_size):
    module, windows = GPT(config), torch.arange(33).repeat(micro_size, 1)
    device = torch.device("cpu")
    counted = activations(module, lambda: text_loss(module, windows, device=device, autocast=autocast))
    said = activation_bytes(config, micro_size, autocast=autocast == "bf16")
    assert said == pytest.approx(counted, rel=0.04)


OPTIMS = {
    16: OptimConfig(lr=0.1),
    12: OptimConfig(name="sgd", lr=0.1),
    8: OptimConfig(name="sgd", momentum=0.0, lr=0.1),
}


@pytest.mark.parametrize("each", OPTIMS)
def test_state_takes_16_12_or_8_bytes_per_parameter(each):
    module, windows = GPT(SMALL), torch.zeros(1, 33, dtype=torch.int64)
    optimizer = make_optimizer(module.parameters(), OPTIMS[each])
    text_loss(module, windows, device=torch.device("cpu"), autocast="off").backward()
    optimizer.step()
    said = formula(SMALL, num_moments(OPTIMS[each]), micro_size=1)
    assert said["bytes_per_parameter"] == each
    assert memory_usage(module, optimizer).state == pytest.approx(each * num_parameters(SMALL), rel=0.001)
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(memory_usage(module, optimizer), name) == pytest.approx(said[name], rel=0.001)


STAGES = {
    (0, 4): 16, (1, 1): 16, (1, 2): 8 + 8 / 2, (1, 4): 8 + 8 / 4,
    (2, 4): 4 + 12 / 4, (3, 2): 16 / 2, (3, 4): 16 / 4,
}  # fmt: skip


@pytest.mark.parametrize(("stage", "ranks"), STAGES)
def test_each_stage_divides_what_the_paper_says_it_divides(stage, ranks):
    said = formula(SMALL, 2, micro_size=1, stage=stage, ranks=ranks)
    assert said["bytes_per_parameter"] == STAGES[stage, ranks]
    state = said["parameters"] + said["gradients"] + said["optimizer"]
    assert state == pytest.approx(STAGES[stage, ranks] * num_parameters(SMALL), abs=3)


def test_two_blocks_and_what_is_in_no_block_are_gathered_at_a_time():
    blocks = [
        p.numel() for name, p in GPT(SMALL).named_parameters() if name.startswith(("blocks.0", "blocks.1"))
    ]
    rest = [p.numel() for name, p in GPT(SMALL).named_parameters() if not name.startswith("blocks.")]
    assert formula(SMALL, 2, micro_size=1, stage=3, ranks=2)["gathered"] == 4 * (sum(blocks) + sum(rest))
    assert formula(SMALL, 2, micro_size=1, stage=2, ranks=2)["gathered"] == 0


@world(2, by="process")
def test_every_rank_hears_of_all_and_the_host_is_more_than_one_and_less_than_all(mesh):
    group = mesh.world.group
    found = everyone(group, {"parameters": 100 + group.rank})
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert [row["parameters"] for row in found["ranks"]] == [100, 101]
    (host,) = found["hosts"]
    assert host["ranks"] == [0, 1]
    peaks = [row["resident_peak"] for row in found["ranks"]]
    if None not in peaks:
        assert max(peaks) < host["resident_peak"] < sum(peaks)  # both have torch loaded, once


@pytest.mark.parametrize("strategy", ["bucketed", "server", "threads"])
@world(2)
def test_a_run_tells_its_memory_and_is_none_the_worse_for_it(mesh, data, strategy):
    ranks = 1 if strategy == "threads" else 2
    if mesh.rank >= ranks:
        return
    tiny = config(data, strategy)
    trainer = trained(tiny, mesh if ranks == 2 else world_of_one(), steps=1)
    before = trainer.state_sha256()
    memory = run_memory(trainer)
    assert trainer.state_sha256() == before
    assert all(p.grad is None for p in trainer.module.parameters())
    said = memory["formula"]
    for row in memory["ranks"]:
        worker = strategy == "server" and row["rank"] > 0
        assert row["parameters"] == said["parameters"]
        assert row["gradients"] == pytest.approx(said["gradients"], rel=0.05)
        assert row["optimizer"] == (0 if worker else pytest.approx(said["optimizer"], rel=0.05))
        assert row["activations"] == pytest.approx(said["activations"], rel=0.1)
    assert "as the formula says" in words(memory)
    trainer.step()  # goes on as if nothing had been
    undisturbed = trained(tiny, world_of_one(), steps=2) if strategy == "bucketed" else None
    assert undisturbed is None or trainer.state_sha256() == undisturbed.state_sha256()


ROW = {"parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 8_000_000, "buffers": 0}
ROW |= {"scratch": 0, "activations": 12_340_000, "resident_peak": 310_000_000}
FORMULA = {"bytes_per_parameter": 16, "parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 8_000_000}


def told(*rows, hosts=(512_000_000,)):
    return {"ranks": rows, "hosts": [{"resident_peak": each} for each in hosts], "formula": FORMULA}


def test_the_line_says_state_activations_and_what_is_resident():
    assert words(told(ROW, ROW)) == (
        "16.0 MB of state per rank (16 bytes per parameter, as the formula says) + 12.3 MB activations; "
        "310 MB resident, 512 MB for all ranks of the host"
    )


def test_ranks_that_differ_are_told_by_the_one_that_has_most():
    other = {**ROW, "optimizer": 0, "scratch": 3_000_000}
    assert words(told(ROW, other)).startswith("up to 16.0 MB of state per rank (16 bytes per parameter, as")
    assert "+ 3.00 MB scratch;" in words(told(ROW, other))


def test_the_line_does_not_say_that_the_formula_says_what_it_does_not():
    half = {**ROW, "optimizer": 4_000_000}
    assert "(12.0 bytes per parameter; the formula says 16)" in words(told(half, half))


def test_the_largest_of_several_hosts_is_told():
    assert words(told(ROW, ROW, hosts=(5e8, 6e8))).endswith("600 MB for all ranks of a host")


def test_one_rank_is_its_host():
    assert words(told(ROW)).endswith("; 310 MB resident")


def test_what_nobody_knows_is_left_out():
    row = {**ROW, "activations": None, "resident_peak": None}
    assert re.fullmatch(r"16\.0 MB of state per rank \([^)]*\)", words(told(row, row, hosts=(None,))))
