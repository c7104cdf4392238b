"""What benchmarks/gpu does not run on a card: rounded nodes, threads, phases, norms, optimizers of slices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.launch.launch import launch
from instep.mesh import deterministic
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.reduce.norm import block_square_sums
from instep.run.step import SpanPhases
from instep.state.hash import tensor_digest
from tests.state_oracle import state_entries, state_sha256

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CARD = "cuda:0"
NUM_LEAVES, STEPS = 4, 3
ROUNDED = ("bfloat16", "int8")


def inputs(leaf: int, width: int) -> Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(leaf))


def trained(nodes: str, mesh: Any) -> str:
    """The hash of the state after some declared steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 96)).to(mesh.device)
    model = instep.DataParallel(net, mesh, bucket_cap_mb=0.05, nodes=nodes, rounding="stochastic")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    for _ in range(STEPS):
        for leaf in model.micro_batches(NUM_LEAVES):
            model(inputs(leaf.index, 96).to(mesh.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    return state_sha256(state_entries(net, optimizer), STEPS)


def write_hashes(device: str, path: str) -> None:
    if device != "cpu":
        deterministic.enable()
    mesh = instep.init(device=device, backend="gloo", timeout_s=20)
    found = [trained(nodes, mesh) for nodes in ROUNDED]
    if mesh.rank == 0:
        Path(path).write_text(json.dumps(found))
    mesh.close()


def test_rounded_nodes_on_one_card_have_the_bits_of_one_rank(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 3):
        launch(write_hashes, (CARD, str(tmp_path / "hashes")), ranks=ranks)
        found.append(json.loads((tmp_path / "hashes").read_text()))
    assert found[0] == found[1]
    assert len(set(found[0])) == len(ROUNDED)


def write_muon(device: str, stage: int, path: str) -> None:
    """The hash of weights that Muon and AdamW have trained."""
    if device != "cpu":
        deterministic.enable()
    mesh = instep.init(device=device, backend="gloo", timeout_s=20)
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(96, 203), nn.GELU(), nn.Linear(203, 96)).to(mesh.device)
    model = instep.fully_shard(net, mesh, stage) if stage > 1 else instep.DataParallel(net, mesh)
    matrices, vectors = ([p for p in net.parameters() if (p.ndim == 2) is of] for of in (True, False))
    muon = instep.ShardedOptimizer(matrices, torch.optim.Muon, mesh) if stage else torch.optim.Muon(matrices)
    adamw = torch.optim.AdamW(vectors, lr=1e-3, fused=True)
    for _ in range(STEPS):
        for leaf in model.micro_batches(NUM_LEAVES):
            model(inputs(leaf.index, 96).to(mesh.device)).square().mean().backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat([x.flatten() for x in instep.full_state_dict(model).values()])
    if mesh.rank == 0:
        Path(path).write_text(tensor_digest(weights).hex())


def test_muon_on_one_card_has_the_bits_of_one_rank_in_every_stage(tmp_path: Path) -> None:
    found = set()
    for stage, ranks in ((0, 1), (1, 2), (2, 3), (3, 2)):
        launch(write_muon, (CARD, stage, str(tmp_path / "hash")), ranks=ranks)
        found.add((tmp_path / "hash").read_text())
    assert len(found) == 1


def test_a_backward_on_a_card_is_a_phase_of_the_thread_that_waits_for_it() -> None:
    """Autograd executes it in a thread of its own."""
    told: list[str] = []
    model = instep.DataParallel(next(nets()), init_sync=False)
    phases = SpanPhases(told.append)
    phases.follow(model.recorder)
    phases.begin()
    model(torch.randn(6, 8, device=CARD)).square().sum().backward()
    assert told[:4] == ["script", "forward", "script", "backward"]
    assert told[-1] == "script"
    model.close()


def nets() -> Iterator[nn.Module]:
    for _ in range(2):
        torch.manual_seed(0)
        yield nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(CARD)


def test_a_batch_that_is_split_over_threads_has_a_backward_on_a_card() -> None:
    ours, theirs = nets()
    x = torch.randn(6, 8, device=CARD)
    replicas = instep.ThreadedReplicas(ours, 2)
    replicas(x).square().sum().backward()
    theirs(x).square().sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore:a declared step on a GPU")
def test_threads_on_a_card_have_the_bits_of_one_rank() -> None:
    found, (ours, theirs) = [], nets()
    for model in (instep.ThreadedReplicas(ours, 2), instep.DataParallel(theirs, init_sync=False)):

        def one(net: nn.Module, micro_batch: Any) -> None:
            net(inputs(micro_batch.index, 8).to(CARD)).square().mean().backward()

        if isinstance(model, instep.ThreadedReplicas):
            model.micro_batches(NUM_LEAVES, one)
        else:
            for micro_batch in model.micro_batches(NUM_LEAVES):
                one(model, micro_batch)
            model.close()
        found.append([p.grad.clone() for p in model.module.parameters() if p.grad is not None])
    assert all(map(torch.equal, *found))


def test_the_squares_of_a_block_do_not_depend_on_how_many_blocks_there_are() -> None:
    x = torch.randn(70 * BLOCK_ELEMENTS + 5, device=CARD)
    whole = block_square_sums(x)
    for blocks in (1, 2, 33):
        parts = [block_square_sums(part) for part in x.split(blocks * BLOCK_ELEMENTS)]
        assert torch.equal(torch.cat(parts), whole)
    torch.testing.assert_close(whole.cpu(), block_square_sums(x.cpu()), rtol=1e-13, atol=0)


@pytest.mark.parametrize("way", ["fused", "foreach", "for loop"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_slices_of_a_parameter_are_stepped_to_the_bits_of_the_whole(kind: Any, way: str) -> None:
    """An odd length: kernels take another path at its end, and where a slice is shorter than a vector."""
    if (kind, way) == (torch.optim.RMSprop, "fused"):
        pytest.skip("there is none")
    options = {"lr": 1e-2, "foreach": way == "foreach"}
    options |= {} if kind is torch.optim.RMSprop else {"fused": way == "fused"}
    options |= {} if kind is torch.optim.AdamW else {"momentum": 0.9}
    start = torch.randn(3 * BLOCK_ELEMENTS + 1003, device=CARD)
    whole = [nn.Parameter(start.clone())]
    slices = [x.clone().requires_grad_() for x in start.split(BLOCK_ELEMENTS)]
    optimizers = [kind(whole, **options), kind(slices, **options)]
    for step in range(3):
        gradient = torch.randn(start.shape, generator=torch.Generator().manual_seed(step)).to(CARD)
        whole[0].grad = gradient
        for x, part in zip(slices, gradient.split(BLOCK_ELEMENTS), strict=True):
            x.grad = part
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat(slices), whole[0])
