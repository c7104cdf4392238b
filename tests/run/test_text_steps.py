"""The text recipe: with one micro-batch the steps of a plain torch loop; what follows its steps."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from instep.data.order import sample_at
from instep.errors import ContractBroken
from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.recipes import text_config
from instep.recipes.text_config import BatchConfig, Config
from instep.record.directory import RECORD
from instep.record.display import Display
from instep.record.jsonl import read_lines
from instep.record.step_lines import steps_recorded
from instep.rng.keys import initialize
from instep.run.generation import AfterSteps
from instep.run.writer import RunWriter
from tests.parity import assert_same_bits, world_of_one
from tests.run.text_training import TextTraining, tiny
from tests.state_oracle import state_entries
from tests.world import world


def begun(config: Config, mesh: Mesh) -> TextTraining:
    mine = TextTraining(config, mesh)
    mine.begin()
    return mine


def test_one_micro_batch_on_one_rank_gives_the_bits_of_a_plain_loop(data: Path) -> None:
    optim = replace(text_config.tiny().optim, clip=0.0, schedule="constant")
    plain = tiny(data, batch=BatchConfig(global_size=4, micro_size=4), optim=optim)
    mine = begun(plain, world_of_one())

    module = GPT(GPTConfig(**asdict(plain.model)))
    initialize(module, plain.seed)
    decayed = [p for p in module.parameters() if p.ndim >= 2]
    rest = [p for p in module.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=2e-3,
        betas=(0.9, 0.95),
        fused=True,
    )
    text = mine.text.train
    for step, rate in enumerate((1e-3, 2e-3, 2e-3)):  # two steps of warm-up
        positions = range(4 * step, 4 * step + 4)
        windows = text.windows([sample_at(i, len(text), plain.seed) for i in positions])
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = module(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert mine.step().loss == loss.item()
    assert_same_bits(state_entries(mine.module, mine.optimizer), state_entries(module, optimizer))


@world(2)
def test_ranks_with_other_texts_do_not_begin(mesh: Mesh, data: Path) -> None:
    mine = data.with_name(f"text of rank {mesh.rank}")
    mine.write_bytes(data.read_bytes() + bytes([65 + mesh.rank]))
    words = r"rank 0 says which" if mesh.rank else r'  data.sha256: "\w+" on rank 0, "\w+" on rank 1$'
    with pytest.raises(ContractBroken, match=words):
        TextTraining(tiny(mine), mesh)


def run(path: Path, config: Config) -> tuple[list[int], TextTraining]:
    """Run the steps of ``config``: those that were saved, and what was trained."""
    mine, saved = TextTraining(config, world_of_one()), list[int]()
    training = mine.training
    books = RunWriter(path, training, min(steps_recorded(path), training.steps_done))
    books.started(0, [])
    checkpoints = mock.Mock(save=lambda training: saved.append(training.steps_done))
    after = AfterSteps(training, books, Display(1, config.steps), checkpoints)
    after.begin(is_saved=False)
    while after.ending is None:
        mine.step()
        after.follow_up()
    books.close()
    return saved, mine


def test_saving_and_evaluating_fall_due_at_their_steps_and_at_the_last(data: Path, tmp_path: Path) -> None:
    config = tiny(data, steps=5)
    config = replace(
        config, checkpoint=replace(config.checkpoint, every=2), eval=replace(config.eval, every=3)
    )
    assert run(tmp_path, config)[0] == [2, 4, 5]
    held_out = [line["step"] for line in read_lines(tmp_path / RECORD) if "held_out_loss" in line]
    assert held_out == [0, 2, 4]


def test_evaluating_does_not_move_a_bit_and_every_step_has_its_line(data: Path, tmp_path: Path) -> None:
    found = []
    for name, every in (("often", 1), ("never", 0)):
        (tmp_path / name).mkdir()
        config = tiny(data)
        _, mine = run(tmp_path / name, replace(config, eval=replace(config.eval, every=every)))
        started, _, *steps = read_lines(tmp_path / name / RECORD)
        assert (started["event"], started["step"], started["restarts"]) == ("started", 0, 0)
        assert [line["cursor"] for line in steps] == [16, 32, 48]
        found.append(mine.training.state_sha256())
    assert found[0] == found[1]
