"""Ranks of this machine that take each other for ranks of several hosts, and share memory as if they were.

Only the name of a rank's host is made up: who is told that a rank is elsewhere looks at no process of it, and
sends it messages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from instep.mesh.mesh import Mesh
from instep.net.host_group import HostGroup
from instep.net.peers import Peer
from instep.net.process_group import Group


class _Made:
    """The hosts that are made up now, and how many threads are in a block with them."""

    lock = threading.Lock()
    users = 0
    patch: Any = None


@contextmanager
def hosts(*of_rank: int) -> Iterator[None]:
    """Groups that are made in the block, in whatever thread, have rank r on host number ``of_rank[r]``.

    Ranks that are threads may all enter it, with the same hosts: the last one to leave ends it.
    """

    find_peers = Group._find_peers

    def elsewhere(group: Group, *arguments: Any) -> list[Peer]:
        found = find_peers(group, *arguments)
        return [replace(peer, host=f"host {of_rank[peer.rank]}") for peer in found]

    with _Made.lock:
        if not _Made.users:
            _Made.patch = mock.patch.object(Group, "_find_peers", elsewhere)
            _Made.patch.start()
        _Made.users += 1
    try:
        yield
    finally:
        with _Made.lock:
            _Made.users -= 1
            if not _Made.users:
                _Made.patch.stop()


def evenly(num_hosts: int, num_local: int) -> list[int]:
    """The host of each rank."""
    return [host for host in range(num_hosts) for _ in range(num_local)]


def host_group(mesh: Mesh) -> HostGroup:
    """The group of all ranks, by host; the mesh closes it."""
    group = mesh.world.duplicate(by_host=True)
    assert isinstance(group, HostGroup)
    mesh.on_close.append(group.close)
    return group
