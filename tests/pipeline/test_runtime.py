"""A pipeline has the bits of one rank, whatever the schedule, the cut and the ranks; its state is whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from instep import events
from instep.bench.memory_usage import memory_usage
from instep.errors import InstepError
from instep.events import Event, Timeline
from instep.mesh.mesh import Mesh, build
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.pipeline.cuts import balanced, edges_of
from instep.reduce.exchange import OrderedAllReduce
from instep.state.hash import SharedHash
from instep.state.homes import offered
from instep.step.micro_batches import MicroBatch
from instep.timeline.stages import pipeline_figures
from tests.parity import world_of_one
from tests.rejoin import unranked
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

    num_micro_batches, position, identity, digest = 8, 0, 0, 0

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


ADAMW = torch.optim.AdamW


def sharded(model: nn.Module, mesh: Mesh | None = None, **options: Any) -> instep.ShardedOptimizer:
    return instep.ShardedOptimizer(model.parameters(), ADAMW, mesh, lr=1e-2, **options)


@world(4, pp=2, dp=2)
def test_its_state_dict_is_that_of_all_layers_and_fits_a_plain_optimizer(mesh: Mesh) -> None:
    model = instep.Pipeline(gpt(), mesh, "1f1b", G)
    optimizer = sharded(model, mesh)
    train(model, optimizer)
    whole, found = optimizer.state_dict(), sha256(model, optimizer)
    assert len(whole["state"]) == len(list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"spread over 4 ranks"):
        len(optimizer.state)
    for state in optimizer.local_state.values():
        state["exp_avg"].zero_()
    assert sha256(model, optimizer) != found
    optimizer.load_state_dict(whole)
    assert sha256(model, optimizer) == found
    alone = gpt()
    plain = ADAMW(alone.parameters(), lr=1e-2)
    plain.load_state_dict(whole)
    assert all(plain.state[p]["exp_avg"].shape == p.shape for p in alone.parameters())
    optimizer.close()
    model.close()


@world(4, pp=2, dp=2)
def test_a_checkpoint_of_it_is_for_any_pipeline_and_for_none(mesh: Mesh, tmp_path: Path) -> None:
    model = instep.Pipeline(gpt(), mesh, "1f1b", G)
    optimizer = sharded(model, mesh)
    train(model, optimizer)
    instep.save(tmp_path, step=STEPS, model=model, optimizer=optimizer)
    expected = sha256(model, optimizer)
    optimizer.close()
    model.close()

    with torch.device("meta"):
        net = unfilled()
    other = instep.Pipeline(net, mesh, "zb-v", G, cuts=(1, 2, 4))
    again = ADAMW(other.parameters(), lr=1e-2)
    missing = r"have no values yet: call model.materialise\(\), or load a state"
    for early in (lambda: train(other, again), lambda: instep.full_state_dict(other)):
        with pytest.raises(ValueError, match=missing):
            early()
    assert instep.load(tmp_path, model=other, optimizer=again).step == STEPS
    assert sha256(other, again) == expected
    train(other, again)
    other.close()

    replicas = instep.DataParallel(gpt(), process_group=mesh["dp"])
    third = sharded(replicas, mesh["dp"])
    assert instep.load(tmp_path, model=replicas, optimizer=third).step == STEPS
    state = training_state(replicas, third)
    assert len(state.hashed()) > len(list(replicas.parameters()))
    third.close()
    replicas.close()


@world(2, pp=2, dp=1)
def test_what_cannot_divide_a_stage_is_refused(mesh: Mesh) -> None:
    expected = of_one_rank()
    instep.get.register_mesh(mesh)
    with pytest.raises(ValueError, match=r"nothing would use pp"):
        instep.ShardedOptimizer(gpt().parameters(), ADAMW)
    model = instep.Pipeline(gpt(), mesh, "1f1b", G)
    optimizer = sharded(model)  # of the registered mesh
    train(model, optimizer)
    assert sha256(model, optimizer) == expected
    optimizer.close()
    with pytest.raises(ValueError, match=r"ranks \[\d\] have the same ones, .* is for ranks \[0, 1\]"):
        sharded(model, mesh["pp"])
    for stage in (2, 3):
        with pytest.raises(ValueError, match=r"is in a pipeline already.*ShardedOptimizer"):
            instep.fully_shard(model.module, mesh["pp"], stage=stage)
    model.close()


@world(2, dp=2)
def test_a_sharded_module_makes_no_pipeline(mesh: Mesh) -> None:
    for stage in (2, 3):
        net = instep.fully_shard(gpt(), mesh, stage=stage)
        with pytest.raises(ValueError, match=r"is divided among ranks already.*ShardedOptimizer"):
            instep.Pipeline(net, build(None, 0, 1), "1f1b", G)
        net.close()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_layers_of_a_model_from_the_meta_device_get_the_bits_of_one_rank(mesh: Mesh, schedule: str) -> None:
    with torch.device("meta"):
        net = unfilled()
    kept = list(net.parameters())
    model = instep.Pipeline(net, mesh, schedule, G)
    optimizer = sharded(model, mesh)
    model.materialise()
    assert all(a is b for a, b in zip(kept, net.parameters(), strict=True))
    train(model, optimizer)
    assert sha256(model, optimizer) == of_one_rank()
    optimizer.close()
    model.close()


@world(4, pp=2, dp=2)
def test_a_rank_fills_the_layers_that_it_has_and_the_first_of_those_with_the_same_decides(mesh: Mesh) -> None:
    with torch.device("meta"):
        net = unfilled(tied=False)
    model = instep.Pipeline(net, mesh, "1f1b", G)
    filled: list[str] = []

    def init(name: str, values: Tensor) -> None:
        filled.append(name)
        values.fill_(1.0 + mesh.coordinates["dp"])

    model.materialise(init)
    here = {name: p for name, p in net.named_parameters() if model.home.holds(p)}
    assert filled == list(here) and 0 < len(filled) < len(list(net.parameters()))
    assert all(bool((x == 1).all()) for x in (*here.values(), *instep.full_state_dict(model).values()))
    model.close()


class Shifted(nn.Linear):
    """Fills its own weights, and a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("shift", torch.empty(4))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "shift" in self._buffers:
            self.shift.normal_()


@world(2, pp=2, dp=1, by="process")
def test_modules_that_fill_their_own_weights_do_so_alike_in_any_pipeline(mesh: Mesh) -> None:
    def made(among: Mesh) -> dict[str, Tensor]:
        with torch.device("meta"):
            net = nn.Sequential(*(Shifted() for _ in range(4)))
            net[3].weight = net[0].weight  # of two stages, and filled by both modules
        model = instep.Pipeline(net, among, "1f1b", G)
        model.materialise(seed=3)
        found = instep.full_state_dict(model)
        model.close()
        return found

    here, alone = made(mesh), made(build(None, 0, 1))
    assert list(here) == list(alone) and not torch.equal(here["0.bias"], here["1.bias"])
    assert all(torch.equal(here[name], alone[name]) for name in alone)


@world(2, pp=2, dp=1)
def test_a_model_is_from_the_meta_device_or_not(mesh: Mesh) -> None:
    net = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"some parameters are on the meta device, and others are not"):
        instep.Pipeline(net, mesh)


@world(4, pp=2, dp=2)
@pytest.mark.parametrize("divided", [False, True])
def test_a_rank_holds_its_layers_and_their_moments(mesh: Mesh, divided: bool) -> None:
    net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    model = instep.Pipeline(net, mesh, "gpipe", 2)
    optimizer: Any = sharded(model, mesh) if divided else ADAMW(model.parameters())
    model.step(lambda output, _: output.square().mean(), lambda _: torch.ones(2, 256))
    optimizer.step()
    layers = 2 if mesh.along["pp"].rank == 1 else 1
    size = 4 * layers * 256 * 256
    said = {"parameters": size, "gradients": size, "optimizer": 2 * size // (1 + divided)}
    counted = memory_usage(net, optimizer, model)
    for name, nbytes in said.items():
        assert getattr(counted, name) == pytest.approx(nbytes, rel=0.01)
    if divided:
        optimizer.close()
    model.close()


def verified(model: instep.Pipeline, **options: Any) -> Any:
    return model.verify(
        lambda logits, micro_batch: loss(logits, 0, micro_batch),
        lambda micro_batch: windows(0, micro_batch)[:, :-1],
        **options,
    )


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_all_gradients_are_those_of_one_process_and_nothing_is_left_behind(mesh: Mesh, schedule: str) -> None:
    expected = of_one_rank()
    model = instep.Pipeline(gpt(checkpoint=schedule == "1f1b"), mesh, schedule, G)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = sha256(model, optimizer)
    report = verified(model)
    assert report.ok and report.cause == ""
    assert {row.name for row in report.rows} == {name for name, _ in model.module.named_parameters()}
    assert all(row.error < 1e-6 for row in report.rows)
    assert report.strategy == f"bucketed, pipelines of 2 ({schedule})"
    assert all(p.grad is None for p in model.parameters()) and model.next_step == 0
    assert sha256(model, optimizer) == before
    train(model, optimizer)
    assert sha256(model, optimizer) == expected
    model.close()


@world(4, pp=2, dp=2)
def test_a_wrong_gradient_is_named_with_the_rank_that_has_it(mesh: Mesh) -> None:
    model = instep.Pipeline(gpt(), mesh, "1f1b", G)
    wrong = "blocks.3.attention.out.weight"
    for stage in model._stages.values():
        if mesh.rank == 3 and wrong in stage.reducer.names:
            finish = stage.reducer.finish

            def doubled(finish: Any = finish) -> None:
                finish()
                model.module.get_parameter(wrong).grad.mul_(2.0)

            stage.reducer.finish = doubled
    report = verified(model)
    bad = [(row.name, row.rank, round(row.ratio, 3)) for row in report.rows if not row.ok]
    assert bad == [(wrong, 3, 2.0)]
    with pytest.raises(InstepError, match=rf"1 of \d+ gradients on 4 rank.*'{wrong}' on rank 3"):
        report.raise_for_error()
    model.close()


@world(2, pp=2, dp=1, by="process")
def test_dropout_and_data_are_those_of_the_step(mesh: Mesh) -> None:
    rows = torch.arange(32 * 9).view(32, 9) * 7 % 32
    data = instep.Loader(rows, 12, 2)
    model = instep.Pipeline(gpt(dropout=0.2), mesh, "zb-h1")
    report = model.verify(
        lambda logits, micro_batch: F.cross_entropy(logits.flatten(0, 1), micro_batch.data[:, 1:].flatten()),
        lambda micro_batch: micro_batch.data[:, :-1],
        data,
    )
    assert report.ok and data.position == 0
    data.close()
    model.close()


@given(st.lists(st.integers(1, 9), min_size=4, max_size=8), st.integers(1, 4))
def test_no_cut_has_a_smaller_largest_stage_than_the_balanced_one(costs: list[int], num_stages: int) -> None:
    def largest(edges: Sequence[int]) -> int:
        return max(sum(costs[a:b]) for a, b in pairwise(edges))

    inner = combinations(range(1, len(costs)), num_stages - 1)
    assert largest(balanced(costs, num_stages)) == min(largest([0, *its, len(costs)]) for its in inner)


def test_layers_and_parameters_are_what_stages_have_as_many_of() -> None:
    sizes = [6, 6, 6, 6, 400, 400]
    assert edges_of("layers", sizes, 2) == [0, 3, 6]
    assert edges_of("cost", sizes, 2) == [0, 5, 6]
    assert edges_of("cost", [0] * 4, 2) == [0, 2, 4]  # activations, say
    assert edges_of([1, 4], sizes, 3) == [0, 1, 4, 6]


@pytest.mark.parametrize(
    ("cuts", "refusal"),
    [
        ("memory", r"expected one of layers, cost, or a list of the first layers, got 'memory'"),
        (3, r"or a list of the first layers, got 3"),
        ([2, 1], r"cuts=\[2, 1\]: expected 2 of the layers 1 to 3, in order"),
        ([1], r"the first layer of each of 3 stages but stage 0, so that none is empty"),
    ],
)
def test_what_is_no_cut_is_refused(cuts: Any, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        edges_of(cuts, [1] * 4, 3)


@world(2, pp=2, dp=1)
def test_a_pipeline_cut_by_cost_has_as_many_parameters_in_each_stage(mesh: Mesh) -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)], nn.Linear(2, 200), nn.Linear(200, 2))
    model = instep.Pipeline(net, mesh, "1f1b", 8, cuts="cost")
    assert model.placement["cuts"] == [4]
    model.close()


@world(2, pp=2, dp=1)
@pytest.mark.parametrize("by", ["cost", [1]])
def test_a_pipeline_that_is_made_before_there_are_ranks_is_cut_when_they_meet(mesh: Mesh, by: Any) -> None:
    own = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    model = instep.Pipeline(gpt(), unranked(), own, 2, cuts=by)
    assert model.placement["cuts"] == []
    said = offered(model)
    said.leave()
    said.join(mesh)
    assert len(model.placement["cuts"]) == 1
    model.close()
