"""Which ranks share a host: found out by all alike, and used only where every host has as many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from instep.mesh.mesh import Mesh
from instep.net import device
from instep.net.host_group import num_on_each_host
from instep.net.peers import own_peer
from tests.far import evenly, host_group, hosts
from tests.world import world


@pytest.mark.parametrize(
    ("of_rank", "expected"),
    [
        ("a", 1),
        ("aaa", 3),
        ("aabb", 2),
        ("abc", 1),
        ("aabbcc", 2),
        ("aab", None),
        ("abab", None),
        ("abba", None),
    ],
)
def test_hosts_count_where_they_have_as_many_ranks_each_with_numbers_in_a_row(of_rank, expected):
    table = [replace(own_peer(rank), host=host) for rank, host in enumerate(of_rank)]
    assert num_on_each_host(table) == expected


@pytest.mark.parametrize(("num_hosts", "num_local"), [(2, 2), (2, 3), (3, 2)])
def test_ranks_of_one_host_share_memory(num_hosts, num_local):
    with hosts(*evenly(num_hosts, num_local)):
        world(num_hosts * num_local)(shares_memory_on_its_host)(num_hosts=num_hosts, num_local=num_local)


def shares_memory_on_its_host(mesh: Mesh, num_hosts: int, num_local: int) -> None:
    group = host_group(mesh)
    assert group.near is not None and group.near.backend == "shm"
    assert (group.num_hosts, group.num_local) == (num_hosts, num_local)
    assert (group.host, group.place) == divmod(mesh.rank, num_local)
    assert group.near.ranks == tuple(range(group.host * num_local, (group.host + 1) * num_local))
    on_each = f"on {num_hosts} hosts, over shm on each and gloo between them"
    assert repr(group) == f"<group of {mesh.world_size} ranks {on_each}; this is rank {mesh.rank}>"
    mine = group.allocate(8, 64, torch.device("cpu")).elements(torch.int64).fill_(mesh.rank)
    shown = group.near.map_all([mine], "the test")
    assert shown is not None and [int(of_rank[0]) for of_rank in shown] == list(group.near.ranks)
    group.near.barrier("the test")


@pytest.mark.parametrize("of_rank", [[0, 0, 1], [0, 1, 0, 1], [0, 1, 2], [0, 0, 0]])
def test_other_ranks_send_to_all_as_ever(of_rank):
    with hosts(*of_rank):
        world(len(of_rank))(shares_nothing)()


def test_ranks_share_nothing_where_those_of_one_host_cannot(monkeypatch):
    share = device.share_memory

    def not_on_host_one(store, rank, ranks, timeout):
        return share(store, rank, ranks, timeout) if 0 in ranks else None

    monkeypatch.setattr(device, "share_memory", not_on_host_one)
    with hosts(*evenly(2, 2)):
        world(4)(shares_nothing)()


def shares_nothing(mesh: Mesh) -> None:
    group = host_group(mesh)
    assert group.near is None
    assert repr(group) == f"<group of {mesh.world_size} ranks over gloo; this is rank {mesh.rank}>"
    group.barrier("the test")
    assert group.allocate(8, 64, torch.device("cpu")).fd is None
