"""The variants that are compared: alike in what they compute, apart in what they hold."""

from dataclasses import asdict, replace

import pytest
import torch

from instep.bench import workloads
from instep.bench.steps_rank import DROPPED, measure_steps
from instep.bench.variants import (
    DECLARED_THREADS,
    DECLARED_VARIANTS,
    HOST_VARIANTS,
    LINK_VARIANTS,
    NONE,
    ONE,
    SHARDED_VARIANTS,
    THREADS,
    WORKER_VARIANTS,
    SharedModel,
    TrainingLoop,
    choose,
)
from instep.bench.workloads import MLPConfig, Workload
from instep.bench.worlds import World
from instep.shm.segment import available
from tests.world import world

TINY = Workload("tiny", 200_000, batch=2, what="tiny", tokens=8)


class OneRank:
    rank, size, device = 0, 1, torch.device("cpu")


@pytest.fixture
def shared():
    return SharedModel(OneRank(), TINY)


@pytest.mark.parametrize("one", [NONE, ONE, THREADS, DECLARED_THREADS], ids=lambda one: one.name)
def test_a_step_changes_no_weight(shared, one):
    before = [p.detach().clone() for p in shared.module.parameters()]
    one.start(shared).step()
    assert all(map(torch.equal, before, shared.module.parameters()))


@world(2, by="process")
def test_who_shards_computes_what_the_others_compute_and_changes_no_weight(mesh):
    """The same loss step after step, of weights that are stepped with a rate of zero."""
    stepped = replace(TINY, optimizer="adamw")
    world_ = World()
    runners = {
        one.name: one.start(SharedModel(world_, stepped)) for one in (NONE, *SHARDED_VARIANTS) if available()
    }
    losses = {name: [_loss(runner) for _ in range(2)] for name, runner in runners.items()}
    assert len({loss for both in losses.values() for loss in both}) <= 1


def _loss(runner):
    runner.step()
    with torch.no_grad():
        return runner.shared.loss(runner.model, runner.batch).item()


@world(2, by="process")
def test_every_variant_steps_and_no_weight_differs_from_before(mesh):
    task = {
        "workload": asdict(TINY),
        "variants": [asdict(one) for one in {*HOST_VARIANTS, *LINK_VARIANTS, *WORKER_VARIANTS}],
        "samples": 1,
    }
    task["variants"].sort(key=lambda fields: str(fields))
    found = measure_steps(World(), task)
    without_shm = set() if available() else {one.name for one in HOST_VARIANTS if one.backend == "shm"}
    assert (
        set(found) == {one.name for one in {*HOST_VARIANTS, *LINK_VARIANTS, *WORKER_VARIANTS}} - without_shm
    )
    for measured in found.values():
        assert {len(values) for values in measured.values()} == {1}
    for name in ("naive-gloo", "bucketed-gloo", "server-gloo"):
        assert 0 < found[name]["busy_s"][0] < found[name]["step_s"][0]


@world(2, by="process")
def test_a_declared_step_has_the_gradients_of_the_plain_loop(mesh):
    """The mean over as many micro-batches as there are ranks, of the batches that the ranks have anyway."""
    shared = SharedModel(World(), TINY)
    for one in DECLARED_VARIANTS if available() else DECLARED_VARIANTS[:2]:
        declared, plain = one.start(shared), replace(one, declared=False).start(shared)
        for loop in (declared, plain):
            loop.optimizer.zero_grad = lambda: None
            loop.step()
        pairs = zip(declared.model.parameters(), plain.model.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)


@world(2, by="process")
def test_a_turn_of_a_small_model_is_several_steps_after_one_that_is_not_timed(mesh, monkeypatch):
    monkeypatch.setitem(workloads.MLPS, "mlp-tiny", MLPConfig(layers=2, width=4))
    tiny = Workload("mlp-tiny", 0, batch=2, what="tiny", preset="mlp-tiny", steps=3)
    made = []
    monkeypatch.setattr(TrainingLoop, "_update", lambda self: made.append(self))
    task = {"workload": asdict(tiny), "variants": [asdict(NONE)], "samples": 2}
    found = measure_steps(World(), task)
    assert len(made) == (DROPPED + 2) * (3 + 1)
    assert [len(values) for values in found[NONE.name].values()] == [2] * len(found[NONE.name])


def test_a_strategy_that_nobody_knows_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"strategy 'ring': expected one of DDP, .*bucketed-shm"):
        choose(HOST_VARIANTS, ["ring"])
