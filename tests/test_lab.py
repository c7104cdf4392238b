"""The lab's hosts: a link of a rate, ranks that train over it, and nothing left behind."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import instep
from instep.bench.hosts import INTERFACE
from instep.reduce.hierarchical_transport import HierarchicalTransport
from tests.lab import on_each, two_hosts
from tests.state_oracle import state_entries, state_sha256

PATIENCE_S = 60
G = 4


def train_much() -> dict[str, object]:
    """``train`` with gradients of megabytes, beside which what else is sent is little."""
    return train(width=4096)


def train(width: int = 128) -> dict[str, object]:
    """One declared step in whatever world this process is in: the hash, and the bytes sent meanwhile."""
    mesh = instep.init(timeout_s=PATIENCE_S)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 16))
    model = instep.DataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(G, 8, 64)
    before = sent_bytes()
    for leaf in model.micro_batches(G):
        model(x[leaf.index]).square().mean().backward()
    optimizer.step()
    model.group.barrier("the count of what is sent")
    sent, by_host = (
        sent_bytes() - before,
        isinstance(model._reducer.exchange.transport, HierarchicalTransport),
    )
    mesh.close()
    return {"sha256": state_sha256(state_entries(module, optimizer), 1), "sent": sent, "by_host": by_host}


def sent_bytes() -> int:
    """What has left this host through its link."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.split(":")[0].strip() == INTERFACE)


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_two_ranks_on_two_hosts_give_the_bits_of_one():
    with two_hosts() as lab:
        reports = on_each(lab, train)
    assert [report["sha256"] for report in reports] == [train()["sha256"]] * 2
    gradients = 4 * (64 * 128 + 128 + 128 * 16 + 16)
    assert all(gradients < report["sent"] < 2 * gradients for report in reports)


def test_two_ranks_on_each_of_two_hosts_send_as_much_between_them_as_one_on_each():
    """And give the bits of one; over the link goes what a host sends, gradients and all else of a step.

    Where ranks of a host did not share, it would be half as much again, or twice as much. A tenth more is
    what a busy machine makes TCP send again.
    """
    with two_hosts() as lab:
        alone = on_each(lab, train_much)
        shared = on_each(lab, train_much, per_host=2)
    assert {report["sha256"] for report in alone + shared} == {train_much()["sha256"]}
    assert [report["by_host"] for report in shared] == [True] * 4
    ratios = [both["sent"] / one["sent"] for both, one in zip(shared[::2], alone, strict=True)]
    assert all(0.9 < ratio < 1.3 for ratio in ratios), ratios


def test_hosts_and_their_processes_go_with_a_block_that_fails():
    began = []

    def fail_between_two_hosts():
        with two_hosts() as (a, _):
            began.append((a.name, a.popen(["cat"], stdin=subprocess.PIPE)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_between_two_hosts()
    [(name, process)] = began
    process.stdin.close()
    assert process.returncode != 0
    assert name not in namespaces()


def test_hosts_of_a_process_that_was_killed_go_with_the_next_ones():
    with two_hosts():
        pass
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = f"instep-{gone.pid}-0-switch"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with two_hosts():
        assert left not in namespaces()
