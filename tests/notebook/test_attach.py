"""A look into a run of ``instep run``: while its ranks wait, after a kill, and at its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from instep.notebook.attach import attached

SCRIPT = """
import sys, torch, instep
run = instep.Run()
model = instep.DataParallel(torch.nn.Linear(3, 2), run.mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in run.steps(5, model=model, optimizer=optimizer):
    with step:
        if step == 3:
            open(sys.argv[1] + str(run.mesh.rank)).read()  # LINE
        for micro_batch in model.micro_batches(2):
            model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_ranks_steps_and_times_of_a_run_and_the_process_that_replaced_a_killed_one(tmp_path):
    script, path, gates = tmp_path / "train.py", tmp_path / "run", [tmp_path / "gate0", tmp_path / "gate1"]
    script.write_text(SCRIPT)
    for gate in gates:
        os.mkfifo(gate)
    command = [sys.executable, "-m", "instep", "run", "-n", "2", "--run-dir", path, script, tmp_path / "gate"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        opened = [os.open(gate, os.O_WRONLY) for gate in gates]  # each waits for its rank
        before = "\n".join(attached(path))
        old = ranks_in(before)
        os.kill(old[1], signal.SIGKILL)
        replace(gates, os.mkfifo, opened)
        opened = [os.open(gate, os.O_WRONLY) for gate in gates]
        after = "\n".join(attached(path))
        replace(gates, Path.touch, opened)  # a file, at which no rank waits
        assert not process.wait(), process.stderr.read().decode()
    assert before.startswith(f"run    {path}: running\nnote   the run is still going: 3 of 5 steps so far")
    line = SCRIPT[: SCRIPT.index("# LINE")].count("\n") + 1
    assert before.count(f"train.py:{line} <module>") == 2
    assert re.search(r"step   2  norm .* ms \(\d+ exposed", before)
    assert "time   " in before
    assert ranks_in(after)[0] == old[0]
    assert ranks_in(after)[1] != old[1]
    ended = "\n".join(attached(path))
    assert ended.startswith(f"run    {path}: finished\n")
    assert "state  5 steps, sha256 " in ended
    assert not ranks_in(ended)


def replace(gates, make, opened):
    """Make the gates anew, and release the ranks that wait at the old ones."""
    for gate in gates:
        gate.unlink()
        make(gate)
    for fd in opened:
        os.close(fd)


def ranks_in(text):
    """The process of each rank in the table."""
    return {int(rank): int(pid) for rank, pid in re.findall(r"^ +(\d) +(\d+)  \w", text, re.MULTILINE)}
