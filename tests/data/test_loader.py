"""The Loader: each sample once per epoch for any number of ranks, the same ones in each micro-batch, whatever
reads them; and in words, what goes wrong while they are read."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset, IterableDataset

import instep
from instep.data.keyed_samples import Failed
from instep.data.loader import Loader
from instep.errors import Desync
from instep.mesh.mesh import Mesh, build
from instep.reduce.tree import rank_major
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard, gathered
from instep.step.micro_batches import MicroBatch
from instep.timeline.profiler import DATA
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense
from tests.replicate.replicas import gradients
from tests.world import world


def read_step(loader: Loader, num_ranks: int) -> list[Any]:
    """Data of all micro-batches of the next step, read as ``num_ranks`` ranks share them, one by one."""
    found: dict[int, Any] = {}
    for own in rank_major(loader.num_micro_batches, num_ranks):
        found |= dict(zip(own, (data for data, _ in loader.read(own)), strict=True))
    loader.advance()
    return [found[i] for i in range(loader.num_micro_batches)]


def whole(samples: list[Any]) -> list[Any]:
    """A collate function that leaves samples as they are."""
    return samples


def drawn_arguments(draw: Any) -> tuple[int, dict[str, Any]]:
    """How many samples there are, and the arguments of a Loader of their numbers."""
    micro_size = draw(st.integers(1, 5))
    arguments: dict[str, Any] = {
        "micro_batch_size": micro_size,
        "batch_size": micro_size * draw(st.integers(1, 6)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "shuffle": draw(st.booleans()),
        "collate_fn": whole,
    }
    kind = draw(st.sampled_from(["samples", "lengths", "shards", "rows"]))
    if kind in ("shards", "rows"):
        sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any))
        numbers = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        arguments |= {"dataset": numbers, "open_shard": iter if kind == "shards" else list}
        arguments |= {"sizes": sizes if draw(st.booleans()) else None}
        return sum(sizes), arguments
    num_samples = draw(st.integers(1, 60))
    if kind == "lengths":
        arguments["lengths"] = draw(st.lists(st.integers(1, 9), min_size=num_samples, max_size=num_samples))
    return num_samples, arguments | {"dataset": range(num_samples)}


@given(st.data())
def test_every_epoch_has_each_sample_once_for_any_ranks_and_wherever_it_is_resumed(
    drawn: st.DataObject,
) -> None:
    require_each_sample_once(drawn.draw)


def require_each_sample_once(draw: Any) -> None:
    """Of drawn samples, sizes, ranks that change from step to step, epochs, and steps that are made again."""
    num_samples, arguments = drawn_arguments(draw)
    loader = Loader(**arguments)
    num_epochs = draw(st.integers(1, 3))
    stream: list[int] = []
    for _ in range(loader.num_steps(num_epochs)):
        if draw(st.booleans()):  # another process goes on
            state = json.loads(json.dumps(loader.state_dict()))
            loader = Loader(**arguments)
            loader.load_state_dict(state)
        if draw(st.booleans()):  # a step is begun, and made again
            own = draw(st.lists(st.integers(0, loader.num_micro_batches - 1), min_size=1, unique=True))
            list(zip(range(draw(st.integers(0, 3))), loader.read(own), strict=False))
        for micro_batch in read_step(loader, draw(st.integers(1, 4))):
            stream += micro_batch
    for epoch in range(num_epochs):
        assert sorted(stream[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))
    assert loader.position == len(stream)


class Augmented(Dataset[Tensor]):
    """Draws from every generator there is while it reads a sample."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)
        self.mine = torch.Generator()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Tensor:
        drawn = [
            random.random(),
            np.random.rand(),
            self.own.random(),
            torch.rand(1, generator=self.mine).item(),
        ]
        return torch.cat([torch.tensor([i, *drawn], dtype=torch.float64), torch.rand(1)])


def augmented(num_ranks: int, **options: Any) -> Iterator[Tensor]:
    loader = Loader(Augmented(), 4, 2, seed=5, **options)
    for _ in range(6):
        yield torch.stack(read_step(loader, num_ranks))


def masked(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) * (torch.rand(len(rows), 1) < 0.5) + random.random()


@pytest.mark.parametrize("collate_fn", [None, masked])
def test_what_is_drawn_to_read_samples_and_to_put_them_together_depends_on_seed_epoch_and_sample_alone(
    collate_fn: Any,
) -> None:
    expected = list(augmented(1, collate_fn=collate_fn))
    for num_ranks, options in ((2, {}), (1, {"num_workers": 2})):
        random.seed(num_ranks)
        found = augmented(num_ranks, collate_fn=collate_fn, **options)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    drawn = {tuple(row[1:].tolist()) for row in torch.cat(expected).view(-1, 6)}
    assert collate_fn or len(drawn) == 24  # other numbers in each epoch


def test_the_generators_of_the_program_are_as_before() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    next(augmented(1))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_a_data_set_that_reads_many_at_once_is_asked_once_per_micro_batch() -> None:
    asked: list[Sequence[int]] = []

    class AtOnce:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> int:
            raise AssertionError("one at a time")

        def __getitems__(self, samples: Sequence[int]) -> list[int]:
            asked.append(samples)
            return list(samples)

    read_step(Loader(AtOnce(), 6, 3, shuffle=False), 1)
    assert asked == [[0], [0], [0], [0, 1, 2], [3, 4, 5]]  # first what ranks compare


def test_samples_of_similar_lengths_share_a_micro_batch() -> None:
    draw = random.Random(7)
    lengths = [draw.randint(1, 500) for _ in range(1000)]

    def padding(**options: Any) -> float:
        loader = Loader(lengths, 32, 8, collate_fn=whole, **options)
        batches = [batch for _ in range(60) for batch in read_step(loader, 1)]
        return sum(max(batch) * len(batch) for batch in batches) / sum(map(sum, batches))

    assert padding() > 1.6
    assert padding(lengths=lengths) < 1.1


def test_the_micro_batches_of_a_group_come_in_no_order_of_lengths() -> None:
    lengths = list(range(256))
    loader = Loader(lengths, 8, 4, collate_fn=whole, lengths=lengths)
    firsts = [batch[0] for _ in range(32) for batch in read_step(loader, 1)]
    assert sum(one > other for one, other in pairwise(firsts)) in range(20, 45)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_worker_processes_that_were_started_before_read_the_same(num_workers: int) -> None:
    loader = Loader(range(20), 6, 2, collate_fn=whole, num_workers=num_workers)
    loader.start()
    loader.start()
    loader.position = 6
    other = Loader(range(20), 6, 2, collate_fn=whole)
    other.position = 6
    assert [read_step(loader, 1) for _ in range(3)] == [read_step(other, 2) for _ in range(3)]
    loader.close()


def test_weights_are_counted_from_the_data() -> None:
    loader = Loader(
        [[1] * n for n in (3, 1, 2, 5)],
        4,
        2,
        shuffle=False,
        collate_fn=whole,
        weigh=lambda x: sum(map(sum, x)),
    )
    assert [weight for _, weight in loader.read([0, 1])] == [4, 7]


# Training with it.


def samples(num_samples: int = 13) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(6, generator=generator), torch.randn(3, generator=generator)) for _ in range(num_samples)
    ]


def loader_of(num_samples: int = 13, **options: Any) -> Loader:
    return Loader(samples(num_samples), 8, 2, **options)


def train(model: Any, loader: Any, num_steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for micro_batch in model.micro_batches(loader):
            x, y = micro_batch.data
            (model(x)[:, :3] - y[:, :1]).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def expected_weights() -> list[Tensor]:
    return train(DataParallel(filled(Dense()), process_group=world_of_one()), loader_of())


class Lost(Exception):
    """A rank is gone, as far as this test goes."""


@pytest.mark.parametrize("num_workers", [0, 1])
@world(3)
def test_a_step_that_was_left_in_its_middle_is_made_again_on_another_number_of_ranks(
    mesh: Mesh, num_workers: int
) -> None:
    loader, module = loader_of(num_workers=num_workers), filled(Dense())
    model = DataParallel(module, process_group=mesh)
    train(model, loader, num_steps=1)

    def left_in_its_middle() -> None:
        model.zero_grad()
        for micro_batch in model.micro_batches(loader):
            if micro_batch.index in (1, 2, 3):  # rank 0 has read one before
                raise Lost
            model(micro_batch.data[0]).sum().backward()

    with pytest.raises(Lost):
        left_in_its_middle()
    model.close()
    assert loader.position == 8
    model.close()
    model = DataParallel(model.module, process_group=world_of_one())
    weights = train(model, loader, num_steps=2)
    model.close()
    assert all(torch.equal(ours, one) for ours, one in zip(weights, expected_weights(), strict=True))
    loader.close()


def test_a_state_that_is_loaded_in_the_middle_of_a_step_counts_from_the_next_on() -> None:
    loader = loader_of(num_workers=1)
    expected = loader_of()
    state = json.loads(json.dumps(loader.state_dict()))
    for _ in range(3):
        list(loader.read(range(4)))
        loader.advance()
    step = loader.read(range(4))
    next(step)
    loader.load_state_dict(state)
    for _ in range(2):
        ours, theirs = list(loader.read([1, 2])), list(expected.read([1, 2]))
        for (one, _), (other, _) in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, one, other))
        loader.advance(), expected.advance()
    loader.close()


@world(2)
def test_sharded_ranks_read_their_turns(mesh: Mesh) -> None:
    module = fully_shard(filled(Dense()), process_group=mesh, stage=2)
    train(module, loader_of())
    with gathered(module):
        for ours, one in zip(module.parameters(), expected_weights(), strict=True):
            assert torch.equal(ours, one)


@pytest.mark.parametrize(
    ("of_rank_1", "words"),
    [
        (lambda: loader_at(8), r"rank 1 is at sample 8 of its data; rank 0: 0\. Read"),
        (lambda: loader_of(14), "reads a data source with digest"),
        (lambda: 4, r"reads a data source with digest .*or none on any"),
    ],
)
@world(2)
def test_ranks_that_read_other_data_raise(mesh: Mesh, of_rank_1: Callable[[], Any], words: str) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    with pytest.raises(Desync, match=words):
        step(model, of_rank_1() if mesh.rank else loader_of())
    model.close()


def step(model: DataParallel, loader: Any) -> None:
    for _ in model.micro_batches(loader):
        model(torch.ones(1, 6)).sum().backward()


def loader_at(position: int) -> Loader:
    loader = loader_of()
    loader.position = position
    return loader


@world(2)
def test_a_sample_that_raises_is_named_and_the_other_rank_is_told(mesh: Mesh) -> None:
    broken: list[Any] = samples()
    broken[Loader(broken, 8, 2).deal.places(0, 3)[0].sample] = None  # of rank 1
    model = DataParallel(filled(Dense()), process_group=mesh)
    with pytest.raises(TypeError if mesh.rank else Desync) as raised:
        train(model, Loader(broken, 8, 2))
    if mesh.rank == 0:
        assert "rank 1 left step 0" in str(raised.value)
    model.close()
    assert all(gradient is None for gradient in gradients(model.module))


# What goes wrong.


class Raises(Dataset[int]):
    def __init__(self, folder: Path) -> None:
        self.files = [(str(folder / f"{i}.txt"), i) for i in range(4)]
        for path, i in self.files:
            Path(path).write_text(str(i))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        if i == 2:
            raise ValueError("what is this?")
        return i


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_raises_is_named_with_its_file_and_worker(tmp_path: Path, num_workers: int) -> None:
    loader = Loader(Raises(tmp_path), 4, 1, shuffle=False, num_workers=num_workers)
    with pytest.raises(ValueError, match=r"what is this\?") as raised:
        list(loader.read(range(4)))
    (said,) = raised.value.__notes__
    assert said.startswith(f"sample 2 ({tmp_path / '2.txt'}) of Raises, epoch 0")
    assert ("in worker 0 (pid " in said) == bool(num_workers)
    printed = "".join(traceback.format_exception(raised.value))  # torch put the traceback into the message
    assert printed.count("in __getitem__") == 1 and "\n" not in str(raised.value)


class Strange(Exception):
    """One that its message alone does not make."""

    def __init__(self, code: int, samples: list[int]) -> None:
        super().__init__(f"code {code}", samples)


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (KeyError("no"), KeyError, "'no'"),
        (Strange(3, []), RuntimeError, "Strange: ('code 3', [])"),
        (OSError(2, "gone", "a.txt"), FileNotFoundError, "[Errno 2] gone: 'a.txt'"),
        (type("Local", (ValueError,), {"__qualname__": "f.<locals>.Local"})("no"), RuntimeError, "Local: no"),
        (StopIteration("at the end"), RuntimeError, "StopIteration: at the end"),
    ],
)
def test_an_error_of_a_worker_is_raised_as_it_was(error: Exception, kind: Any, says: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(says)}$"):
        Failed(error).reraise()


class Ends(Dataset[int]):
    def __init__(self, end: Callable[[int], object]) -> None:
        self.end = end

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        if i == 5:
            self.end(3)
        return i


def killed(code: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "how"),
    [(killed, "was killed by SIGKILL"), (os._exit, "exited with code 3"), (sys.exit, "exited with code 3")],
)
def test_a_worker_that_ends_is_told_at_once_with_the_samples_that_were_waited_for(
    end: Callable[[int], object], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instep.data.loader.LOOK_S", 0.1)
    loader = Loader(Ends(end), 8, 4, shuffle=False, num_workers=1, collate_fn=whole)
    ended = rf"worker 0 \(pid \d+\) {how}, in sample 5\."
    with pytest.raises(RuntimeError, match=rf"micro-batch 1, samples 4, 5, 6, 7 of Ends: {ended}"):
        list(loader.read([1]))
    assert [data for data, _ in loader.read([0])] == [[0, 1, 2, 3]]  # another process reads on


class Slow(Dataset[int]):
    """Reads sample 1 when ``gate`` opens."""

    def __init__(self) -> None:
        self.reads, self.gate = (get_context("fork").Event() for _ in range(2))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        if i == 1:
            self.reads.set()
            self.gate.wait(30)
        return i


def test_a_loader_that_goes_back_waits_for_the_sample_that_a_worker_is_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch waited for it as long as for a look at the workers, and the deadline was told."""
    monkeypatch.setattr("instep.data.loader.LOOK_S", 0.1)
    dataset = Slow()
    loader = Loader(dataset, 1, 1, num_workers=1, shuffle=False)
    assert [data.tolist() for data, _ in loader.read([0])] == [[0]]
    assert dataset.reads.wait(30)  # ahead, for the next step
    threading.Timer(0.5, dataset.gate.set).start()
    loader.load_state_dict(loader.state_dict() | {"position": 0})
    assert [data.tolist() for data, _ in loader.read([0])] == [[0]]
    loader.close()


class DiesLater(Slow):
    def __getitem__(self, i: int) -> int:
        if super().__getitem__(i) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return i


def test_a_worker_that_dies_is_not_noticed_in_the_middle_of_what_is_computed() -> None:
    """torch's handler of SIGCHLD raised there, without the sample."""
    dataset = DiesLater()
    loader = Loader(dataset, 4, 1, shuffle=False, num_workers=1)
    stream = loader.read([0, 1])
    assert next(stream)[0].tolist() == [0]
    (worker,) = loader._stream._workers  # type: ignore[union-attr]
    dataset.gate.set()
    worker.join()  # computes
    with pytest.raises(RuntimeError, match=r"worker 0 \(pid \d+\) was killed by SIGKILL, in sample 1"):
        next(stream)


class Hangs(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> int:
        signal.pause()
        return i


def test_a_worker_that_hangs_is_waited_for_until_the_deadline_and_not_for_longer() -> None:
    """torch waited for its end for 5 s more, so that the other ranks' deadline came first."""
    loader = Loader(Hangs(), 2, 1, num_workers=1, shuffle=False, timeout_s=0.2)
    said = r"no answer within 0\.2 s; worker 0 \(pid \d+\) is still in sample 0\. .*timeout_s is how long"
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=said):
        next(loader.read([0]))
    assert time.monotonic() - began < 3


def test_a_loader_waits_for_less_than_the_mesh_does() -> None:
    assert loader_of().timeout_s == 0.8 * 300
    instep.get.register_mesh(build(None, 0, 1, timeout_s=10))
    try:
        assert loader_of().timeout_s == 8
        assert loader_of(timeout_s=3).timeout_s == 3
    finally:
        instep.get.register_mesh(None)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def go_on(loader: Loader, dataset: Any = range(9), **options: Any) -> object:
    return Loader(dataset, 2, 1, **options).load_state_dict(loader.state_dict())


LENGTHS = {"lengths": range(9)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Loader(Stream(), 2, 1), "data set with samples by number, got Stream"),
        (lambda: Loader((x for x in range(3)), 2, 1), "data set with samples by number, got generator"),
        (lambda: Loader([], 2, 1), "at least one sample, got an empty list"),
        (lambda: Loader(range(9), 6, 4), "got 6 and 4"),
        (lambda: Loader(range(9), 6, 0), "got 6 and 0"),
        (lambda: Loader(range(9), 2, 1, seed=-1), r"expected 0 <= seed < 2\*\*64, got -1"),
        (lambda: Loader(range(9), 2, 1, lengths=[1, 2, 3]), "lengths of 9 samples, got 3"),
        (lambda: loader_at(-2), "position of at least 0"),
        (lambda: go_on(Loader(range(9), 4, 2, **LENGTHS), **LENGTHS), "samples would be read twice or never"),
        (lambda: go_on(Loader(range(9), 2, 1), range(8)), "with num_samples 9, and this one has 8"),
        (lambda: go_on(Loader(range(9), 2, 1, seed=1)), "with seed 1, and this one has 0"),
        (lambda: iter(loader_of()), r"not iterated over: for micro_batch in model\.micro_batches"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_micro_batches_take_no_other_loader() -> None:
    model = DataParallel(filled(Dense()), process_group=world_of_one())
    with pytest.raises(TypeError, match=r"or an instep\.Loader, got DataLoader"):
        next(model.micro_batches(torch.utils.data.DataLoader(samples())))  # type: ignore[arg-type]


def test_data_that_is_a_tuple_is_taken_apart_in_the_loop_and_nothing_else_is() -> None:
    model = DataParallel(filled(Dense()), process_group=world_of_one())
    for micro_batch, (x, y) in zip(model.micro_batches(loader_of()), read_step(loader_of(), 1), strict=True):
        inputs, targets = micro_batch
        assert torch.equal(inputs, x) and torch.equal(targets, y)
        (model(inputs)[:, :3] - targets[:, :1]).square().mean().backward()
    model.zero_grad()
    with pytest.raises(TypeError, match=r"a tuple or a list in .* got NoneType: .* by micro_batch\.index"):
        for _, _ in model.micro_batches(2):
            pass
    with pytest.raises(TypeError, match=r"got Tensor: read micro_batch\.data as it is"):
        for _ in MicroBatch(0, 1, data=torch.zeros(2)):
            pass


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_profile_says_what_is_the_reading_of_data(num_workers: int) -> None:
    loader = Loader(range(12), 4, 2, num_workers=num_workers)
    with profile(activities=[ProfilerActivity.CPU]) as told:
        read_step(loader, 1)
    loader.close()
    assert sum(event.name.startswith(DATA) for event in told.events()) == 3  # with the first sample
