"""The loop's steps: with one micro-batch those of a plain torch loop, and on any ranks those of one."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from instep.errors import ContractBroken
from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.ordered.hash import state_entries
from instep.ordered.keys import initialize
from instep.ordered.tree import rank_major
from instep.recipes import text_config
from instep.recipes.text import TextRecipe
from instep.recipes.text_config import Config
from instep.run.display import Display
from instep.run.folder import METRICS
from instep.run.generation import AfterSteps, Aside
from instep.run.jsonl import read_lines
from instep.run.ledger import LEDGER
from instep.run.rank_state import Made
from instep.run.writer import RunWriter, position
from instep.train.loop import global_batch
from instep.train.run_config import BatchConfig, ParallelConfig
from instep.train.trainer import Trainer
from tests.parity import assert_same_bits, world_of_one
from tests.world import world

STEPS = 3


def bits(made: Made) -> tuple[float, ...]:
    """What a step's figures have in common on all placements."""
    return made.loss, made.norm, made.rate


def config(data: Path, **changes: object) -> Config:
    """The tiny recipe without dropout, which ranks that are threads cannot draw."""
    base = text_config.tiny()
    base = replace(base, data=data, steps=STEPS, model=replace(base.model, dropout=0.0))
    return replace(base, **changes)


def test_one_micro_batch_on_one_rank_gives_the_bits_of_a_plain_loop(data):
    batch = BatchConfig(global_size=4, micro_size=4)
    plain = config(data, batch=batch, optim=replace(text_config.tiny().optim, clip=0.0, schedule="constant"))
    trainer = Trainer(TextRecipe(plain), world_of_one())

    module = GPT(GPTConfig(**asdict(plain.model)))
    initialize(module, plain.seed)
    decayed = [p for p in module.parameters() if p.ndim >= 2]
    rest = [p for p in module.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=2e-3,
        betas=(0.9, 0.95),
        fused=True,
    )
    for rate in (1e-3, 2e-3, 2e-3):  # two steps of warm-up
        windows = trainer.recipe.read(trainer.data, trainer.steps_done, 0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = module(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert trainer.step().loss == loss.item()
    assert_same_bits(state_entries(trainer.module, trainer.optimizer), state_entries(module, optimizer))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"autocast": "bf16"},
        {"optim": replace(text_config.tiny().optim, name="sgd", lr=0.1)},
        {"batch": BatchConfig(global_size=15, micro_size=3)},
    ],
    ids=["as it is", "bf16", "sgd", "five micro-batches of three"],
)
@world(3)
def test_three_ranks_make_the_steps_of_one(mesh: Mesh, data: Path, changes: dict) -> None:
    alone, together = (Trainer(TextRecipe(config(data, **changes)), m) for m in (world_of_one(), mesh))
    for _ in range(STEPS):
        one, three = alone.step(), together.step()
        assert bits(one) == bits(three)
    assert alone.evaluate() == together.evaluate()
    assert alone.state_sha256() == together.state_sha256()
    assert alone.numerical() == together.numerical()


def with_strategy(data: Path, strategy: str, **changes: object) -> Config:
    return config(data, parallel=ParallelConfig(strategy=strategy), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("clip", [0.0, 0.1])
@world(3)
def test_a_server_makes_the_steps_of_one_rank_and_holds_all_the_moments(
    mesh: Mesh, data: Path, clip: float
) -> None:
    optim = replace(text_config.tiny().optim, clip=clip)
    alone = Trainer(TextRecipe(config(data, optim=optim)), world_of_one())
    together = Trainer(TextRecipe(with_strategy(data, "server", optim=optim)), mesh)
    for _ in range(STEPS):
        one, three = alone.step(), together.step()
        assert bits(one) == bits(three)
    weights = state_entries(together.module)
    assert_same_bits(weights, state_entries(alone.module))
    assert bool(together.optimizer.state) == (mesh.rank == 0)
    if mesh.rank == 0:
        assert alone.state_sha256() == together.state_sha256()
    assert alone.evaluate() == together.evaluate()
    assert together.parallel.contract == "declared"


@pytest.mark.parametrize("changes", [{}, {"autocast": "bf16"}], ids=["as it is", "bf16"])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_make_the_steps_of_one_rank(data: Path, changes: dict, num_threads: int) -> None:
    alone = Trainer(TextRecipe(config(data, **changes)), world_of_one())
    threads = Trainer(
        TextRecipe(with_strategy(data, "threads", ranks=num_threads, **changes)), world_of_one()
    )
    for _ in range(STEPS):
        one, several = alone.step(), threads.step()
        assert bits(one) == bits(several)
    assert alone.state_sha256() == threads.state_sha256()
    assert alone.numerical() == threads.numerical()
    assert threads.parallel.num_replicas == num_threads
    threads.parallel.model.close()


@pytest.mark.parametrize("strategy", ["bucketed", "server"])
@world(2)
def test_moments_that_were_loaded_stay_where_they_are_used(mesh: Mesh, data: Path, strategy: str) -> None:
    trainer = Trainer(TextRecipe(with_strategy(data, strategy)), mesh)
    moment = torch.ones(1)
    trainer.optimizer.state[next(trainer.module.parameters())] = {"exp_avg": moment}
    trainer.state.drop_others_moments()
    assert bool(trainer.optimizer.state) == (strategy == "bucketed" or mesh.rank == 0)


@pytest.fixture
def seen() -> list[bytes]:
    """What the models of all ranks were given; ranks that are threads share it."""
    return []


@world(3)
def test_in_an_epoch_every_sample_is_seen_exactly_once(mesh: Mesh, data: Path, seen: list[bytes]) -> None:
    trainer = Trainer(TextRecipe(config(data)), mesh)
    trainer.module.register_forward_pre_hook(lambda _, given: seen.extend(map(as_bytes, given[0])))
    text = trainer.data.train
    while trainer.cursor < len(text):
        trainer.step()
    mesh.world.group.all_gather_bytes(b"", "the end of an epoch")
    times = Counter(seen)
    assert set(times) == set(map(as_bytes, text.windows(range(len(text)))[:, :-1]))
    into_the_next_epoch = trainer.cursor - len(text)
    assert sorted(times.values()) == [1] * (len(text) - into_the_next_epoch) + [2] * into_the_next_epoch


def as_bytes(row: Tensor) -> bytes:
    return bytes(row.tolist())


@world(2)
def test_ranks_with_other_texts_do_not_begin(mesh: Mesh, data: Path) -> None:
    mine = data.with_name(f"text of rank {mesh.rank}")
    mine.write_bytes(data.read_bytes() + bytes([65 + mesh.rank]))
    words = r"rank 0 says which" if mesh.rank else r'  data.sha256: "\w+" on rank 0, "\w+" on rank 1$'
    with pytest.raises(ContractBroken, match=words):
        Trainer(TextRecipe(config(mine)), mesh)


def run(path: Path, trainer: Trainer) -> list[int]:
    """Run the steps of ``trainer``; the steps that were saved."""
    saved: list[int] = []
    display = Display(1, trainer.config.steps)
    books = RunWriter(path, trainer, min(position(path), trainer.steps_done))
    books.started(0, [])
    aside = Aside(save=lambda: saved.append(trainer.steps_done))
    after = AfterSteps(trainer, books, display, aside)
    after.begin()
    while after.ending is None:
        trainer.step()
        after.follow_up()
    books.close()
    return saved


def test_saving_and_evaluating_fall_due_at_their_steps_and_at_the_last(data, tmp_path):
    base = config(data, steps=5)
    base = replace(base, checkpoint=replace(base.checkpoint, every=2), eval=replace(base.eval, every=3))
    assert run(tmp_path, Trainer(TextRecipe(base), world_of_one())) == [2, 4, 5]
    held_out = [line["step"] for line in read_lines(tmp_path / METRICS) if "held_out_loss" in line]
    assert held_out == [0, 3, 5]


def test_a_stop_is_a_last_step_with_a_checkpoint_and_the_state_s_hash(data, tmp_path):
    trainer = Trainer(TextRecipe(config(data, steps=5, stop_after=2)), world_of_one())
    assert run(tmp_path, trainer) == [2]
    assert read_lines(tmp_path / LEDGER)[-1]["state_sha256"] == trainer.state_sha256()


def test_evaluating_does_not_move_a_bit(data, tmp_path):
    often, never = config(data), config(data)
    often = replace(often, eval=replace(often.eval, every=1))
    trainers = [Trainer(TextRecipe(c), world_of_one()) for c in (often, never)]
    for i, trainer in enumerate(trainers):
        (tmp_path / str(i)).mkdir()
        run(tmp_path / str(i), trainer)
    assert trainers[0].state_sha256() == trainers[1].state_sha256()


def test_the_ledger_has_the_bits_of_every_step(data, tmp_path):
    trainer = Trainer(TextRecipe(config(data)), world_of_one())
    run(tmp_path, trainer)
    started, *steps = read_lines(tmp_path / LEDGER)
    assert (started["event"], started["step"], started["restarts"]) == ("started", 0, 0)
    assert [line["cursor"] for line in steps] == [16, 32, 48]
    metrics = [line for line in read_lines(tmp_path / METRICS) if line["step"]]
    assert [float.fromhex(line["loss"]) for line in steps] == [line["loss"] for line in metrics]
    assert [float.fromhex(line["grad_norm"]) for line in steps] == [line["norm"] for line in metrics]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (1, "global batch 32 = micro-batch 4 x accumulation 8 x 1 rank"),
        (2, "global batch 32 = micro-batch 4 x accumulation 4 x 2 ranks"),
        (3, "global batch 32 = micro-batch 4 x 8, of which 3 ranks have 3 + 3 + 2"),
        (8, "global batch 32 = micro-batch 4 x accumulation 1 x 8 ranks"),
    ],
)
def test_the_equation_of_the_batch_is_true_for_unequal_shares_too(ranks: int, said: str) -> None:
    shares = [len(own) for own in rank_major(8, ranks)]
    assert global_batch(BatchConfig(global_size=32, micro_size=4), shares) == said


def test_the_shares_of_many_ranks_are_counted() -> None:
    said = global_batch(BatchConfig(global_size=100, micro_size=1), [2] * 36 + [1] * 28, "replica thread")
    assert said == "global batch 100 = micro-batch 1 x 100, of which 64 replica threads have 2 on 36, 1 on 28"


def test_a_switch_that_chooses_other_kernels_is_part_of_the_configuration(data: Path, monkeypatch) -> None:
    trainer = Trainer(TextRecipe(config(data)), world_of_one())
    before = trainer.numerical()
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert {k for k, v in trainer.numerical().items() if v != before[k]} == {"environment.MKL_CBWR"}
