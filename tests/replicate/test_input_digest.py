"""Ranks that read the same data, or different data, by mistake are noticed; correct use is not."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from instep.data.loader import Loader
from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import fully_shard
from instep.step import input_digest
from instep.step.micro_batches import MicroBatch
from tests.parity import filled, world_of_one
from tests.replicate.nets import Dense
from tests.world import world

SIZE, NUM_MICRO_BATCHES, NUM_STEPS = 4, 4, 5
Feed = Callable[[Any, int], Iterable[tuple[MicroBatch, Any]]]
"""The micro-batches of a step, each with its inputs."""


def samples(num_samples: int = 80, num_values: int = 1000) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(num_values, (num_samples, 6), generator=generator) / num_values


def on(mesh: Mesh, feed: Feed, wrap: Any = DataParallel) -> list[str]:
    """What is said, on this rank, of the inputs that ``feed`` gives in a loop."""
    model = wrap(filled(Dense()), process_group=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in range(NUM_STEPS):
                for _, x in feed(model, step):
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        if hasattr(model, "close"):
            model.close()
    said = [each for each in said if "same inputs" in str(each.message)]
    assert {each.filename for each in said} <= {__file__}  # the user's line, and none of instep
    return [str(each.message) for each in said]


def by_index(x: Tensor) -> Feed:
    """The samples of ``x`` in their order, again and again."""

    def feed(model: Any, step: int) -> Iterator[tuple[MicroBatch, Tensor]]:
        for micro_batch in model.micro_batches(NUM_MICRO_BATCHES):
            first = (step * NUM_MICRO_BATCHES + micro_batch.index) * SIZE
            yield micro_batch, x[torch.arange(first, first + SIZE) % len(x)]

    return feed


def batches() -> Iterator[Tensor]:
    return (x for (x,) in DataLoader(TensorDataset(samples()), SIZE))


def loader_that_goes_on() -> Feed:
    read = chain.from_iterable(batches() for _ in count())
    return lambda model, step: zip(model.micro_batches(NUM_MICRO_BATCHES), read, strict=False)


def loader_from_its_beginning() -> Feed:
    return lambda model, step: zip(model.micro_batches(NUM_MICRO_BATCHES), batches(), strict=False)


def counted_by_the_rank() -> Feed:
    x = samples().view(-1, SIZE, 6)
    return lambda model, step: (
        (micro_batch, x[(step * NUM_MICRO_BATCHES + i) % len(x)])
        for i, micro_batch in enumerate(model.micro_batches(NUM_MICRO_BATCHES))
    )


def one_for_all(change: bool = True) -> Feed:
    """The same for all micro-batches of a step."""
    x = samples().view(-1, SIZE, 6)
    return lambda model, step: (
        (micro_batch, x[step * change]) for micro_batch in model.micro_batches(NUM_MICRO_BATCHES)
    )


@pytest.mark.parametrize("mistake", [loader_that_goes_on, loader_from_its_beginning, counted_by_the_rank])
@pytest.mark.parametrize("stage", [0, 2])
@world(2, by="process")
def test_ranks_that_read_the_same_from_the_beginning_are_told(
    mesh: Mesh, mistake: Callable[[], Feed], stage: int
) -> None:
    said = on(mesh, mistake(), partial(fully_shard, stage=stage) if stage else DataParallel)
    assert len(said) == (mesh.rank == 0)
    for words in said:
        first = 1 if stage else 2  # of rank 1
        assert words.startswith(
            f"micro-batch 0 on rank 0 and micro-batch {first} on rank 1 were given the same inputs in the"
        )
        assert "depends on the number of ranks. Pass an instep.Loader to micro_batches()" in words


@world(3, by="process")
def test_unequal_numbers_of_micro_batches_and_one_batch_for_all_are_told_too(mesh: Mesh) -> None:
    for mistake in (loader_that_goes_on(), one_for_all()):
        assert len(on(mesh, mistake)) == (mesh.rank == 0)


RIGHT = {
    "samples by index": lambda: by_index(samples()),
    "a data set smaller than a step": lambda: by_index(samples(3 * SIZE)),
    "one batch that stays": lambda: one_for_all(change=False),
    "inputs of zeros": lambda: by_index(torch.zeros(80, 6)),
    "a few values": lambda: by_index(samples(num_values=3)),
    "an instep.Loader": lambda: from_a_loader,
}


def from_a_loader(model: Any, step: int) -> Iterator[tuple[MicroBatch, Tensor]]:
    """Even one whose samples are all alike."""
    loader = Loader([samples()[0]] * 80, SIZE * NUM_MICRO_BATCHES, SIZE)
    return ((micro_batch, micro_batch.data) for micro_batch in model.micro_batches(loader))


@world(2, by="process")
def test_right_use_is_quiet(mesh: Mesh) -> None:
    """As are disjoint shares, which cannot be told from it."""
    for feed in (*RIGHT.values(), lambda: by_index(samples()[mesh.rank :: 2])):
        assert on(mesh, feed()) == on(world_of_one(), feed()) == []


def test_nothing_is_looked_at_after_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(input_digest, "sampled_digest", lambda *_, **__: looked.append(1) or len(looked))
    on(world_of_one(), by_index(samples()))
    assert len(looked) == input_digest.NUM_STEPS * NUM_MICRO_BATCHES < NUM_STEPS * NUM_MICRO_BATCHES


def plain(x: Tensor, num_batches: int = 2) -> Feed:
    """A plain loop that accumulates ``num_batches`` gradients."""

    def feed(model: Any, step: int) -> Iterator[tuple[None, Tensor]]:
        for i in range(num_batches):
            with contextlib.nullcontext() if i + 1 == num_batches else model.no_sync():
                first = (step * num_batches + i) * SIZE
                yield None, x[torch.arange(first, first + SIZE) % len(x)]

    return feed


@pytest.mark.parametrize("stage", [0, 3])
@world(2, by="process")
def test_ranks_of_a_plain_loop_that_read_the_same_are_told(mesh: Mesh, stage: int) -> None:
    """Without a DistributedSampler every rank has the batches of one process."""
    said = on(mesh, plain(samples()), partial(fully_shard, stage=stage) if stage else DataParallel)
    assert len(said) == (mesh.rank == 0)
    for words in said:
        assert words.startswith("rank 0 and rank 1 were given the same inputs in the first step")
        assert "DistributedSampler" in words


@world(2, by="process")
def test_an_evaluation_before_the_first_step_does_not_count(mesh: Mesh) -> None:
    """All ranks may evaluate on the same batch."""

    def feed(model: Any, step: int) -> Iterator[tuple[None, Tensor]]:
        with torch.no_grad():
            model(samples()[-SIZE:])
        yield from plain(samples()[mesh.rank :: 2])(model, step)

    assert on(mesh, feed) == []


@world(2, by="process")
def test_plain_loops_with_shares_or_with_one_batch_for_good_are_quiet(mesh: Mesh) -> None:
    assert on(mesh, plain(samples()[mesh.rank :: 2])) == []
    assert on(mesh, plain(samples(SIZE))) == []
    assert on(mesh, plain(torch.zeros(80, 6))) == []


def one_step(model: Any, loader: Loader) -> None:
    for micro_batch in model.micro_batches(loader):
        model(micro_batch.data).square().mean().backward()


@pytest.mark.parametrize("num_workers", [0, 1])
@world(3, by="process")
def test_loaders_with_other_data_of_the_same_length_raise_before_a_gradient_is_added(
    mesh: Mesh, num_workers: int
) -> None:
    rows = samples()[torch.randperm(80, generator=torch.Generator().manual_seed(mesh.rank // 2))]
    model = DataParallel(filled(Dense()), process_group=mesh)
    loader = Loader(list(rows), SIZE * NUM_MICRO_BATCHES, SIZE, num_workers=num_workers)
    try:
        with pytest.raises(Desync, match=r"rank 2 has another first sample in its instep.Loader, digest"):
            one_step(model, loader)
        assert all(p.grad is None for p in model.parameters())
    finally:
        loader.close()
        model.close()


class Unseeded(list[Tensor]):
    """Samples with noise that no key reaches."""

    def __getitem__(self, i: Any) -> Any:
        noise = int.from_bytes(os.urandom(2), "little")
        return super().__getitem__(i) + noise


@pytest.mark.parametrize("where", ["data set", "collate_fn"])
@world(2)
def test_a_first_sample_that_is_never_the_same_is_not_compared(mesh: Mesh, where: str) -> None:
    model = DataParallel(filled(Dense()), process_group=mesh)
    dataset, collate = Unseeded(samples()), None
    if where == "collate_fn":
        dataset, collate = (
            TensorDataset(samples()),
            lambda rows: Unseeded([torch.cat([x for (x,) in rows]).view(-1, 6)])[0],
        )
    loader = Loader(dataset, SIZE * NUM_MICRO_BATCHES, SIZE, collate_fn=collate)
    one_step(model, loader)
    model.close()


def scaled(how: str, x: Tensor, num: int) -> Tensor:
    loss = x.square()
    return {
        "divided": lambda: loss.mean() / num,
        "multiplied": lambda: loss.mean() * (1 / num),
        "by a GradScaler": lambda: torch.tensor(65536.0) * (loss.mean() / num),
        "a mean": loss.mean,
        "a mean by hand": lambda: loss.sum() / num,
        "a sum": lambda: torch.nn.functional.mse_loss(x, x * 0, reduction="sum") / num,
        "divided by something else": lambda: loss.mean() / (num + 1),
        "an average": lambda: (loss.mean() + x.mean()) / num,
    }[how]()


@pytest.mark.parametrize("how", ["divided", "multiplied", "by a GradScaler"])
@pytest.mark.parametrize("num", [3, 8])
def test_a_loss_that_is_divided_by_the_number_of_micro_batches_is_told_once(how: str, num: int) -> None:
    """Left over from a loop that accumulates: gradients are G times too small."""
    said = of_losses(how, num)
    assert len(said) == 1
    assert f"the loss was divided by {num}" in str(said[0].message)
    assert said[0].filename == __file__


@pytest.mark.parametrize(
    "how", ["a mean", "a mean by hand", "a sum", "divided by something else", "an average"]
)
def test_other_losses_are_quiet(how: str) -> None:
    assert of_losses(how, 8) == []


def of_losses(how: str, num: int) -> list[warnings.WarningMessage]:
    model = DataParallel(filled(Dense()), process_group=world_of_one())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            for _ in model.micro_batches(num):
                scaled(how, model(samples()[:SIZE]), num).backward()
            model.zero_grad()
    model.close()
    return [each for each in said if "divided" in str(each.message)]


def test_a_loop_that_was_left_leaves_no_mode_behind() -> None:
    model = DataParallel(filled(Dense()), process_group=world_of_one())
    iterator = model.micro_batches(2)
    next(iterator)
    with torch.device("meta"):
        del iterator
        assert torch.empty(1).is_meta
    assert not torch.empty(1).is_meta
    assert torch.overrides._get_current_function_mode() is None
    model.close()
