"""A checkpoint's files as places of pieces: of each tensor, only the elements that are asked for are read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from instep.checkpoint import files, pieces, tensors
from instep.checkpoint.manifest import Manifest, parse_json
from instep.checkpoint.pieces import MODEL, OPTIMIZER, Entry, Piece, Source
from instep.checkpoint.tensors import Contents
from instep.errors import CheckpointRejected

SUFFIX = ".safetensors"


class FileReader:
    """One safetensors file; ``kind`` is what its names are called by in the state."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.contents: Contents = tensors.contents(path)  # which is sound, or this raises
        header = tensors.bounded_header(path)
        entries = parse_json(header, tensors.MAX_HEADER_BYTES)
        begin = 8 + len(header)
        self._starts = {name: begin + entries[name]["data_offsets"][0] for name in self.contents.layout}

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        """As ``pieces.Reader``; CheckpointRejected if the file ends before."""
        bare = name.removeprefix(self.kind)
        target = out.view(-1).view(torch.uint8).numpy().data
        try:
            with files.open_regular(self.path) as file:
                at = self._starts[bare] + first * out.itemsize
                while target:
                    count = os.preadv(file.fileno(), [target], at)
                    if not count:
                        raise OSError(0, f"it ends within {bare}", str(self.path))
                    target, at = target[count:], at + count
        except OSError as error:
            raise CheckpointRejected(f"{self.path}: {error}: take another checkpoint") from error


def source(path: Path, manifest: Manifest) -> Source:
    """The state in checkpoint ``path``, whose manifest this is, whether it was sharded or not.

    CheckpointRejected unless the files hold exactly what the manifest says.
    """
    names = [name for name in manifest.files if name.endswith(SUFFIX)]
    readers = {name: FileReader(path / name, _kind(name)) for name in names}
    if manifest.pieces is None:
        return _plain(readers)
    entries, ties = pieces.from_json(manifest.pieces)
    _require_files(path, entries, readers)
    return Source(entries, readers, ties)


def _kind(name: str) -> str:
    return OPTIMIZER if name.startswith(OPTIMIZER.removesuffix(":")) else MODEL


def _plain(readers: Mapping[str, FileReader]) -> Source:
    entries: dict[str, Entry] = {}
    ties: dict[str, str] = {}
    for place, reader in readers.items():
        for name, (shape, dtype) in reader.contents.layout.items():
            numel = math.prod(shape)
            entries[reader.kind + name] = Entry(shape, dtype, (Piece(0, numel, place),))
        if reader.kind == MODEL:
            ties |= reader.contents.ties
    return Source(entries, readers, ties)


def _require_files(path: Path, entries: pieces.Entries, readers: Mapping[str, FileReader]) -> None:
    """Each piece is in its file as its range says, and nothing else is in the files."""
    left = {
        (place, reader.kind + name) for place, reader in readers.items() for name in reader.contents.layout
    }
    for name, entry in entries.items():
        for piece in entry.pieces:
            reader = readers.get(piece.place)
            bare = name.removeprefix(reader.kind) if reader else ""
            found = reader.contents.layout.get(bare) if reader else None
            whole = piece.last - piece.first == entry.numel
            expected = (entry.shape if whole else (piece.last - piece.first,), entry.dtype)
            if found != expected:
                raise CheckpointRejected(
                    f"{path / piece.place[:80]}: {name[:80]}: expected {expected}, got {found or 'nothing'}: "
                    "take another checkpoint"
                )
            left.discard((piece.place, name))
    if left:
        place, name = min(left)
        raise CheckpointRejected(
            f"{path / place}: expected what the manifest says, got also {name[:80]}: take another checkpoint"
        )
