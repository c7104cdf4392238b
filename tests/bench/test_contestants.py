"""Who takes part in a comparison of steps: alike in what they compute, apart in what they hold."""

from dataclasses import asdict, replace

import pytest
import torch

from instep.bench.contestants import (
    ALONE,
    DDP,
    HOST,
    LATENCY,
    LINK,
    NONE,
    SHARDED,
    WIRE,
    Contestant,
    Stage,
    choose,
)
from instep.bench.ranks import World
from instep.bench.rounds import perform
from instep.bench.settings import SETTINGS, Setting, setting, shape
from instep.models.config import num_parameters
from instep.shm.futex import available
from tests.world import world

TINY = Setting("tiny", 200_000, batch=2, what="tiny", tokens=8)


class OneRank:
    rank, size = 0, 1


@pytest.fixture
def stage():
    return Stage(OneRank(), TINY)


def test_copies_of_the_model_share_their_memory_and_nothing_else(stage):
    one, other = stage.copy(), stage.copy()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert p is not q
        assert p.data_ptr() == q.data_ptr()


def test_tied_weights_stay_tied_in_a_copy(stage):
    model = stage.copy()
    assert model.head.out.weight is model.embedding.tokens.weight


@pytest.mark.parametrize("one", [NONE, Contestant("threads")], ids=lambda one: one.name)
def test_a_step_changes_no_weight(stage, one):
    before = [p.detach().clone() for p in stage.module.parameters()]
    one.play(stage).step()
    assert all(map(torch.equal, before, stage.module.parameters()))


@world(2, by="process")
def test_who_shards_computes_what_the_others_compute_and_changes_no_weight(mesh):
    """The same loss step after step, of weights that are stepped with a rate of zero."""
    stepped = replace(TINY, optimizer="adamw")
    world_ = World()
    players = {one.name: one.play(Stage(world_, stepped)) for one in (NONE, *SHARDED) if available()}
    losses = {name: [_loss(player) for _ in range(2)] for name, player in players.items()}
    assert len({loss for both in losses.values() for loss in both}) <= 1


def _loss(player):
    player.step()
    with torch.no_grad():
        return player.stage.loss(player.model, player.batch).item()


def test_who_shards_takes_part_only_if_it_is_asked_for():
    assert choose(HOST, [], SHARDED) == list(HOST)
    assert set(choose(HOST, ["sharded"], SHARDED)) == {NONE, ALONE, DDP, *SHARDED}
    assert set(choose(HOST, ["stage3"], SHARDED)) - {NONE, ALONE, DDP} == {
        Contestant("stage3", "gloo"),
        Contestant("stage3", "shm"),
    }


@world(2, by="process")
def test_every_contestant_steps_and_no_weight_differs_from_before(mesh):
    told = {"setting": asdict(TINY), "contestants": [asdict(one) for one in {*HOST, *LINK}], "samples": 1}
    told["contestants"].sort(key=lambda fields: str(fields))
    found = perform(World(), told)
    without_shm = set() if available() else {one.name for one in HOST if one.backend == "shm"}
    assert set(found) == {one.name for one in {*HOST, *LINK}} - without_shm
    for measured in found.values():
        assert {len(values) for values in measured.values()} == {1}
    for name in ("naive-gloo", "bucketed-gloo", "server-gloo"):
        assert 0 < found[name]["busy_s"][0] < found[name]["step_s"][0]


def test_what_the_others_are_held_against_always_takes_part():
    assert set(choose(HOST, ["naive"])) == {
        NONE,
        ALONE,
        DDP,
        Contestant("naive", "gloo"),
        Contestant("naive", "shm"),
    }
    assert set(choose(LINK, ["bucketed-4MB-gloo"])) == {
        NONE,
        WIRE,
        LATENCY,
        DDP,
        Contestant("bucketed", "gloo", 4),
    }


def test_nobody_has_the_name_of_another():
    for contestants in ((*HOST, *SHARDED), LINK):
        assert len({one.name for one in contestants}) == len(contestants)


def test_a_strategy_that_nobody_knows_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"strategy 'ring': expected one of DDP, .*bucketed-shm"):
        choose(HOST, ["ring"])


@pytest.mark.parametrize("params", [10**6, 8 * 10**6, 20 * 10**6, 70 * 10**6, 200 * 10**6])
def test_a_model_has_about_as_many_parameters_as_were_asked_for(params):
    assert params / 2 < num_parameters(shape(params, 128)) < params * 2


def test_a_model_that_would_be_narrower_than_a_head_is_refused():
    with pytest.raises(ValueError, match="expected at least"):
        shape(1000, 128)


def test_the_published_settings_have_seventy_million_parameters():
    for name in ("communication", "compute"):
        assert SETTINGS[name].gradient_bytes == pytest.approx(280e6, rel=0.05)
    assert setting("compute", 1_000_000).batch == SETTINGS["compute"].batch
