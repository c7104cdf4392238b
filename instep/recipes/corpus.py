"""Byte-level text: every byte is a token, so there is no vocabulary to build and nothing to download.

A corpus is one run of bytes: a file, a folder's files one after the other, or the Python standard library's
own source. It is cut into blocks, and blocks at even distances through the whole corpus are held out:

    corpus   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | ...          (held_out = 1/4)
    train    | 0 |   | 2 | 3 | 4 |   | 6 | 7 | 8 |   | ...
    held out |   | 1 |           | 5 |           | 9 | ...

Holding out the last files instead would compare two kinds of text, not two samples of one. Train and held-out
blocks are joined into two corpora before windows are cut, so no window has a byte of both.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

MAX_BLOCK_BYTES = 64 * 1024
MIN_HELD_OUT_BLOCKS = 16  # in a short corpus the blocks shrink until there are as many, down to one window
TEXT_PROBE_BYTES = 8192  # a file with a NUL byte among the first ones is not text; git decides the same way

# Installed packages differ between machines, and many distributions ship the library without the others.
NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
)


class ByteText:
    """Windows of ``context + 1`` bytes over a corpus; window i begins at byte ``i * context``.

    Neighbours share one byte: the last target of one window is the first input of the next, so that every
    byte but the very first is predicted exactly once. A rest that is shorter than a window is unused.
    """

    draws_nothing: ClassVar = True

    def __init__(self, corpus: bytes, context: int, name: str = "text") -> None:
        check_length(corpus, context, name)
        self.name, self.context = name, context
        # bytearray, because torch warns about memory that it may not write to
        self.tokens = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)  # (num_bytes,)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, i: int) -> Tensor:
        return self.windows([i])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        return list(self.windows(indices))

    def windows(self, indices: Sequence[int]) -> Tensor:
        """These windows, in this order: (len(indices), context + 1) int64.

        A copy: a view would begin wherever its bytes lie, and off a 16-byte boundary the CPU's matrix kernels
        take another path, which gives other bits.
        """
        overlapping = self.tokens.unfold(0, self.context + 1, self.context)  # (len(self), context + 1)
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"expected 0 <= index < {len(self)} windows, got {index}")
        return overlapping.index_select(0, torch.tensor(indices, dtype=torch.int64)).to(torch.int64)

    @cached_property
    def sha256(self) -> str:
        """Of the corpus: two runs with equal digests read the same bytes."""
        return hashlib.sha256(self.tokens.numpy().data).hexdigest()


class TextSplits(NamedTuple):
    """Two data sets that share no byte, each a fair sample of one corpus."""

    train: ByteText
    held_out: ByteText


def open_text(path: Path | None, context: int, held_out: float = 0.05) -> TextSplits:
    """Read a file, a folder, or the Python standard library (None), and hold out a share of its bytes.

    Of a folder, every regular file that looks like text is read, in the order of its relative path; hidden
    files and folders, and symbolic links that lead out of the folder, are left out.

    Raises ``FileNotFoundError`` for a path that is not there, and ``ValueError`` for a text from which a
    window for training and one for evaluation cannot be cut.
    """
    name, corpus = read_corpus(path)
    check_length(corpus, context, name)
    train, rest = split_blocks(corpus, context + 1, held_out)
    size, percent = f"its {len(corpus):,} bytes", 100 * held_out
    return TextSplits(
        ByteText(
            train, context, f"{name} ({100 - percent:g}% of {size}; a loss of ln 256 = 5.5 is guessing)"
        ),
        ByteText(rest, context, f"{name} ({percent:g}% of {size}, held out)"),
    )


def next_tokens(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Split ``windows`` (B, T + 1) into inputs and targets, (B, T) each: a target is the next token.

    Both are copies. ``.contiguous()`` would not do: of a single window both halves already are contiguous,
    and it would return views, the second one token off the alignment that the bits rest on.
    """
    fresh = torch.contiguous_format
    return windows[:, :-1].clone(memory_format=fresh), windows[:, 1:].clone(memory_format=fresh)


def check_length(corpus: bytes, context: int, name: str) -> None:
    if len(corpus) < context + 1:
        found = f"has {len(corpus)} bytes" if corpus else "is empty"
        raise ValueError(
            f"{name} {found}, expected at least context({context}) + 1 = {context + 1} bytes for one window: "
            "use a longer text or a smaller context"
        )


def split_blocks(corpus: bytes, window_bytes: int, held_out: float) -> tuple[bytes, bytes]:
    """Deal the blocks of ``corpus`` into (train, held out): blocks at even distances are held out."""
    block_bytes = int(len(corpus) * held_out) // MIN_HELD_OUT_BLOCKS
    block_bytes = max(window_bytes, min(block_bytes, MAX_BLOCK_BYTES))
    train: list[bytes] = []
    rest: list[bytes] = []
    for number, start in enumerate(range(0, len(corpus), block_bytes)):
        # the count of held-out blocks is the share rounded; a block is held out where the count moves on
        moves_on = int((number + 1) * held_out + 0.5) > int(number * held_out + 0.5)
        (rest if moves_on else train).append(corpus[start : start + block_bytes])
    return b"".join(train), b"".join(rest)


def read_corpus(path: Path | None) -> tuple[str, bytes]:
    """What the text is called in messages, and its bytes."""
    if path is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        sources = (file for file in walk(library, NOT_LIBRARY) if file.suffix == ".py")
        return f"Python {platform.python_version()} standard library", join(library, sources)
    if path.is_file():
        return f"data file {path}", path.read_bytes()
    if path.is_dir():
        return f"data folder {path}", join(path, (file for file in walk(path) if is_text(file)))
    if path.exists():
        raise ValueError(f"expected a file or a folder, got {path}, which is neither")
    raise FileNotFoundError(f"expected a data file or folder, got {path}, which does not exist")


def join(folder: Path, files: Iterator[Path]) -> bytes:
    """The files' bytes, in the order of their paths inside ``folder``, which no machine changes."""
    return b"".join(
        file.read_bytes() for file in sorted(files, key=lambda f: f.relative_to(folder).as_posix())
    )


def walk(folder: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The regular files below ``folder``: none hidden, none twice, none by a link that leads out of it."""
    home = folder.resolve()
    seen: set[Path] = set()
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
        for name in sorted(files):
            file = Path(place, name)
            real = file.resolve()
            if name.startswith(".") or real in seen or not real.is_relative_to(home) or not real.is_file():
                continue
            seen.add(real)
            yield file


def is_text(file: Path) -> bool:
    with file.open("rb") as opened:
        return b"\0" not in opened.read(TEXT_PROBE_BYTES)
