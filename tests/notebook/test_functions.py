"""Functions of a notebook's cells, launched on ranks; and what cannot be copied to a rank."""

from __future__ import annotations

import pytest

pytest.importorskip("IPython", reason="the extra 'notebook' is not installed")
from IPython.core.interactiveshell import InteractiveShell

CELLS = [
    "import os, torch, instep\nfrom math import sqrt\nfrom torch import nn",
    "from instep.notebook import launch",
    "WIDTH = 3\nx = torch.arange(6.0).view(2, 3)\nkernel = os.getpid()",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
    def forward(self, x):
        return self.linear(x)
net = Net()
""",
    "def root(x, times=WIDTH):\n    return sqrt(x) * times\nalias = root",
    """
@torch.no_grad()
def moved(x: 'a name that is nowhere'):
    return x + 1
def train(steps):
    model = instep.DataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(x * (rank + 1)).sum().backward()
        optimizer.step()
        print('step', step)
    return {'weight': model.module.linear.weight, 'six': alias(4), 'moved': moved(x), 'pid': os.getpid()}
""",
]


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        made = InteractiveShell()
        for cell in CELLS:
            made.run_cell(cell).raise_error()
        yield made
        made.history_manager.end_session()


def test_a_function_of_a_cell_runs_on_ranks_with_all_that_it_uses(shell, capsys):
    result = shell.run_cell("launch(train, 2, 2)")
    result.raise_error()
    one, other = result.result
    assert one["weight"].equal(other["weight"])
    assert one["moved"].equal(shell.user_ns["x"] + 1)
    assert one["six"] == 6
    assert len({one["pid"], other["pid"], shell.user_ns["kernel"]}) == 3
    assert "[0-1] step 0\n[0-1] step 1\n" in capsys.readouterr().out


def test_an_error_names_its_line_in_the_function(shell, capsys):
    failed = shell.run_cell("def bad():\n    if rank:\n        raise ValueError('boom')\nlaunch(bad)")
    assert str(failed.error_in_exec) == "rank 1: ValueError: boom (bad, line 4)"
    assert "raise ValueError('boom')" in capsys.readouterr().err


REFUSED = {
    "def f(): return net\nlaunch(f)": "net, which f uses, cannot be copied to a rank: .* got Net: make it",
    "launch(train, 2, net)": "argument 0 of train cannot be copied to a rank: .* got Net: make it inside the",
    "def f():\n    k = 2\n    def g(): return k\n    launch(g)\nf()": "g uses k of the function around it",
    "launch(lambda: 1)": "launch uses <lambda>, the source of which is not known: expected a def",
    "def f(): 1\nold = f\ndef f(): 2\ndef g(): old()\nlaunch(g)": "g uses old, which is an older f",
    "def f(): 1\nf = torch.no_grad()(f)\nlaunch(f)": "uses f, the source .* with its decorators above it",
    "launch(len)": "expected a function written with def, got builtin_function_or_method",
}


@pytest.mark.parametrize("cell", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_copied_to_a_rank_is_refused_by_name(shell, cell):
    with pytest.raises(ValueError, match=REFUSED[cell]):
        shell.run_cell(cell).raise_error()
