"""The state of one model and its optimizer, as ``instep.save`` and a run have it."""

from __future__ import annotations

from typing import Any

from instep.checkpoint.registered import Registered
from instep.checkpoint.state import TrainingState
from instep.net.process_group import Group


def training_state(model: Any, optimizer: Any = None, group: Group | None = None) -> TrainingState:
    """Without an optimizer it is for use: it takes the weights of any state. It may hold several."""
    optimizers = getattr(optimizer, "optimizers", [] if optimizer is None else [optimizer])
    objects = {"model": model, **{f"optimizer_{i}": x for i, x in enumerate(optimizers)}}
    state = Registered(objects).state(group)
    state.is_for_use = not optimizers
    return state
