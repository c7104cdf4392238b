"""The text recipe: with one micro-batch the steps of a plain torch loop, and on any ranks those of one."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

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
from instep.rng.keys import initialize
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
