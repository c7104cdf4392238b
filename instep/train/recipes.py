"""Configs that are known to work, as functions to read, call and change with ``dataclasses.replace``."""

from __future__ import annotations

from instep.train.config import Batch, Checkpoint, Config, Eval, Model, Optim


def default() -> Config:
    """What ``instep train`` runs: 0.44 million parameters, about a minute on two cores."""
    return Config(
        model=Model(layers=2, width=128, heads=4, context=64),
        batch=Batch(global_size=32, micro_size=4),
        optim=Optim(lr=4e-3, warmup_steps=30, min_lr_ratio=0.05, betas=(0.9, 0.99)),
        eval=Eval(every=200, windows=256),
        checkpoint=Checkpoint(every=200),
        steps=600,
    )


def tiny() -> Config:
    """Everything that can move a bit, dropout included, in two seconds: what the tests train."""
    return Config(
        model=Model(layers=2, width=32, heads=2, context=32, dropout=0.1),
        batch=Batch(global_size=16, micro_size=2),
        optim=Optim(lr=2e-3, warmup_steps=2),
        checkpoint=Checkpoint(every=0),
        eval=Eval(every=0, windows=8),
        steps=20,
    )
