"""The magics in an IPython shell in this process."""

from __future__ import annotations

import pytest

pytest.importorskip("IPython", reason="the extra 'notebook' is not installed")
from IPython.core.interactiveshell import InteractiveShell

from instep.launch.process_state import look


class Notebook:
    """A shell that executes cells as a kernel does; ``say`` is what the last cell has shown."""

    def __init__(self, capsys) -> None:
        self.shell = InteractiveShell()
        self._capsys = capsys
        self.said = ""

    def __call__(self, cell: str) -> str:
        result = self.shell.run_cell(cell, store_history=True)
        out, err = self._capsys.readouterr()
        self.said = out + err
        self.error = result.error_in_exec
        return self.said


@pytest.fixture
def notebook(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    made = Notebook(capsys)
    made("%load_ext instep")
    made("%dist_init -n 2")
    yield made
    if made.magics.ranks is not None:
        made("%dist_shutdown")
    made.shell.history_manager.end_session()


Notebook.magics = property(lambda self: self.shell.magics_manager.registry["RankMagics"])


def test_cells_go_to_all_ranks_some_ranks_or_the_kernel(notebook):
    assert "2 ranks (pids" in notebook.said
    assert notebook("x = rank * 2\nx") == "[0] 0\n[1] 2\n"
    assert notebook("%%rank [1]\nx + 1") == "[1] 3\n"
    assert notebook("%%rank[0]\nx + 1") == "[0] 1\n"
    assert notebook("%%rank 0-1\nworld_size") == "[0-1] 2\n"
    assert notebook("%%local\nx = 'kernel'\nprint(x)") == "kernel\n"
    assert notebook("# a comment\n\n%sync\nx") == "[0] 0\n[1] 2\n"
    assert notebook("!echo shell").strip() == "shell"
    assert "[0-1] 6" in notebook("%%time\nsum([1, 2, 3])")


def test_the_rest_of_a_cell_runs_where_its_magics_leave_it(notebook):
    assert "kernel" in notebook("%dist_shutdown\nprint('kernel')")
    assert notebook.error is None
    assert "[0-2] 3" in notebook("%dist_init -n 3\nworld_size")


def test_a_cell_that_an_editor_executes_unseen_stays_in_the_kernel(notebook):
    notebook.shell.run_cell("unseen = 1", store_history=False)
    assert notebook.shell.user_ns["unseen"] == 1
    assert notebook("'unseen' in globals()") == "[0-1] False\n"


def test_an_incomplete_cell_is_seen_as_incomplete(notebook):
    assert notebook.shell.check_complete("def f():\n")[0] == "incomplete"
    assert notebook.shell.check_complete("x = 1")[0] == "complete"


def test_an_error_ends_the_cell_with_the_traceback_of_the_rank(notebook):
    said = notebook("y = 1\n1 / (1 - rank)")
    assert "[1] ZeroDivisionError: division by zero\n" in said
    assert "CellFailed: rank 1: ZeroDivisionError: division by zero (cell 3, line 2)" in said
    assert type(notebook.error).__name__ == "CellFailed"
    assert notebook("y") == "[0-1] 1\n"


def test_values_are_compared_and_moved(notebook):
    notebook("import torch\nx = torch.ones(3)\nx[rank] = 2")
    assert "2 of 3 elements differ" in notebook("%compare x")
    notebook("%pull x --rank 1")
    assert notebook.shell.user_ns["x"].tolist() == [1, 2, 1]
    notebook("%push x")
    assert "the same bits on ranks 0-1" in notebook("%compare x")


def test_status_and_shutdown(notebook):
    pids = notebook.magics.ranks.pids
    table = notebook("%dist_status")
    assert all(str(pid) in table for pid in pids)
    assert "2 ranks have ended" in notebook("%dist_shutdown")
    assert [look(pid) for pid in pids] == [None, None]
    assert notebook("1 + 1").endswith(": 2\n")
    notebook("%unload_ext instep")
    assert notebook.magics.to_ranks not in notebook.shell.input_transformers_cleanup


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%dist_init -n 2", "2 ranks are running: %dist_shutdown ends them"),
        ("%%rank 2\n1", "expected ranks from 0 to 1, got '2'"),
        ("%pull x --rank 7", "expected ranks from 0 to 1, got '7'"),
        ("%attach nowhere", "%attach: nowhere does not exist"),
        ("%push nothing", "the kernel has no variable 'nothing'"),
    ],
)
def test_refusals(notebook, line, message):
    assert message in notebook(line)


def test_what_needs_ranks_says_how_to_start_some(notebook):
    notebook("%dist_shutdown")
    assert "there are no ranks: %dist_init -n 2 starts two" in notebook("%sync")
    assert "invalid int value: 'two'" in notebook("%dist_init -n two")
