"""A pipeline has the bits of one rank, whatever the schedule, the cut and the ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from instep import events
from instep.events import Event, Timeline
from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.reduce.exchange import OrderedAllReduce
from instep.state.hash import SharedHash
from instep.step.micro_batches import MicroBatch
from instep.timeline.stages import pipeline_figures
from tests.parity import world_of_one
from tests.state_oracle import state_entries, state_sha256
from tests.training_state import training_state
from tests.world import world

G, STEPS, MAX_NORM = 6, 2, 0.1


def unfilled(**options: Any) -> GPT:
    return GPT(GPTConfig(vocab_size=32, context=8, layers=4, width=16, heads=2, **options))


def gpt(**options: Any) -> GPT:
    net = unfilled(**options)
    instep.initialize(net, 0)
    return net


def windows(step: int, micro_batch: MicroBatch) -> Tensor:
    every = torch.randint(0, 32, (G, 2, 9), generator=torch.Generator().manual_seed(step))
    return every[micro_batch.index]


def loss(logits: Tensor, step: int, micro_batch: MicroBatch) -> Tensor:
    """A sum over as many tokens as the micro-batch's number says, so that weights differ."""
    targets = windows(step, micro_batch)[:, 1:]
    micro_batch.weight = targets.numel()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


_alone: dict[tuple[tuple[str, Any], ...], str] = {}
_lock = threading.Lock()


def of_one_rank(**options: Any) -> str:
    """The hash of the state after ``STEPS`` steps in one process, once for all who ask in this one."""
    key = tuple(options.items())
    with _lock:
        if key not in _alone:
            _alone[key] = _trained_alone(gpt(**options))
        return _alone[key]


def _trained_alone(net: nn.Module) -> str:
    model = instep.DataParallel(net, process_group=world_of_one())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        for micro_batch in model.micro_batches(G):
            loss(net(windows(step, micro_batch)[:, :-1]), step, micro_batch).backward()
        instep.clip_grad_norm_(net.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    return state_sha256(state_entries(net, optimizer), STEPS)


def train(model: instep.Pipeline, optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """``STEPS`` steps, and their losses."""
    told = []
    for step in range(STEPS):
        told.append(
            model.step(
                lambda logits, micro_batch, step=step: loss(logits, step, micro_batch),
                lambda micro_batch, step=step: windows(step, micro_batch)[:, :-1],
            )
        )
        instep.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return told


def sha256(model: instep.Pipeline, optimizer: torch.optim.Optimizer) -> str:
    """As every rank finds it."""
    state = training_state(model, optimizer)
    return SharedHash(state.group).digests(state.owned(state.hashed()), STEPS)[0]


def piped(mesh: Mesh, net: nn.Module, schedule: str, **options: Any) -> str:
    model = instep.Pipeline(net, mesh, schedule, G, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    found = sha256(model, optimizer)
    model.close()
    return found


class Late(nn.Module):
    """A layer whose backward number ``last`` waits until ``begun`` is set, and says whether it was."""

    def __init__(self, last: int, begun: threading.Event) -> None:
        super().__init__()
        self.linear, self.last, self.begun = nn.Linear(4, 4), last, begun
        self.found: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(self.reached)
        return y

    def reached(self, gradient: Tensor) -> None:
        self.found.append(len(self.found) + 1 < self.last or self.begun.wait(20))


def test_the_gradients_of_a_stage_travel_while_other_stages_still_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, original = threading.Event(), OrderedAllReduce.run

    def run(self: OrderedAllReduce, bucket: Any, header: Any, *args: Any, **named: Any) -> None:
        begun.set()  # nobody else comes here: the first stage has not ended its last backward
        original(self, bucket, header, *args, **named)

    monkeypatch.setattr(OrderedAllReduce, "run", run)
    world(4, pp=2, dp=2)(reduces_early)(begun=begun)


def reduces_early(mesh: Mesh, begun: threading.Event) -> None:
    layers = [Late(G // 2, begun), nn.Linear(4, 4)]
    model = instep.Pipeline(layers, mesh, "1f1b", G)
    found = layers[0].found
    model.step(lambda y, _: y.square().mean(), lambda _: torch.ones(2, 4))
    assert found == ([True] * (G // 2) if mesh.coordinates["pp"] == 0 else [])
    model.close()


@world(2, pp=2, dp=1, by="process")
def test_dropout_is_keyed_by_micro_batch_and_layer(mesh: Mesh) -> None:
    assert piped(mesh, gpt(dropout=0.1), "zb-h1") == of_one_rank(dropout=0.1)
    assert piped(mesh, gpt(dropout=0.1), "1f1b", seed=1) != of_one_rank(dropout=0.1)


@world(2, pp=2, dp=1)
def test_a_schedule_of_ones_own_is_a_text(mesh: Mesh) -> None:
    own = "\n".join(
        [
            "# all forwards from the last micro-batch to the first",
            *(
                f"rank {rank}: " + " ".join(f"{rank}{kind}{k}" for kind in "FB" for k in range(G))
                for rank in range(2)
            ),
        ]
    )
    assert piped(mesh, gpt(), own) == of_one_rank()
    with pytest.raises(
        ValueError, match=r"rank 1 waits for ever.*put 1F0 before it(?s:.*)1B0(?s:.*)<-- here"
    ):
        instep.Pipeline(gpt(), mesh, "0F0 0B0\n1B0 1F0", 1)
    with pytest.raises(ValueError, match=r"a schedule of your own says itself.*chunks=2: leave it out"):
        instep.Pipeline(gpt(), mesh, own, G, chunks=2)


@world(2, pp=2, dp=1)
def test_a_rank_has_the_memory_of_its_layers_alone(mesh: Mesh) -> None:
    net = gpt(tied=False)
    model = instep.Pipeline(net, mesh, "1f1b", G)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, optimizer)
    here = [n for n, p in net.named_parameters() if p.numel()]
    assert here == [n for n, p in net.named_parameters() if optimizer.state[p]]
    first = mesh.along["pp"].rank == 0
    assert ("embedding.tokens.weight" in here) == first
    assert ("head.out.weight" in here) == (not first)
    assert all(len(of_step) == G and all(torch.isfinite(x) for x in of_step) for of_step in losses)
    model.close()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_evaluation_gives_all_ranks_what_the_whole_model_gives(mesh: Mesh, schedule: str) -> None:
    tokens = torch.arange(15).view(3, 5)
    expected = gpt()(tokens)
    model = instep.Pipeline(gpt(), mesh, schedule, G)
    with torch.no_grad():
        assert torch.equal(model(tokens), expected)
        assert torch.equal(model(tokens[:1]), expected[:1])
    with pytest.raises(RuntimeError, match=r"model.step\(loss, inputs, data\)"):
        model(tokens)
    model.close()


@world(2, pp=2, dp=1)
def test_state_dicts_are_whole_or_refused(mesh: Mesh) -> None:
    before = gpt().state_dict()
    model = instep.Pipeline(gpt(), mesh, "1f1b", G)
    with pytest.raises(RuntimeError, match=r"is on another rank.*instep.full_state_dict"):
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"is on another rank.*Load before the pipeline is made"):
        model.load_state_dict(before)
    whole = instep.full_state_dict(model)
    assert list(whole) == list(before)
    assert all(torch.equal(whole[name], before[name]) for name in before)
    model.close()


class OwnClock(threading.local):
    """A thread's time, which only layers make pass."""

    now_ns = 1

    def monotonic_ns(self) -> int:
        return self.now_ns


CLOCK = OwnClock()


class Takes(torch.autograd.Function):
    """What it is given; forward takes 1 ms, and backward 2 ms."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        CLOCK.now_ns += 1_000_000
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        CLOCK.now_ns += 2_000_000
        return gradient


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Takes.apply(x * self.factor)
        return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Event]]:
    monkeypatch.setattr(events, "time", CLOCK)
    return {}


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_with_three_times_the_layers_is_named_by_the_timeline(
    mesh: Mesh, schedule: str, recorded: dict[int, list[Event]]
) -> None:
    model = instep.Pipeline([Layer() for _ in range(8)], mesh, schedule, G, cuts=[2])
    for step in range(3):
        mesh.recorder.begin_step(step)
        model.step(lambda output, _: output.square().mean(), lambda _: torch.ones(3))
        model.zero_grad()
    mesh.recorder.end_step()
    recorded[mesh.rank] = mesh.recorder.events
    mesh.world.group.barrier("the end of the steps")
    figures = pipeline_figures([Timeline([*recorded[0], *recorded[1]])], schedule)
    assert figures is not None and figures.slow is not None
    slow = figures.slow
    assert (figures.num_ranks, figures.micro_batches, slow.stage, slow.ranks) == (2, G, 1, (1,))
    assert slow.times == pytest.approx(3)
    assert (slow.forward_s, slow.others_forward_s) == pytest.approx((0.006, 0.002))
    assert (slow.backward_s, slow.others_backward_s) == pytest.approx((0.012, 0.004))
    assert slow.bubble > slow.even_bubble
    model.close()


class Sample:
    """Data of a micro-batch."""


class Samples:
    """Made when they are read; ``alive`` are those that something still holds."""

    num_micro_batches, position, identity = 8, 0, 0

    def __init__(self) -> None:
        self.alive: WeakSet[Sample] = WeakSet()

    def read(self, own: Sequence[int]) -> Iterator[tuple[Sample, int]]:
        for _ in own:
            made = Sample()
            self.alive.add(made)
            yield made, 1

    def advance(self) -> None:
        self.position += 1


@world(2, pp=2, dp=1)
def test_data_of_a_micro_batch_is_let_go_after_its_last_action(mesh: Mesh) -> None:
    model, data = instep.Pipeline([Layer(), Layer()], mesh, "1f1b"), Samples()
    most = []

    def looked(_: MicroBatch) -> Tensor:
        most.append(len(data.alive))
        return torch.ones(3)

    model.step(lambda output, one: looked(one).sum() * output.sum(), looked, data)
    # As many as are under way on the rank, the one that is begun, and the one that was read last.
    assert len(most) == 8 and max(most) <= 4
    model.close()


@world(2, pp=2, dp=1)
def test_what_cannot_be_cut_is_refused_on_all_ranks(mesh: Mesh) -> None:
    with pytest.raises(TypeError, match=r"Linear does not say which layers.*pipeline_layers"):
        instep.Pipeline(nn.Linear(2, 2), mesh)
    named = [nn.Linear(2, 2) for _ in range(2)]
    bare = nn.ModuleList(named)
    bare.pipeline_layers = lambda: named
    with pytest.raises(
        TypeError, match=r"pipeline_layers\(\) of ModuleList: expected pairs .*got Linear: return"
    ):
        instep.Pipeline(bare, mesh)
    with pytest.raises(ValueError, match=r"a layer for each of 2 stages, got 1"):
        instep.Pipeline([nn.Linear(2, 2)], mesh)
    with pytest.raises(ValueError, match=r"cuts=\[2\]: expected 1 of the layers 1 to 1, .* but stage 0"):
        instep.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], mesh, cuts=[2])
    with pytest.raises(ValueError, match=r"naive, gpipe, 1f1b"):
        instep.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], mesh, "2f2b")
    with pytest.raises(ValueError, match=r"the mesh of instep.init\(pp=...\)"):
        instep.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], mesh["pp"])
