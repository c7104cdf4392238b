"""A real Jupyter kernel: the messages that a notebook sees, interrupts, and a restart."""

from __future__ import annotations

import os
import select

import pytest

pytest.importorskip("ipykernel", reason="the extra 'notebook' is not installed")
manager = pytest.importorskip("jupyter_client.manager")

WAIT_S = 60


class Kernel:
    """A client of a kernel: ``run`` executes a cell."""

    def __init__(self) -> None:
        self.manager = manager.KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT_S)

    def run(self, cell, *, interrupt_at=""):
        """What the cell has shown; the kernel is interrupted when that has ``interrupt_at`` in it."""
        shown: list[str] = []

        def hook(message):
            nonlocal interrupt_at
            content = message["content"]
            data = content.get("data", {})
            pieces = content.get("text", ""), *content.get("traceback", []), data.get("text/plain", "")
            shown.extend((*pieces, "PICTURE" if "image/png" in data else ""))
            if interrupt_at and any(interrupt_at in piece for piece in pieces):
                interrupt_at = ""
                self.manager.interrupt_kernel()

        self.client.execute_interactive(cell, timeout=WAIT_S, output_hook=hook)
        return "".join(shown)

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module", params=[2, 4])
def kernel(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        started = Kernel()
        started.size = request.param
        started.all = f"0-{started.size - 1}"
        started.run("%load_ext instep")
        assert f"{started.size} ranks (pids" in started.run(f"%dist_init -n {started.size}")
        started.run("import os, torch, instep\nimport torch.distributed as dist\nfrom time import sleep")
        started.run(STEP)
        yield started
        started.close()


STEP = """
model = instep.DataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad()
    model(torch.ones(4, 3) * rank).sum().backward()
    optimizer.step()
step()
"""
pytestmark = pytest.mark.filterwarnings("ignore")


def test_cells_go_to_all_ranks_to_some_or_to_the_kernel(kernel):
    last = kernel.size - 1
    assert kernel.run("world_size") == f"[{kernel.all}] {kernel.size}\n"
    for ranks, shown in (("[0]", "0"), (f"0,{last}", f"0,{last}" if last > 1 else "0-1"), ("0-1", "0-1")):
        assert kernel.run(f"%%rank {ranks}\nworld_size") == f"[{shown}] {kernel.size}\n"
    assert "UsageError: expected ranks from 0 to" in kernel.run("%%rank 7\n1")
    assert kernel.run("%%local\nhere = 3\nhere") == "3"
    kernel.run("%sync")


def test_values_are_compared_and_moved(kernel):
    kernel.run("x = torch.zeros(3)\nx[0] = rank")
    assert "1 of 3 elements differ, first at [0] (0.0 against 1.0)" in kernel.run("%compare x")
    kernel.run("%pull x --rank 1")
    kernel.run("%push x")
    assert f"x: the same bits on ranks {kernel.all}" in kernel.run("%compare x")
    assert f"model: the same bits on ranks {kernel.all}" in kernel.run("%compare model")


def test_the_status_and_a_picture_of_a_step(kernel):
    assert kernel.run("%dist_status").count("\n") == kernel.size + 1
    shown = kernel.run("%%trace model\nfor _ in range(3): step()")
    assert "PICTURE" in shown and "time   " in shown
    assert "UsageError: %attach: nowhere does not exist" in kernel.run("%attach nowhere")


def test_much_output_is_shown(kernel):
    shown = kernel.run("for i in range(10_000): print(i, 'x' * 1000)")
    assert len(shown) > 10_000_000
    assert shown.endswith(f"[{kernel.all}] 9999 {'x' * 1000}\n")


@pytest.mark.parametrize(
    "wait",
    [
        "while True: pass",
        "sleep(1000)",
        "dist.barrier() if rank else sleep(1000)",
        "while True: step()",
    ],
    ids=["compute", "sleep", "collective", "step"],
)
def test_an_interrupt_stops_the_cell_and_leaves_the_ranks(kernel, wait):
    shown = kernel.run(f"print('now', flush=True)\n{wait}", interrupt_at="now")
    assert "interrupted in cell" in shown and "is a new process" not in shown
    if "model differs" in shown:
        kernel.run(STEP)
    kernel.run("step()")
    assert "the same bits" in kernel.run("%compare model")


def test_a_rank_that_raises_and_a_rank_that_is_killed(kernel):
    shown = kernel.run("if rank == 1: raise ValueError('boom')")
    assert "[1] ValueError: boom" in shown and "CellFailed: rank 1: ValueError: boom (cell" in shown
    shown = kernel.run("if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert "was killed by SIGKILL" in shown and "rank 1 is a new process" in shown
    kernel.run(f"import os, torch, instep\nimport torch.distributed as dist\nfrom time import sleep\n{STEP}")
    assert "the same bits" in kernel.run("%compare model")


def test_a_function_is_launched_while_other_ranks_stay(kernel):
    kernel.run("%%local\nfrom instep.notebook import launch\ndef f(x): return rank + x")
    assert kernel.run(f"%%local\nlaunch(f, {kernel.size}, 2)") == str([2 + i for i in range(kernel.size)])
    assert kernel.run("world_size") == f"[{kernel.all}] {kernel.size}\n"


def test_no_process_is_left_after_a_restart(kernel):
    shown = kernel.run("%dist_status")
    pids = [int(line.split()[1]) for line in shown.splitlines()[1:]]
    pidfds = [os.pidfd_open(pid) for pid in pids]
    kernel.manager.restart_kernel(now=True)  # SIGKILL
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], WAIT_S)[0]
        os.close(pidfd)
    kernel.manager.shutdown_kernel(now=True)
