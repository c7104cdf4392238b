"""Experts over the ranks along ep: the bits of one process, in every layout."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from instep.checkpoint.registered import Registered
from instep.errors import Desync
from instep.events import EXPERT_DISPATCH, Timeline
from instep.expert import MoE, aux_loss, balanced, dispatch, shard
from instep.expert.routes import Routes
from instep.memory import flat
from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.state.hash import SharedHash
from instep.timeline.bubbles import bubbles
from tests.expert.by_token import layer_of
from tests.parity import bits, filled, numbers
from tests.world import world

E = 8


def of_layer(layer: MoE, num_tokens: int) -> dict[str, Tensor]:
    """Output and gradients of a forward and a backward."""
    x = numbers(num_tokens, 13, key="x").requires_grad_()
    output = layer(x)
    ((output * numbers(num_tokens, 13, key="w")).sum() + 0.1 * aux_loss(layer)).backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {"output": output.detach(), "x": x.grad, **gradients}


def differing(mesh: Mesh, num_tokens: int, options: dict[str, Any]) -> int:
    """How many elements differ from those of one process."""
    expected = of_layer(layer_of(E, **options), num_tokens)
    layer = shard(layer_of(E, **options), mesh)
    count = 0
    for name, x in of_layer(layer, num_tokens).items():
        own = expected[name]
        if name in ("up", "down"):
            own = own.chunk(mesh.along["ep"].size)[mesh.coordinates["ep"]]
        assert x.shape == own.shape
        torch.testing.assert_close(x, own)
        count += int((bits(x) != bits(own)).sum())
    return count


@pytest.mark.parametrize("num_tokens", [1, 64, 101])
@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"top_k": 3, "capacity_factor": 0.75}], ids=str)
@pytest.mark.parametrize("axes", [{"ep": 1}, {"ep": 2}, {"ep": 4}, {"ep": 2, "tp": 2}], ids=str)
def test_a_layer_has_the_bits_of_one_process(
    axes: dict[str, int], options: dict[str, Any], num_tokens: int
) -> None:
    world(math.prod(axes.values()), **axes)(same)(options=options, num_tokens=num_tokens)


def same(mesh: Mesh, options: dict[str, Any], num_tokens: int) -> None:
    assert not differing(mesh, num_tokens, options)


@world(2, ep=2, by="process", backend="shm")
def test_a_layer_has_the_bits_of_one_process_over_shared_memory(mesh: Mesh) -> None:
    assert not differing(mesh, 101, {})


class _AllReduce(dispatch._FromRows):
    """A control: each rank adds the results of its own experts, then an all-reduce adds the ranks' sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes, slots: int) -> Tensor:
        ctx.routes, ctx.slots = routes, slots
        by_pair = rows.new_zeros(routes.num_pairs, rows.shape[1])
        by_pair[routes.pairs] = rows[routes.rows]
        sums = by_pair.view(-1, slots, rows.shape[1]).sum(1)
        if routes.mesh is not None:
            routes.mesh.along["ep"].group.all_reduce(flat(sums), "the control")
        return sums


@pytest.mark.parametrize("control", ["sums of ranks", "another block"])
def test_another_order_or_shape_has_other_bits(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if control == "sums of ranks":
        monkeypatch.setattr(dispatch, "_FromRows", _AllReduce)
    world(4, ep=4)(differs)(control=control)


def differs(mesh: Mesh, control: str) -> None:
    if control == "sums of ranks":
        assert differing(mesh, 101, {"top_k": 4})
        return
    layers = [layer_of(E, width=100) for _ in range(2)]
    layers[1].block = 128  # of a product of other shape, and all of an expert's tokens in one
    x = numbers(700, 100, key="x")
    for layer in layers:
        layer(x).sum().backward()
    assert not torch.equal(layers[0].up.grad, layers[1].up.grad)


G, MICRO, STEPS = 4, 3, 3
CONFIG = GPTConfig(vocab_size=32, context=7, layers=2, width=16, heads=2, ff_width=20, experts=4)


def trained(mesh: Mesh, stage: int = 0) -> tuple[str, dict[str, int]]:
    """The hash of model and optimizer after some steps, and the bytes that this rank keeps."""
    net = shard(filled(GPT(CONFIG)), mesh)
    model: Any = (
        instep.fully_shard(net, mesh, seed=5) if stage > 1 else instep.DataParallel(net, mesh, seed=5)
    )
    options: dict[str, Any] = {"lr": 0.01, "foreach": False}
    if stage == 1:
        optimizer: Any = instep.ShardedOptimizer(net.parameters(), torch.optim.AdamW, mesh, **options)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), **options)
    for step in range(STEPS):
        with balanced(net, mesh, rate=0.01):
            for micro_batch in model.micro_batches(G, step=step):
                tokens = numbers(MICRO, 8, key=f"{step} {micro_batch.index}").abs().mul(9).long() % 32
                logits = net(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss + 0.1 * aux_loss(net)).backward()
        instep.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    state = Registered({"model": model, "optimizer": optimizer}).state()
    kept = {"weights": sum(p.nbytes for p in net.parameters())}
    if not stage:
        kept["moments"] = sum(x.nbytes for its in optimizer.state.values() for x in its.values() if x.ndim)
    found = SharedHash(state.group).digests(state.owned(), 0)[0]
    return found, kept


_expected: list[tuple[str, dict[str, int]]] = []
_lock = threading.Lock()


def of_one() -> tuple[str, dict[str, int]]:
    with _lock:
        if not _expected:
            world(1)(keep)()
    return _expected[0]


def keep(mesh: Mesh) -> None:
    _expected.append(trained(mesh))


LAYOUTS: list[dict[str, int]] = [{"ep": 2}, {"ep": 4}, {"dp": 2, "ep": 2}, {"dp": 3}, {"dp": 2, "ep": 4}]


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_a_model_trains_to_the_bits_of_one_process(axes: dict[str, int]) -> None:
    of_one()
    world(math.prod(axes.values()), **axes)(trains_alike)()


def trains_alike(mesh: Mesh) -> None:
    expected, whole = of_one()
    found, kept = trained(mesh)
    assert found == expected
    experts = 4 * CONFIG.layers * CONFIG.experts * 2 * CONFIG.width * CONFIG.d_ff  # bytes
    saved = experts - experts // mesh.along["ep"].size
    assert kept["weights"] == whole["weights"] - saved
    assert kept["moments"] == whole["moments"] - 2 * saved


@world(2, ep=2)
def test_a_slow_expert_is_found_as_a_wait_by_name(mesh: Mesh) -> None:
    """All tokens choose the expert of rank 1, whose activation takes long: rank 0 waits."""

    def slow(rows: Tensor) -> Tensor:
        for _ in range(20):
            result = F.gelu(rows)
        return result

    layer = shard(layer_of(2, top_k=1, ff_width=1024, activation=slow), mesh)
    layer.balance_bias.copy_(torch.tensor([-10.0, 10.0]))
    x = numbers(2000, 13, key="x")
    waits = []
    for step in range(3):
        mesh.recorder.begin_step(step)
        layer(x).sum().backward()
        mesh.recorder.end_step()
        found = bubbles(Timeline(mesh.recorder.events).of(mesh.rank, step))
        waits.append(sum(bubble.duration_s for bubble in found if bubble.cause == EXPERT_DISPATCH))
    everyone = mesh.world.group.all_gather_bytes(f"{sorted(waits)[1]}".encode(), "the waits")
    idle, busy = map(float, everyone)
    assert idle > 2 * busy


@world(3, ep=3)
def test_ranks_with_other_tokens_are_named(mesh: Mesh) -> None:
    layer = shard(layer_of(3), mesh)
    with pytest.raises(Desync, match=r"rank 1 chose other experts than rank 0 .* micro_batch.index"):
        layer(numbers(50, 13, key=f"{mesh.rank == 1}"))


@world(2, ep=2)
def test_what_cannot_be_divided_is_refused(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"'0': num_experts\(3\) % ep\(2\) = 1: choose a number"):
        shard(nn.Sequential(layer_of(3)), mesh)
    with pytest.raises(ValueError, match=r"an instep.expert.MoE in it, got a Linear without"):
        shard(nn.Linear(2, 2), mesh)
    layer = shard(layer_of(4), mesh)
    with pytest.raises(RuntimeError, match=r"'up' is this rank's part: .* instep.full_state_dict\(model\)"):
        layer.state_dict()
    copied = MoE.__new__(MoE)
    copied.__dict__.update(layer.__getstate__())
    with pytest.raises(ValueError, match=r"has 2 of its 4 experts .* copy the model before"):
        copied(numbers(4, 13, key="x"))
