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


@pytest.mark.parametrize("context", [64, 128, 1024])
def test_a_model_has_nearly_as_many_parameters_as_were_asked_for(context):
    params = 200_000
    while params < 10**9:
        made = shape(params, context)
        assert num_parameters(made) == pytest.approx(params, rel=1 / 8), params
        assert made.layers == 10 and made.width / made.heads >= 20
        params = params * 11 // 10


@pytest.mark.parametrize(("params", "width"), [(5, 192), (20, 384), (50, 640), (70, 768)])
def test_the_sizes_of_the_benchmarks_have_heads_of_64(params, width):
    made = shape(params * 10**6, 128)
    assert (made.width, made.width / made.heads) == (width, 64)


def test_a_model_that_would_be_narrower_than_16_is_refused():
    least = num_parameters(shape(39_000, 128))
    assert shape(least, 128).width == 16
    with pytest.raises(ValueError, match=rf"expected at least {least:,} parameters, got {least - 1:,}"):
        shape(least - 1, 128)


def test_the_published_settings_have_seventy_million_parameters():
    for name in ("communication", "compute"):
        assert SETTINGS[name].gradient_bytes == pytest.approx(280e6, rel=0.05)
    assert setting("compute", 1_000_000).batch == SETTINGS["compute"].batch
