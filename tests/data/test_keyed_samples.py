"""Micro-batches as they are read: dropped when not wanted, handed over by worker processes with the same
values, and drawn with keys of their samples."""

from __future__ import annotations

import errno
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from instep.data import keyed_samples
from instep.data.keyed_samples import KeyedSamples, Task, is_plain
from instep.data.loader import NUM_HELD, Loader
from instep.data.order import GOLDEN_GAMMA, mix, sample_at
from instep.launch.memory_file import MemoryFile
from instep.recipes.corpus import ByteText
from instep.rng.keys import derive
from tests.data.test_loader import read_step, whole


def test_a_reader_drops_what_no_one_waits_for_any_more() -> None:
    shared, read = [3], list[int]()

    class Moves(Dataset[int]):
        """While sample 1 is read, the loader goes on elsewhere."""

        def __getitem__(self, i: int) -> int:
            read.append(i)
            shared[0] += i == 1
            return i

    deal = Loader(range(8), 8, 4, shuffle=False).deal
    samples = KeyedSamples(Moves(), deal, 0, whole, shared, 0)
    assert samples.__getitems__(Task(2, 0, 0)) == [None]
    assert samples.__getitems__(Task(3, 0, 0)) == [None]
    assert read == [0, 1]
    assert samples.__getitems__(Task(4, 0, 1)) == [[4, 5, 6, 7]]


# Tensors from worker processes.


class Rows(Dataset[Any]):
    """Samples of several kinds, whose size grows."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Any:
        size = 50 if i < 40 else 500
        x = torch.full((size,), i / 3)
        return {"x": x, "y": (np.full((2, 3), i), i), "name": str(i), "none": torch.ones(0)}


class Box:
    """An object that torch knows nothing of."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors


def boxed(rows: list[Any]) -> Any:
    x = default_collate([row["x"] for row in rows])
    own = torch.stack([row["x"] for row in rows])
    return Box([x, own, x[:, ::2]]), own, own.T, torch.ones(2, requires_grad=True), own.to_sparse()


def tensors(data: Any) -> list[Tensor]:
    return [
        x.to_dense()
        for x in tree_leaves([getattr(x, "tensors", x) for x in tree_leaves(data)])
        if isinstance(x, Tensor)
    ]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own hand-over
@pytest.mark.parametrize("collate_fn", [None, boxed])
def test_micro_batches_that_a_program_keeps_stay_as_they_are(collate_fn: Any) -> None:
    kept, expected = [], []
    for found, num_workers in ((expected, 0), (kept, 1)):
        loader = Loader(Rows(), 8, 4, shuffle=False, num_workers=num_workers, collate_fn=collate_fn)
        for _ in range(8):
            found += [data for data, _ in loader.read([0, 1])]
            loader.advance()
        loader.close()
    for ours, theirs in zip(kept, expected, strict=True):
        one, other = tensors(ours), tensors(theirs)
        assert len(one) == len(other) >= 4
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(one, other, strict=True))
        if collate_fn is None:
            assert ours["name"] == theirs["name"]


def test_where_memory_is_short_tensors_come_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(num_bytes: int = 0) -> MemoryFile:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(MemoryFile, "create", refused)  # the worker process is a fork of this one
    loader = Loader(torch.arange(64.0).view(16, 4), 8, 4, shuffle=False, num_workers=1)
    stream = [data for _ in range(2) for data in read_step(loader, 1)]
    assert torch.equal(torch.cat(stream), torch.arange(64.0).view(16, 4))
    loader.close()


def test_memory_of_micro_batches_that_are_gone_is_used_again() -> None:
    loader = Loader(torch.arange(6400.0).view(64, 100), 8, 4, num_workers=1, prefetch_factor=1)
    places = set()
    for _ in range(20):
        for data, _ in loader.read([0, 1]):
            places.add(data.data_ptr())
            data.fill_(-1)  # it is the program's
        loader.advance()
    assert len(places) <= 1 + NUM_HELD + 1  # and the first, which came before sizes were known
    loader.close()
    assert data.eq(-1).all()  # kept longer than its loader


def test_worker_processes_may_be_spawned() -> None:
    data = torch.arange(64.0).view(16, 4)
    loader = Loader(data, 8, 4, num_workers=1, lengths=range(16), multiprocessing_context="spawn")
    other = Loader(data, 8, 4, lengths=range(16))
    for ours, theirs in zip(read_step(loader, 1), read_step(other, 1), strict=True):
        assert torch.equal(ours, theirs)
    loader.close()


# What is drawn, and from what.


class Draws(Dataset[Tensor]):
    """What the generators give that a program may draw from, after the sample's number."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Tensor:
        drawn = [random.random(), np.random.normal(), torch.rand(1, dtype=torch.float64).item()]
        return torch.tensor([i, *drawn], dtype=torch.float64)


def drawn_for(epoch: int, sample: int, seed: int) -> Tensor:
    """The same, from generators of its own that are seeded one by one."""
    keys = [
        mix(derive(seed, "sample", epoch, name) + sample * GOLDEN_GAMMA)
        for name in ("random", "numpy.random", "torch")
    ]
    own = torch.Generator().manual_seed((keys[2] ^ keys[2] >> 32) & 0xFFFFFFFF)
    drawn = [
        random.Random(keys[0]).random(),
        np.random.RandomState(keys[1] & 0xFFFFFFFF).normal(),
        torch.rand(1, dtype=torch.float64, generator=own).item(),
    ]
    return torch.tensor([sample, *drawn], dtype=torch.float64)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("micro_batch_size", [2, 12])
def test_each_sample_is_drawn_with_keys_of_its_own(num_workers: int, micro_batch_size: int) -> None:
    loader = Loader(Draws(), 24, micro_batch_size, seed=5, num_workers=num_workers)
    found = torch.cat([data for _ in range(4) for data in read_step(loader, 1)])
    loader.close()
    expected = [drawn_for(at // 40, sample_at(at, 40, 5), 5) for at in range(4 * 24)]
    assert torch.equal(found, torch.stack(expected))


class OwnRows(TensorDataset):
    """A sample is what torch reads, and noise."""

    def __getitem__(self, i: Any) -> Any:
        return super().__getitem__(i)[0] + torch.rand(1)


class OwnTensor(Tensor):
    pass


def test_nothing_is_keyed_where_nothing_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(64.0).view(16, 4)
    text = ByteText(bytes(range(256)), 15)
    plain = rows, TensorDataset(rows, rows), Subset(TensorDataset(rows), [3, 1, 2, 0]), rows.numpy(), text
    expected = [read_step(Loader(dataset, 8, 4, collate_fn=kept_apart), 1) for dataset in plain]
    monkeypatch.setattr(keyed_samples, "global_generators", lambda: pytest.fail("keyed"))
    for dataset, data in zip(plain, expected, strict=True):
        found = read_step(Loader(dataset, 8, 4), 1)
        assert all(
            torch.equal(one, other) for one, other in zip(tree_leaves(found), tree_leaves(data), strict=True)
        )


def kept_apart(rows: list[Any]) -> Any:
    """A collate function of a user's own, which is keyed."""
    return default_collate(rows)


@pytest.mark.parametrize(
    "dataset",
    [
        OwnRows(torch.zeros(8)),
        Subset(OwnRows(torch.zeros(8)), range(8)),
        TensorDataset(torch.zeros(8).as_subclass(OwnTensor)),
        np.array([None] * 8),
        [torch.zeros(1)] * 8,
        Draws(),
    ],
)
def test_what_may_run_code_of_the_user_s_is_keyed(dataset: Any) -> None:
    assert not is_plain(dataset)
