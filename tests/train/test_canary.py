"""The text recipe's canary: training's shapes, whatever the text, the seed and the weights are."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch

from instep.models.transformer import GPT, GPTConfig
from instep.ordered.keys import initialize
from instep.train import recipes
from instep.train.canary import synthetic_windows, text_canary
from instep.train.config import Config

CPU = torch.device("cpu")


def hash_of(config: Config, seed: int = 0) -> str:
    module = GPT(GPTConfig(**asdict(config.model)))
    initialize(module, seed)
    return text_canary(module, config, CPU)


def test_the_micro_batch_has_the_shape_of_training_s_and_is_always_the_same() -> None:
    config = recipes.tiny()
    windows = synthetic_windows(config)
    assert (tuple(windows.shape), windows.dtype) == ((2, 33), torch.int64)
    assert 0 <= int(windows.min()) < int(windows.max()) < 256
    torch.rand(1)
    assert torch.equal(windows, synthetic_windows(config))


def test_it_tells_machines_apart_not_runs() -> None:
    config = recipes.tiny()  # with dropout
    expected = hash_of(config)
    assert expected == hash_of(config, seed=1) == hash_of(replace(config, seed=1, steps=7))
    others = [
        replace(config, autocast="bf16"),
        replace(config, batch=replace(config.batch, micro_size=4)),
        replace(config, model=replace(config.model, dropout=0.2)),
    ]
    assert len({expected, *map(hash_of, others)}) == 4
