"""Blocks that are computed again in backward, and bf16: less memory, on any placement the bits of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from instep.mesh.mesh import Mesh
from instep.recipes.text import TextRecipe
from instep.recipes.text_config import Config
from instep.train.trainer import Trainer
from tests.parity import world_of_one
from tests.train.test_sharded import STEPS
from tests.train.test_sharded import config as stage_one
from tests.train.test_trainer import begun
from tests.world import world


def config(data: Path, stage: int, autocast: str, *, checkpoint: bool) -> Config:
    """With dropout, which a block that is computed again has to draw again."""
    base = stage_one(data, stage, width=32, autocast=autocast)
    return replace(base, model=replace(base.model, layers=2, checkpoint=checkpoint))


@pytest.mark.parametrize(("stage", "autocast"), [(0, "off"), (0, "bf16"), (3, "off"), (3, "bf16")])
@world(3, by="process", backend="shm")
def test_three_ranks_that_compute_blocks_again_have_the_bits_of_one_that_keeps_them(
    mesh: Mesh, data: Path, stage: int, autocast: str
) -> None:
    alone = Trainer(TextRecipe(config(data, 0, autocast, checkpoint=False)), world_of_one())
    together = Trainer(TextRecipe(config(data, stage, autocast, checkpoint=True)), mesh)
    for trainer in (alone, together):
        begun(trainer)
    for _ in range(STEPS):
        one, three = alone.step(), together.step()
        assert (one.loss, one.norm) == (three.loss, three.norm)
        assert alone.state_digests() == together.state_digests()
    assert alone.contract == together.contract  # so a run may be resumed with the other
    assert alone.canary == together.canary
    together.parallel.close()
