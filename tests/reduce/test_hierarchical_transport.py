"""What is added on hosts first has the bits of one process, and crosses between them once for each host."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.errors import Desync, PeerLost
from instep.net.messages import Messages
from instep.reduce.tree import by_host, plan_sum, rank_major, roots
from tests.far import evenly, host_group, hosts
from tests.reduce.reductions import (
    NUM_ELEMENTS,
    content,
    drawn_bucket,
    filled_bucket,
    header_for,
    is_mean,
    new_exchange,
    ordered_exchange,
    reduces_like_one_process,
    run,
)
from tests.reduce.test_exchange import placements
from tests.reduce.trees import parenthesised, tree_sum
from tests.world import world


@st.composite
def placed(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """G, ranks of each host, and which rank has which leaves: anyhow, some may have none."""
    num_hosts, num_local = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_leaves, ranks = draw(st.integers(1, 24)), num_hosts * num_local
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=num_leaves, max_size=num_leaves))
    if draw(st.booleans()):
        owners.sort()
    return num_leaves, num_local, [[i for i, own in enumerate(owners) if own == r] for r in range(ranks)]


@given(placed())
@settings(deadline=None)
def test_adds_on_hosts_and_then_between_them_are_those_of_the_tree(drawn):
    num_leaves, num_local, leaves = drawn
    plan = plan_sum(tuple(map(tuple, leaves)), num_leaves)
    subtrees, across = by_host(plan, num_local)
    names = [[f"{lo}" if hi - lo == 1 else sum_of(lo, hi, num_leaves) for lo, hi in roots(own, num_leaves)]
             for own in leaves]  # fmt: skip
    values = []
    for host, of_host in enumerate(subtrees):
        mine = [name for own in names[host * num_local : (host + 1) * num_local] for name in own]
        for subtree in of_host:
            terms = [mine[member] for member in subtree.members]
            values.append(added(terms, subtree.plan.adds)[subtree.plan.root])
        its_leaves = [leaf for own in leaves[host * num_local : (host + 1) * num_local] for leaf in own]
        assert len(of_host) == len(roots(its_leaves, num_leaves)) == across.counts[host]
        assert sorted(m for subtree in of_host for m in subtree.members) == list(range(len(mine)))
    assert added(values, across.adds)[across.root] == tree_sum(
        list(map(str, range(num_leaves))), parenthesised
    )


def sum_of(lo: int, hi: int, num_leaves: int) -> str:
    """A node of the tree over ``num_leaves``; a root's leaves are themselves such a tree."""
    return tree_sum(list(map(str, range(lo, hi))), parenthesised)


def added(terms: list[str], adds: tuple[tuple[int, int], ...]) -> list[str]:
    terms = list(terms)
    for left, right in adds:
        terms[left] = parenthesised(terms[left], terms[right])
    return terms


@pytest.mark.parametrize(("num_hosts", "num_local"), [(2, 3), (3, 2)])
def test_every_placement_gives_the_bits_of_one_process(num_hosts, num_local):
    with hosts(*evenly(num_hosts, num_local)):
        world(num_hosts * num_local)(every_placement_has_the_bits_of_one_process)()


def every_placement_has_the_bits_of_one_process(mesh):
    group = host_group(mesh)
    for leaves in placements(group.size):
        assert reduces_like_one_process(ordered_exchange, group, leaves), leaves


ONE_ROOT_EACH = {
    2: [range(8), range(8, 16)],
    3: [range(8), range(8, 12), range(12, 16)],
}  # hosts of 16 leaves


@pytest.mark.parametrize(("num_hosts", "num_local"), [(2, 2), (2, 3), (3, 2)])
def test_each_byte_leaves_a_host_once_however_many_ranks_it_has(num_hosts, num_local, monkeypatch):
    """Of a bucket of S bytes 2 S (H-1)/H, and with each message of headers those of all its ranks."""
    sent = crossings(monkeypatch, num_local)
    with hosts(*evenly(num_hosts, num_local)):
        world(num_hosts * num_local)(exchanges_a_root_a_host)(sent=sent)


def crossings(monkeypatch, num_local: int) -> dict[int, list[int]]:
    """By host: the bytes of each message that leaves it from here on."""
    sent: dict[int, list[int]] = {}
    together = Messages.together

    def counted(self, sends, receives):
        for x, to in sends:
            assert to // num_local != self.rank // num_local
            sent.setdefault(self.rank // num_local, []).append(x.nbytes)
        together(self, sends, receives)

    monkeypatch.setattr(Messages, "together", counted)
    return sent


def exchanges_a_root_a_host(mesh, sent):
    group = host_group(mesh)
    num_local, others = group.num_local, group.num_hosts - 1
    leaves = [own[k::num_local] for own in ONE_ROOT_EACH[group.num_hosts] for k in range(num_local)]
    exchange = new_exchange(group)
    bucket = run(exchange, drawn_bucket(group, leaves), leaves)
    assert is_mean(bucket, 16)
    group.barrier("the test")
    headers, parts = sent[group.host][:others], sent[group.host][others:]
    assert set(headers) == {8 * num_local * exchange.header_length}
    assert len(parts) == 2 * num_local * others
    assert sum(parts) == 2 * bucket.nbytes * others // group.num_hosts


@pytest.mark.parametrize("odd", range(4))
def test_ranks_out_of_step_raise_one_error_wherever_they_are_and_reduce_nothing(odd):
    with hosts(*evenly(2, 2)):
        world(4)(raises_alike)(odd=odd)


def raises_alike(mesh, odd):
    group = host_group(mesh)
    leaves = rank_major(4, 4)
    bucket = filled_bucket(group, {group.rank: torch.full((NUM_ELEMENTS,), 1.0 + group.rank)}, 4)
    before = bucket.home.clone()
    exchange = new_exchange(group)
    header = header_for(bucket, leaves, 1)
    with pytest.raises(Desync, match=f"rank {odd} is at optimizer step 5"):
        exchange.run(bucket, header._replace(step=5) if mesh.rank == odd else header)
    if mesh.rank == odd:
        exchange.announce_leave(header, "leaving a step")
    else:
        with pytest.raises(Desync, match=f"rank {odd} left step 4"):
            exchange.run(bucket, header)
    assert bucket.home.tolist() == before.tolist()
    assert exchange.rendezvous(header, [mesh.rank], "the test") == [[rank] for rank in range(4)]
    exchange.run(bucket, header)
    assert set(content(bucket).tolist()) == {2.5}


@pytest.mark.parametrize("absent", range(4))
def test_a_rank_that_never_comes_is_named_on_every_host(absent):
    with hosts(*evenly(2, 2)):
        world(4, timeout_s=2)(names_the_absent)(absent=absent, ended=threading.Barrier(4))


def names_the_absent(mesh, absent, ended):
    group = host_group(mesh)
    leaves = rank_major(4, 4)
    bucket = filled_bucket(group, {group.rank: torch.ones(NUM_ELEMENTS)}, 4)
    exchange = new_exchange(group)
    if mesh.rank != absent:
        with pytest.raises(PeerLost) as lost:
            exchange.run(bucket, header_for(bucket, leaves, 1))
        assert lost.value.ranks == (absent,), lost.value
    ended.wait(30)
