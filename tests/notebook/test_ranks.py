"""Ranks that execute cells: their output, their errors, interrupts, and their ends."""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import select
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from instep.launch.process_state import look
from instep.notebook import ranks as ranks_module
from instep.notebook.ranks import CellFailed, Ranks

# One step of training, with different data on each rank.
STEP = """
import torch, instep
import torch.distributed as dist
torch.manual_seed(rank)
model = instep.DataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
step()
"""


class Shown:
    """What was shown; ``SIGINT`` is sent to this process when a line has a text."""

    def __init__(self) -> None:
        self.text = ""
        self.interrupt_at = ""

    def __call__(self, stream: str, text: str) -> None:
        self.text += text
        if self.interrupt_at and self.interrupt_at in text:
            self.interrupt_at = ""
            signal.raise_signal(signal.SIGINT)


def wait_for_the_end(pid):
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([pidfd], [], [], 10)[0]
    os.close(pidfd)


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setattr(ranks_module, "GRACE_S", 0.5)
    monkeypatch.setattr(ranks_module, "KILL_S", 5.0)
    return Shown()


@pytest.fixture
def two(shown):
    with Ranks(2, write=shown) as ranks:
        yield ranks


def test_a_cell_is_executed_on_all_ranks_or_on_some(two, shown):
    assert two.run("x = rank + 1\nx, world_size, str(device)") == {0: "(1, 2, 'cpu')", 1: "(2, 2, 'cpu')"}
    assert two.run("x = 5;\nx;", [1]) == {1: ""}
    assert two.run("print('alike')\nprint('mine is', x)\nmesh.size") == {0: "2", 1: "2"}
    assert "[0-1] alike\n" in shown.text
    assert "[0] mine is 1\n" in shown.text
    assert "[1] mine is 5\n" in shown.text


def test_output_of_native_code_and_much_output_are_shown(two, shown):
    two.run("import os\nos.write(2, b'native\\n')\nfor i in range(50_000): print(i)")
    assert "[0-1] native\n" in shown.text
    assert shown.text.count("[0-1]") >= 50_000


def test_what_a_cell_defines_has_a_source_and_can_be_found_by_name(two):
    two.run("class Net:\n    def forward(self): return 3")
    assert two.run("import sys\nsys.modules['__main__'].Net is Net")[0] == "True"
    assert "return 3" in two.run("import inspect\ninspect.getsource(Net.forward)")[1]


def test_a_rank_that_raises_is_named_and_ranks_that_wait_for_it_are_interrupted(two, shown):
    two.run(STEP)
    with pytest.raises(CellFailed) as failed:
        two.run("if rank == 1:\n    raise ValueError('boom')\ndist.barrier()", name="cell 7")
    assert "rank 0: interrupted in cell 7, line 3" in str(failed.value)
    assert "rank 1: ValueError: boom (cell 7, line 2)" in str(failed.value)
    assert "[1] ValueError: boom\n" in shown.text
    assert "ranks.py" not in shown.text
    two.run("step()")
    assert "the same bits on ranks 0-1" in two.compare("model")


WAITS = {
    "in Python": "while True: pass",
    "in a sleep": "from time import sleep\nsleep(1000)",
    "in a collective": "dist.barrier() if rank else None\nwhile True: pass",
    "in a receive": "dist.recv(torch.ones(1), 1 - rank)",
}


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_interrupt_ends_a_cell_on_all_ranks_and_leaves_them_usable(backend, shown):
    with Ranks(2, backend=backend, write=shown) as ranks:
        ranks.run(STEP)
        pids = ranks.pids
        for where, source in WAITS.items():
            shown.interrupt_at = "now"
            with pytest.raises(CellFailed, match="interrupted in"):
                ranks.run(f"print('now', flush=True)\n{source}")
            assert ranks.pids == pids, where
            ranks.run("step()")
            assert "the same bits" in ranks.compare("model"), where


def test_replicas_that_an_interrupt_has_left_in_different_steps_are_named(two, shown):
    two.run(STEP)
    shown.interrupt_at = "now"
    two.run("with torch.no_grad(): model.module.weight.add_(rank)")
    with pytest.raises(CellFailed):
        two.run("print('now')\nwhile True: pass")
    assert "model differs between rank 0 | rank 1" in shown.text


SHARDED = """
import torch, instep
from torch import nn
full = nn.Linear(3, 2)
instep.fully_shard(full)
plain = torch.optim.AdamW(full.parameters())
model = instep.DataParallel(nn.Linear(3, 2))
sharded = instep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 3) * (rank + 1)).sum().backward()
    optimizer.step()
step(full, plain)
step(model, sharded)
"""


def test_sharded_models_and_optimizers_are_named_as_lost_after_an_interrupt(two, shown):
    two.run(SHARDED)
    with pytest.raises(CellFailed, match=r"take instep\.full_state_dict\(model\), on all"):
        two.compare("full")
    assert "the same bits on ranks 0-1, 2 tensors" in two.compare("instep.full_state_dict(full)")
    shown.interrupt_at = "now"
    with pytest.raises(CellFailed):
        two.run("print('now')\nwhile True: step(full, plain)")
    assert "full, plain, sharded: made for ranks that are gone: run the cells again that make" in shown.text
    assert "differs" not in shown.text
    with pytest.raises(CellFailed, match="this ShardedOptimizer is closed: make another one"):
        two.run("step(model, sharded)")
    two.run("sharded = instep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)")
    two.run("step(model, sharded)")
    assert "the same bits on ranks 0-1" in two.compare("model")
    two.run(SHARDED)


def test_a_rank_that_does_not_follow_an_interrupt_is_replaced(two, shown, monkeypatch):
    monkeypatch.setattr(ranks_module, "KILL_S", 0.5)
    shown.interrupt_at = "now"
    deaf = "import signal\nif rank: signal.signal(signal.SIGINT, signal.SIG_IGN)"
    with pytest.raises(CellFailed, match=r"rank 1 .*SIGKILL, by the notebook"):
        two.run(f"x = 1\n{deaf}\nprint('now')\nwhile True: pass")
    assert two.run("'x' in globals()") == {0: "True", 1: "False"}


def test_a_rank_that_dies_is_named_and_replaced(two, shown):
    two.run(f"x = 1\n{STEP}")
    old = two.pids
    with pytest.raises(CellFailed, match=rf"rank 1 \(pid {old[1]}\) was killed by SIGKILL"):
        two.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert f"rank 1 is a new process (pid {two.pids[1]}) with an empty namespace" in shown.text
    assert "model: made for ranks that are gone" in shown.text
    assert two.run("'x' in globals()") == {0: "True", 1: "False"}
    two.run(STEP)


def test_a_rank_that_has_died_between_two_cells_is_replaced(two):
    os.kill(two.pids[0], signal.SIGKILL)
    assert multiprocessing.connection.wait([*two._children.running], 10)
    with pytest.raises(CellFailed, match=r"rank 0 .* was killed by SIGKILL.*The cell was not executed"):
        two.run("1")
    assert two.run("rank") == {0: "0", 1: "1"}


def test_no_process_is_left_after_a_shutdown(two):
    pids = two.pids
    two.run("import subprocess\nchild = subprocess.Popen(['sleep', '1000'])")
    children = [int(two.pull("child.pid", rank)) for rank in (0, 1)]
    two.shutdown()
    assert [look(pid) for pid in pids] == [None, None]
    for child in children:
        wait_for_the_end(child)
    with pytest.raises(RuntimeError, match="were shut down"):
        two.run("1")


KNOCK = """
import json, os, socket, sys
os.setgid(65534)
os.setuid(65534)
for name in json.loads(sys.argv[1]):
    kind = socket.SOCK_SEQPACKET if name.startswith("\\0") else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as knock:
        try:
            knock.connect(name)
            print("answer" if knock.recv(1) else "closed")
        except OSError as error:
            print(type(error).__name__)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_answer_from_a_rank_or_from_what_starts_ranks(two):
    """The only sockets with a name: of the forkserver, and the debug server of each rank."""
    two.run("import torch.distributed as dist\ndist.barrier()")
    started = [forkserver._forkserver._forkserver_pid, *two.pids]
    names, listening = sockets_of(started)  # this process may have others, of other tests
    assert not listening  # to TCP
    assert sorted(name[:8] for name in names if name[0] != "/") == ["\0instep/"] * 2
    answers = subprocess.run(
        [sys.executable, "-c", KNOCK, json.dumps(names)], capture_output=True, text=True, check=True
    ).stdout.split()
    expected = ["PermissionError" if name[0] == "/" else "ConnectionResetError" for name in names]
    assert [answer.replace("closed", "ConnectionResetError") for answer in answers] == expected


def sockets_of(pids):
    """Names of the Unix sockets of ``pids``, and the TCP ports at which they listen."""
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    own = {os.readlink(link)[8:-1] for link in links if os.readlink(link).startswith("socket:[")}
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    tcp = [x.split() for kind in ("tcp", "tcp6") for x in Path(f"/proc/net/{kind}").read_text().splitlines()]
    names = {line[7].replace("@", "\0") for line in unix if len(line) > 7 and line[6] in own}
    return sorted(names), [line[1] for line in tcp if line[9] in own and line[3] == "0A"]


def test_values_are_compared_pulled_and_pushed(two):
    two.push("x", {"w": torch.arange(6.0).view(2, 3), "n": [1, (2, float("inf"))], "none": torch.empty(0)})
    two.run("if rank == 1: x['w'][1, 2] += 1e-3", [1])
    told = two.compare("x")
    assert "1 of 3 differ" in told
    assert "w: rank 0 | rank 1" in told
    assert "1 of 6 elements differ, first at [1, 2] (5.0 against 5.000" in told
    assert "the same bits on ranks 0-1, 1 tensor" in two.compare("x['w'][0]")
    pulled = two.pull("x", 1)
    assert pulled["n"] == [1, (2, float("inf"))]
    assert pulled["w"][1, 2] > 5
    assert pulled["none"].shape == (0,)
    with pytest.raises(CellFailed, match="expected a tensor, a module"):
        two.pull("mesh")
    with pytest.raises(ValueError, match="expected a tensor, a module"):
        two.push("f", print)


def test_the_status_says_where_each_rank_is(two):
    two.run(STEP)
    two.sync()
    table = two.status()
    assert f"{two.pids[1]}" in table
    assert "sync: done" in table
    assert "barrier" in table


def test_what_cannot_start_is_refused_in_words(shown):
    with pytest.raises(ValueError, match="at least 1 rank"):
        Ranks(0)
    with pytest.raises(CellFailed, match=r"the ranks did not join: ranks 0-1: .*cuda"):
        Ranks(2, device="cuda", write=shown)
