"""Two hosts for a test, out of network namespaces, where the machine allows it.

with two_hosts(rate="1gbit") as network:
    ranks = [host.popen([...], env=env) for host, env in zip(network, network.environments())]
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from instep.bench.hosts import Network, network, obstacle
from instep.launch.launch import launch

CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
why_not = cache(obstacle)


@contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[Network]:
    """Two hosts and a link of ``rate``; skips the test, with the reason, where there cannot be any."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with network(2, rate=rate) as made:
        yield made


def on_each(lab: Network, target: Callable[[], object], per_host: int = 1) -> list[Any]:
    """What ``target`` returns on each rank of each host, by way of JSON; ranks are forks that hold torch."""
    names = [host.name for host in lab for _ in range(per_host)]
    with tempfile.TemporaryDirectory() as folder:
        launch(_on_host, (names, lab.environments(per_host), target, folder), ranks=len(names))
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(len(names))]


def _on_host(
    names: Sequence[str], environments: Sequence[dict[str, str]], target: Callable[[], object], folder: str
) -> None:
    at = int(os.environ["RANK"])
    enter(names[at])
    del os.environ["INSTEP_STORE"]  # a file of this machine, which two hosts would not have
    os.environ.update(environments[at])
    Path(folder, str(at)).write_text(json.dumps(target()))


def enter(host: str) -> None:
    """Be on a host from here on, as by ``ip netns exec``, and see its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"cannot enter {host}")
    socket.sethostname(host)
