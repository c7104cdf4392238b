"""A rank of a measurement on another host: ``python -m instep.bench.remote TOLD.json FOUND.json``.

The launcher forks its ranks within one host. A rank of a host of ``hosts`` is an interpreter of its own: it
joins the world that its environment describes, as under torchrun, and writes what ``perform`` returned.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instep.bench.hosts import Network
from instep.bench.ranks import World
from instep.bench.rounds import perform
from instep.mesh.join import init


def on_hosts(network: Network, told: Mapping[str, Any]) -> list[Any]:
    """What ``perform(world, told)`` returned on each host, with one rank per host.

    Raises:
        RuntimeError: a rank failed; the others end with the network.
    """
    path = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as directory:
        folder = Path(directory)
        (folder / "told").write_text(json.dumps(told))
        ranks = {}  # pidfd -> rank, process
        try:
            for rank, (host, env) in enumerate(zip(network, network.environments(), strict=True)):
                command = [sys.executable, "-m", "instep.bench.remote", folder / "told", folder / str(rank)]
                process = host.popen(command, env={**env, "PYTHONPATH": path})
                ranks[os.pidfd_open(process.pid)] = rank, process
            while ranks:
                for ended in multiprocessing.connection.wait(list(ranks)):
                    assert isinstance(ended, int)
                    rank, process = ranks.pop(ended)
                    os.close(ended)
                    if code := process.wait():
                        raise RuntimeError(f"the rank on host {rank} ended with code {code}")
        finally:
            for pidfd in ranks:
                os.close(pidfd)
        return [json.loads((folder / str(rank)).read_text()) for rank in range(len(network.hosts))]


def main(told: str, found: str) -> None:
    """Read what to do from ``told``, write what was measured to ``found``."""
    mesh = init(backend="gloo")
    result = perform(World(), json.loads(Path(told).read_text()))
    Path(found).write_text(json.dumps(result))
    mesh.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
