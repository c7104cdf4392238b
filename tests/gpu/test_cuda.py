"""The promises of the CPU ranks, on GPUs; run with ``pytest -m gpu`` where there are some."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch

from instep.events import Recorder
from instep.launch.launch import launch
from instep.mesh import deterministic
from instep.mesh.join import init
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.net.device import marks_for
from instep.pipeline.pipeline import Pipeline
from instep.reduce.norm import clip_grad_norm_
from instep.replicate.wrapper import DataParallel
from instep.rng.keys import initialize
from instep.state.hash import SharedHash
from tests.state_oracle import state_entries, state_sha256
from tests.training_state import training_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NUM_LEAVES = 4


def train(strategy: str, steps: int = 3) -> str:
    """The state hash of a small GPT with dropout after some declared steps, on the world that is found."""
    mesh = init(timeout_s=60)
    module = GPT(GPTConfig(context=32, layers=2, width=64, heads=4, dropout=0.1))
    initialize(module, seed=1)
    module.to(mesh.device)
    model = DataParallel(module, process_group=mesh["dp"], strategy=strategy, bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(256, (steps, NUM_LEAVES, 2, 33), generator=torch.Generator().manual_seed(2))
    for step in range(steps):
        for leaf in model.micro_batches(NUM_LEAVES):
            batch = tokens[step, leaf.index].to(mesh.device)
            logits = model(batch[:, :-1].contiguous())
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    digest = state_sha256(state_entries(module, optimizer), steps)
    model.close()
    mesh.close()
    return digest


def write_digest(strategy: str, path: str) -> None:
    deterministic.enable()
    digest = train(strategy)
    with Path(path).open("a") as file:
        file.write(digest + "\n")


def test_one_gpu_gives_the_same_bits_for_every_strategy(tmp_path: Path) -> None:
    for strategy in ("naive", "flat", "overlap", "bucketed"):
        launch(write_digest, (strategy, str(tmp_path / "digests")), ranks=1)
    assert len(set((tmp_path / "digests").read_text().split())) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["naive", "flat", "overlap", "bucketed"])
def test_two_gpus_give_the_bits_of_one(strategy: str, tmp_path: Path) -> None:
    for ranks in (1, 2):
        launch(write_digest, (strategy, str(tmp_path / "digests")), ranks=ranks)
    assert len(set((tmp_path / "digests").read_text().split())) == 1


def write_digest_of_a_pipeline(pp: int, path: str) -> None:
    deterministic.enable()
    mesh = init(pp=pp, dp=1, timeout_s=60)
    module = GPT(GPTConfig(context=32, layers=2, width=64, heads=4, dropout=0.1))
    initialize(module, seed=1)
    model = Pipeline(module.to(mesh.device), mesh, micro_batches=NUM_LEAVES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (NUM_LEAVES, 2, 33), generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        losses = model.step(
            lambda logits, one: torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tokens[one.index][:, 1:].flatten().to(mesh.device)
            ),
            lambda one: tokens[one.index][:, :-1].to(mesh.device),
        )
        assert all(loss.device == mesh.device for loss in losses)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    state = training_state(model, optimizer)
    digest = SharedHash(state.group).digests(state.owned(state.hashed()), 3)[0]
    if mesh.rank == 0:
        with Path(path).open("a") as file:
            file.write(digest + "\n")
    model.close()
    mesh.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_pipeline_of_two_gpus_has_the_bits_of_one(tmp_path: Path) -> None:
    for ranks in (1, 2):
        launch(write_digest_of_a_pipeline, (ranks, str(tmp_path / "digests")), ranks=ranks)
    assert len(set((tmp_path / "digests").read_text().split())) == 1


def test_spans_of_compute_last_as_long_as_the_gpu_takes_and_follow_each_other() -> None:
    device = torch.device("cuda", 0)
    x = torch.randn(4096, 4096, device=device)
    x @ x  # the library's own beginning
    torch.cuda.synchronize()
    recorder = Recorder()
    recorder.marks = marks_for(device)
    by_hand, until = [], time.monotonic() + 2.5  # longer than a tie of the clocks is kept
    step = 0
    while time.monotonic() < until:
        recorder.begin_step(step)
        for leaf in range(4):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            with recorder.span("forward", lane="compute", leaf=leaf):
                for _ in range(10):
                    x @ x
            after.record()
            by_hand.append((step, leaf, before, after))
        if step % 3 == 0:
            torch.cuda.synchronize()  # else it is behind, with a step or two
        elif step % 3 == 2:
            by_hand[-8][3].synchronize()
        step += 1
    torch.cuda.synchronize()
    over_ns = time.monotonic_ns()
    recorder.end_step()

    issued = {(e.step, e.leaf): e for e in recorder.events if e.lane == "host" and e.name == "forward"}
    done = [event for event in recorder.events if event.lane == "compute"]
    assert [(event.step, event.leaf) for event in done] == [(step, leaf) for step, leaf, *_ in by_hand]
    # By hand the two events lie outside the recorder's, which Python records some microseconds apart.
    for event, (*_, before, after) in zip(done, by_hand, strict=True):
        by_hand_s = before.elapsed_time(after) / 1e3
        assert event.duration_s <= by_hand_s + 5e-6
        assert event.duration_s >= 0.9 * by_hand_s - 200e-6
    slack_ns = 50_000  # of a tie: within how much the host sees an event come and go
    for event, following in itertools.pairwise(done):
        assert following.start_ns >= event.end_ns - slack_ns
    for event in done:
        assert event.start_ns >= issued[event.step, event.leaf].start_ns - slack_ns
    assert done[-1].end_ns <= over_ns + slack_ns
    assert any(event.start_ns > issued[event.step, event.leaf].end_ns for event in done)
