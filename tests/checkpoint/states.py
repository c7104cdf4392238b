"""Small training states to save, and how to compare what comes back bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint import save as saving
from instep.checkpoint.load import newest, open_source, read_manifest
from instep.checkpoint.manifest import MANIFEST_FILE, FileRecord, Manifest
from instep.checkpoint.save import MODEL_FILE, OPTIMIZER_FILE
from instep.checkpoint.tensors import Layout, require_layout
from instep.net.process_group import Group
from instep.state.shards import MODEL, OPTIMIZER, Shard
from tests.state_oracle import state_sha256

OPTIONS: dict[str, Any] = {"class": "none", "groups": [], "scalars": {}, "objects": {}, "declared_steps": {}}
ALONE = Group(None, (0,), 0, 300.0)  # once: it reads files of the system, which are none of the disk's


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}


class Named:
    """Dictionaries of tensors as a ``State`` of one rank; one tensor under two names is a tie."""

    def __init__(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        self.model, self.optimizer = model, optimizer
        self.group = ALONE

    def owned(self) -> list[Shard]:
        tensors = [(MODEL + name, x) for name, x in self.model.items() if name not in self.ties()]
        tensors += [(OPTIMIZER + name, x) for name, x in self.optimizer.items()]
        return [Shard.whole(name, x, order=(place, "")) for place, (name, x) in enumerate(tensors)]

    def ties(self) -> dict[str, str]:
        firsts: dict[int, str] = {}
        return {n: firsts[id(x)] for n, x in self.model.items() if firsts.setdefault(id(x), n) != n}

    def options(self) -> dict[str, Any]:
        return OPTIONS

    def sha256(self, step: int) -> str:
        """The hash that a checkpoint of it has to have."""
        model = [(name, x) for name, x in self.model.items() if name not in self.ties()]
        return state_sha256([*model, *self.optimizer.items()], step)


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
        "numerical": {"batch.micro_size": 4, "optim.lr": 1e-3},
        "world_size": 2,
    }


def save(directory: Path, *, keep: int = 3, **arguments: Any) -> Path:
    return saving.save(directory, *drafted(**arguments), keep=keep)


def drafted(
    *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], **described: Any
) -> tuple[Named, Manifest]:
    """What both ways to save take: the state, and what is to be said of it."""
    return Named(model, optimizer), saving.draft(**described)


def save_steps(directory: Path, *steps: int) -> list[Path]:
    return [save(directory, **state(step)) for step in steps]


def whole_step(directory: Path) -> int:
    """The step of the newest checkpoint, after checking that all of it is of that one step."""
    found = newest(directory)
    assert found is not None
    saved = state(found.manifest.step)
    for file, name in ((MODEL_FILE, "model"), (OPTIMIZER_FILE, "optimizer")):
        assert all_bits(read_tensors(found.path, file, layout_of(saved[name]))) == all_bits(saved[name])
    for name in ("data_cursor", "numerical", "world_size"):
        assert getattr(found.manifest, name) == saved[name]
    expected = Named(saved["model"], saved["optimizer"]).sha256(found.manifest.step)
    assert found.manifest.state_sha256 == expected
    return found.manifest.step


def vouch(path: Path) -> None:
    """Write a manifest that has the right sizes and hashes of all files in directory ``path``."""
    records = {
        file.name: FileRecord(file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in path.iterdir()
        if file.name != MANIFEST_FILE
    }
    manifest = Manifest(
        step=1,
        data_cursor=0,
        state_sha256="0" * 64,
        world_size=1,
        numerical={},
        versions={},
        files=records,
        extra={},
    )
    (path / MANIFEST_FILE).write_bytes(manifest.to_bytes())


def read_tensors(path: Path, file: str, expected: Layout | None = None) -> dict[str, Tensor]:
    """The tensors of kind ``file`` in checkpoint ``path``, which have to be those that are ``expected``."""
    source, kind = open_source(path, read_manifest(path)), MODEL if file == MODEL_FILE else OPTIMIZER
    found = source.layout(kind)
    expected = found if expected is None else expected
    ties = source.ties if kind == MODEL else {}
    firsts = {name: ties.get(name, name) if name not in found else name for name in expected}
    require_layout(found, expected, firsts)
    whole = {first: source.read_whole(kind + first) for first in dict.fromkeys(firsts.values())}
    return {name: whole[first] for name, first in firsts.items()}


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Everything of a tensor that may not change."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), raw


def all_bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {name: bits(tensor) for name, tensor in tensors.items()}
