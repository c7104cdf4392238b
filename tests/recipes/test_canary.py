"""The text recipe's canary: training's shapes, whatever the text, the seed and the weights are."""

from __future__ import annotations

from dataclasses import replace

import torch

from instep.checkpoint.canary import canary
from instep.ordered.keys import initialize
from instep.recipes import text_config
from instep.recipes.text import TextRecipe
from instep.recipes.text_config import Config
from instep.train.trainer import CANARY_SEED

CPU = torch.device("cpu")


def hash_of(config: Config, seed: int = 0) -> str:
    recipe = TextRecipe(config)
    module = recipe.make_model()
    initialize(module, seed)
    example = recipe.example()
    return canary(module, lambda model: recipe.loss(model, example, CPU), seed=CANARY_SEED, device=CPU)


def test_the_micro_batch_has_the_shape_of_training_s_and_is_always_the_same() -> None:
    config = text_config.tiny()
    windows = TextRecipe(config).example()
    assert (tuple(windows.shape), windows.dtype) == ((2, 33), torch.int64)
    assert 0 <= int(windows.min()) < int(windows.max()) < 256
    torch.rand(1)
    assert torch.equal(windows, TextRecipe(config).example())


def test_it_tells_machines_apart_not_runs() -> None:
    config = text_config.tiny()  # with dropout
    expected = hash_of(config)
    assert expected == hash_of(config, seed=1) == hash_of(replace(config, seed=1, steps=7))
    others = [
        replace(config, autocast="bf16"),
        replace(config, batch=replace(config.batch, micro_size=4)),
        replace(config, model=replace(config.model, dropout=0.2)),
    ]
    assert len({expected, *map(hash_of, others)}) == 4
