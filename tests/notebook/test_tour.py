"""The notebooks of the tour run from top to bottom."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("ipykernel", reason="the extra 'notebook' is not installed")

TOUR = Path(__file__).parents[2] / "examples" / "tour"
NOTEBOOKS = sorted(TOUR.glob("*.ipynb"))


@pytest.fixture(scope="module")
def execute():
    spec = importlib.util.spec_from_file_location("execute", TOUR / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.execute


@pytest.mark.timeout(300)  # 10 to 20 s each on two cores that do nothing else
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_runs_from_top_to_bottom(execute, path, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    execute(path, write=False)


@pytest.mark.filterwarnings("ignore")
def test_a_cell_that_raises_ends_the_notebook_unless_it_is_tagged(execute, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    path = tmp_path / "raises.ipynb"
    tagged = {"cell_type": "code", "metadata": {"tags": ["raises-exception"]}, "source": ["1 / 0"]}
    path.write_text(json.dumps({"cells": [tagged, tagged | {"metadata": {}}]}))
    with pytest.raises(RuntimeError, match="cell 2"):
        execute(path, write=False)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_shows_its_output_names_its_source_and_ends_with_exercises(path):
    notebook = json.loads(path.read_text())
    text = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    assert "It follows section" in text
    assert text.rpartition("## ")[2].startswith("Exercises\n\n1. ")
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "/site-packages/" not in path.read_text()
