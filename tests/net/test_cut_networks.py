"""Two hosts of the lab, and a network that carries nothing any more: both ranks raise, and both end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import instep
from instep.bench.hosts import Host
from instep.errors import PeerLost
from instep.net import device
from tests.lab import two_hosts

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 3
PATIENCE_S = 60  # for a busy machine; TCP alone would take a quarter of an hour
NOWHERE = "02:00:00:00:00:99"


# What is cut off before it begins: who makes it, and by what name.
MAKERS: dict[str, tuple[Any, str]] = {
    "init's first question": (dist.TCPStore, "add"),
    "the world": (dist, "init_process_group"),
    "gloo": (device, "make_group"),
}


def rank(what: str) -> None:
    """Train, or wait for a cut: then wrap another model, or make what ``what`` is."""
    try:
        train(what)
    except PeerLost as error:
        print(str(error).splitlines()[0])


def wait_for_cut(owner: Any, name: str) -> None:
    """Wait before the first call of ``owner.name``."""
    real = getattr(owner, name)

    def late(*args: Any, **options: Any) -> Any:
        setattr(owner, name, real)
        print("ready", flush=True)
        sys.stdin.readline()
        return real(*args, **options)

    setattr(owner, name, late)


def train(what: str) -> None:
    if what in MAKERS:
        wait_for_cut(*MAKERS[what])
    instep.init(timeout_s=TIMEOUT_S)
    module = nn.Linear(4, 4)
    model = instep.DataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    print("ready", flush=True)
    if what == "wrap":
        sys.stdin.readline()
        instep.DataParallel(nn.Linear(4, 4))
    while True:
        for _ in model.micro_batches(2):
            model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def send_nowhere(host: Host, other: Host) -> None:
    """What ``host`` sends to ``other`` is lost, and nobody is told."""
    words = f"neigh replace {other.address} lladdr {NOWHERE} dev eth0 nud permanent"
    subprocess.run(["ip", "-n", host.name, *words.split()], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [(0, 1), (0,), (1,)], ids=["cut", "half open to 1", "half open to 0"])
@pytest.mark.parametrize("what", ["step", "wrap", *MAKERS])
def test_both_ranks_raise_by_the_deadline_and_end(what: str, deaf: tuple[int, ...]) -> None:
    with two_hosts() as lab:
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        ranks = [
            host.popen(
                [sys.executable, __file__, what], env={**env, "PYTHONPATH": str(ROOT)}, text=True, **pipes
            )
            for host, env in zip(lab, lab.environments(), strict=True)
        ]
        assert [each.stdout.readline() for each in ranks] == ["ready\n"] * 2
        for i in deaf:
            send_nowhere(lab.hosts[i], lab.hosts[1 - i])
        said = [each.communicate("go\n", timeout=PATIENCE_S)[0] for each in ranks]
    operation = "wrapping a model makes a group" if what == "wrap" else "waited"
    assert all(operation in text for text in said), said
    assert [each.returncode for each in ranks] == [0, 0]


if __name__ == "__main__":
    rank(sys.argv[1])
