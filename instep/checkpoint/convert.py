"""Any checkpoint, sharded or not, as one plain safetensors file, which any other program reads.

    python -m instep.checkpoint.convert runs/first/checkpoints/step-00000100 model.safetensors

The tensors pass through memory a few megabytes at a time: a model needs to fit into none.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from instep.checkpoint import files, load
from instep.errors import CheckpointRejected
from instep.regular_files import create
from instep.state.shards import MODEL, OPTIMIZER
from instep.state.stored import CODES, Source

CHUNK_BYTES = 8 << 20
REJECTED = 3  # the exit code, as the command has it
CODE_OF = {dtype: code for code, dtype in CODES.items()}


def to_safetensors(
    path: str | os.PathLike[str], out: str | os.PathLike[str], *, optimizer: bool = False
) -> Path:
    """Write the model in checkpoint ``path`` to the new file ``out``; with ``optimizer`` its moments, too.

    Names are those of the module's state dict, moments are called ``"exp_avg/block.0.weight"``. A tied tensor
    is there once; its further names stand in the file's metadata, as ``safetensors.torch.save_model`` has
    them. The file is there whole or not at all.

    Raises:
        CheckpointRejected: the checkpoint does not verify.
        FileExistsError: ``out`` is there.
    """
    path, out = Path(path), Path(out)
    source = load.open_source(path, load.verify(path))
    files.refuse_existing(out)
    kinds = (MODEL, OPTIMIZER) if optimizer else (MODEL,)
    chosen = [name for name in source.tensors if name.startswith(kinds)]
    # Wide elements first, then every tensor begins on a multiple of its element.
    chosen.sort(key=lambda name: (-source.tensors[name].dtype.itemsize, name))
    new = files.temporary(out)
    fd = create(new, 0o600)
    try:
        with files.naming(new), os.fdopen(fd, "wb") as file:
            file.write(_header(source, chosen))
            for data in _chunks(source, chosen):
                file.write(data)
        files.sync(new)
        os.link(new, out)  # unlike a rename, it replaces nothing
        files.sync(out.parent, follow_links=True)
    finally:
        with suppress(FileNotFoundError):
            new.unlink()
    return out


def _header(source: Source, names: list[str]) -> bytes:
    """Length, then JSON that says where each tensor is, filled up to a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **source.ties}}
    end = 0
    for name in names:
        entry = source.tensors[name]
        begin, end = end, end + entry.numel * entry.dtype.itemsize
        where = {"dtype": CODE_OF[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
        entries[name.partition(":")[2]] = where
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(source: Source, names: list[str]) -> Iterator[memoryview]:
    for name in names:
        entry = source.tensors[name]
        count = CHUNK_BYTES // entry.dtype.itemsize
        for first in range(0, entry.numel, count):
            flat = source.read(name, first, min(first + count, entry.numel))
            yield flat.view(torch.uint8).numpy().data


def main() -> None:
    """The command in this module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m instep.checkpoint.convert", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="its directory, such as .../step-00000100")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--optimizer", action="store_true", help="write the optimizer's moments, too")
    given = parser.parse_args()
    steps = files.step_directories(given.checkpoint)
    if steps:
        parser.error(f"{given.checkpoint} holds several checkpoints: name one, such as {steps[0][1]}")
    try:
        to_safetensors(given.checkpoint, given.out, optimizer=given.optimizer)
    except CheckpointRejected as error:
        print(error, file=sys.stderr)
        sys.exit(REJECTED)
    except OSError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
