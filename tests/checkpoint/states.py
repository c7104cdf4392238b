"""Small training states to save, and how to compare what comes back bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint.save import save


def state(step: int) -> dict[str, Any]:
    """The arguments of ``save`` for a state in which every tensor says of which step it is."""
    return {
        "step": step,
        "model": {"weight": torch.full((4, 3), float(step)), "bias": torch.full((3,), float(step))},
        "optimizer": {
            "exp_avg/weight": torch.full((4, 3), step / 2),
            "step/weight": torch.tensor(float(step)),
        },
        "data_cursor": 8 * step,
        "state_sha256": f"{step:064x}",
        "numerical": {"batch.micro_size": 4, "optim.lr": 1e-3},
        "world_size": 2,
    }


def save_steps(directory: Path, *steps: int) -> list[Path]:
    return [save(directory, **state(step)) for step in steps]


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Everything of a tensor that may not change."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), raw


def all_bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {name: bits(tensor) for name, tensor in tensors.items()}
