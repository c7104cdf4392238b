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
        shown = ""

        def hook(message):
            nonlocal shown, interrupt_at
            content = message["content"]
            shown += content.get("text", "") + "\n".join(content.get("traceback", []))
            shown += content.get("data", {}).get("text/plain", "")
            if interrupt_at and interrupt_at in shown:
                interrupt_at = ""
                self.manager.interrupt_kernel()

        self.client.execute_interactive(cell, timeout=WAIT_S, output_hook=hook)
        return shown

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    started = Kernel()
    yield started
    started.close()


@pytest.mark.filterwarnings("ignore")
def test_a_notebook_is_interrupted_goes_on_and_leaves_no_process_at_a_restart(kernel):
    kernel.run("%load_ext instep")
    assert "4 ranks (pids" in kernel.run("%dist_init -n 4")
    assert kernel.run("rank // 4 + world_size") == "[0-3] 4\n"
    shown = kernel.run("print('now', flush=True)\nwhile True: pass", interrupt_at="now")
    assert "CellFailed: ranks 0-3: interrupted in cell" in shown
    slept = kernel.run("from time import sleep\nprint('now')\nsleep(1000)", interrupt_at="now")
    assert "interrupted in" in slept
    assert kernel.run("import torch.distributed as dist\ndist.barrier()\nrank // 4") == "[0-3] 0\n"
    kernel.run("import os\npid = os.getpid()")
    kernel.run("%pull pid --rank 3")
    pidfd = os.pidfd_open(int(kernel.run("%%local\nprint(pid)")))
    kernel.manager.restart_kernel(now=True)  # SIGKILL
    assert select.select([pidfd], [], [], WAIT_S)[0]
    os.close(pidfd)
