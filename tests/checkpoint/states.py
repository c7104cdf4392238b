"""Small training states to save, and how to compare what comes back bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint.load import newest, read_tensors
from instep.checkpoint.save import MODEL_FILE, OPTIMIZER_FILE, save
from instep.checkpoint.tensors import layout_of


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


def whole_step(directory: Path) -> int:
    """The step of the newest checkpoint, after checking that all of it is of that one step."""
    found = newest(directory)
    assert found is not None
    saved = state(found.manifest.step)
    for file, name in ((MODEL_FILE, "model"), (OPTIMIZER_FILE, "optimizer")):
        assert all_bits(read_tensors(found.path, file, layout_of(saved[name]))) == all_bits(saved[name])
    for name in ("data_cursor", "state_sha256", "numerical", "world_size"):
        assert getattr(found.manifest, name) == saved[name]
    return found.manifest.step


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Everything of a tensor that may not change."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), raw


def all_bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {name: bits(tensor) for name, tensor in tensors.items()}
