"""Any checkpoint, sharded or not, as one plain safetensors file, which any other program reads.

The tensors pass through memory a few megabytes at a time: a model needs to fit into none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from instep.checkpoint import files, load
from instep.checkpoint.manifest import MANIFEST_FILE
from instep.regular_files import create
from instep.state.shards import MODEL, OPTIMIZER
from instep.state.stored import CODES, Source

CHUNK_BYTES = 8 << 20
CODE_OF = {dtype: code for code, dtype in CODES.items()}


def find(path: str | os.PathLike[str]) -> load.Found:
    """The checkpoint ``path``, or the newest one that verifies in the run, or the folder, ``path``.

    Raises:
        CheckpointRejected: none verifies.
        ValueError: there is none.
    """
    path = Path(path)
    if (path / MANIFEST_FILE).exists() or files.step_of(path.name) is not None:
        return load.Found(path, load.verify(path))
    inside = path / "checkpoints"  # of a run
    found = load.newest(inside if inside.is_dir() else path, published=True)
    if found is None:
        problem = "has no checkpoint" if path.is_dir() else "is no folder"
        raise ValueError(f"{path} {problem}: expected a run, the checkpoints/ of one, or a checkpoint")
    return found


def to_safetensors(found: load.Found, out: str | os.PathLike[str], *, optimizer: bool = False) -> Path:
    """Write the model of a checkpoint to the new file ``out``; with ``optimizer`` its moments, too.

    Names are those of the module's state dict, moments are called ``"exp_avg/block.0.weight"``. A tied tensor
    is there once; its further names stand in the file's metadata, as ``safetensors.torch.save_model`` has
    them. The file is there whole or not at all.

    Raises:
        FileExistsError: ``out`` is there.
    """
    source = load.open_source(found.path, found.manifest)
    kinds = (MODEL, OPTIMIZER) if optimizer else (MODEL,)
    names = {name.partition(":")[2]: name for name in source.tensors if name.startswith(kinds)}
    return write(source, names, Path(out))


def write(source: Source, names: Mapping[str, str], out: Path) -> Path:
    """Write the tensors ``names``, each with its name in ``source``, to the new file ``out``."""
    files.refuse_existing(out)
    # Wide elements first, then every tensor begins on a multiple of its element.
    order = sorted(names, key=lambda name: (-source.tensors[names[name]].dtype.itemsize, name))
    chosen = {name: names[name] for name in order}
    new = files.temporary(out)
    fd = create(new, 0o600)
    try:
        with files.naming(new), os.fdopen(fd, "wb") as file:
            file.write(_header(source, chosen))
            for data in _chunks(source, chosen.values()):
                file.write(data)
        files.sync(new)
        os.link(new, out)  # unlike a rename, it replaces nothing
        files.sync(out.parent, follow_links=True)
    finally:
        with suppress(FileNotFoundError):
            new.unlink()
    return out


def _header(source: Source, names: Mapping[str, str]) -> bytes:
    """Length, then JSON that says where each tensor is, filled up to a multiple of 8 bytes."""
    ties = {name: first for name, first in source.ties.items() if first in names}
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **ties}}
    end = 0
    for name, stored in names.items():
        entry = source.tensors[stored]
        begin, end = end, end + entry.numel * entry.dtype.itemsize
        where = {"dtype": CODE_OF[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
        entries[name] = where
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(source: Source, names: Iterable[str]) -> Iterator[memoryview]:
    for name in names:
        entry = source.tensors[name]
        count = CHUNK_BYTES // entry.dtype.itemsize
        for first in range(0, entry.numel, count):
            flat = source.read(name, first, min(first + count, entry.numel))
            yield flat.view(torch.uint8).numpy().data
