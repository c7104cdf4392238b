"""Samples per second of ``instep.Loader`` beside torch's ``DataLoader``: images from files, random crops.

python benchmarks/loader/run.py        writes results.json, and the table in README.md beside it
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import instep
from benchmarks.pages import README, Pages, Results, made, parser_of, prepare, save
from instep.bench import tables

HERE = Path(__file__).parent
COMMAND = "python benchmarks/loader/run.py"
SIDE, CROP, NUM_IMAGES = 128, 112, 512
BATCH, WARM_UP = 16, 16  # samples in a micro-batch; micro-batches before the clock starts


class Images:
    """(3, SIDE, SIDE) uint8 images, a file each; a sample is a random crop, half of them mirrored."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.npy"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Tensor:
        image = np.load(self.files[i])
        top, left = random.randrange(SIDE - CROP), random.randrange(SIDE - CROP)
        crop = image[:, top : top + CROP, left : left + CROP]
        if random.random() < 0.5:
            crop = crop[:, :, ::-1]
        return torch.from_numpy(crop.astype(np.float32) / 255)


class Small:
    """Samples that take no time to read: what is left is the loader's own."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((16,), float(i))


def of_instep(dataset: Any, num_workers: int) -> Iterator[Any]:
    loader = instep.Loader(dataset, 8 * BATCH, BATCH, num_workers=num_workers)
    while True:
        for data, _ in loader.read(range(8)):
            yield data
        loader.advance()


def of_torch(dataset: Any, num_workers: int) -> Iterator[Any]:
    options = {"persistent_workers": True, "prefetch_factor": 2} if num_workers else {}
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=num_workers, **options)
    while True:
        yield from loader


def compare(dataset: Any, num_workers: int, *, pairs: int, micro_batches: int) -> dict[str, Any]:
    """Both loaders, by turns."""
    streams = [make(dataset, num_workers) for make in (of_instep, of_torch)]
    for stream in streams:
        _seconds(stream, WARM_UP)
    times: list[list[float]] = [[], []]
    for turn in range(pairs):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(_seconds(streams[which], micro_batches))
    ratio = tables.paired_ratio(times[1], times[0])
    rates = [BATCH * micro_batches / sorted(its)[len(its) // 2] for its in times]
    return {
        "worker processes": num_workers,
        "Loader (samples/s)": round(rates[0]),
        "DataLoader (samples/s)": round(rates[1]),
        "ratio": f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
    }


def _seconds(stream: Iterator[Any], micro_batches: int) -> float:
    began = time.perf_counter()
    for _ in range(micro_batches):
        next(stream)
    return time.perf_counter() - began


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, HERE)
    parser.add_argument("--pairs", type=int, default=20)
    wanted = parser.parse_args(words)
    began = time.monotonic()
    torch.set_num_threads(1)  # as worker processes have
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        drawn = np.random.default_rng(0)
        for i in range(NUM_IMAGES):
            image = drawn.integers(0, 255, (3, SIDE, SIDE), dtype=np.uint8)
            np.save(Path(folder) / f"{i:04}.npy", image)
        for name, dataset, counts in (
            ("images", Images(Path(folder)), (0, 1, 2)),
            ("numbers", Small(), (0, 2)),
        ):
            for num_workers in counts:
                measured = compare(dataset, num_workers, pairs=wanted.pairs, micro_batches=32)
                rows.append({"samples": name, **measured})
    print(tables.markdown(rows))
    prepare(wanted.out, HERE)
    results = {"minutes": (time.monotonic() - began) / 60, "rows": rows}
    save(wanted.out / "results.json", results, pages, HERE, COMMAND)
    return 0


def pages(results: Results) -> Pages:
    note = f"Ratios are medians (and quartiles) of pairs of turns. {made(results)}"
    return {README: {"loader table": f"{tables.markdown(results['rows'])}\n\n{note}"}}


if __name__ == "__main__":
    sys.exit(main())
