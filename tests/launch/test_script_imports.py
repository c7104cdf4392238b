"""What the forkserver imports of a script: what stands before any other statement, and nothing that fails."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from instep.launch.script_imports import leading_imports

SCRIPT = '''"""Trains."""
from __future__ import annotations
import json, wave
from no_such_module import nothing
from colorsys import rgb_to_hls
import os
os.environ["A"] = "1"
import sndhdr
'''


def test_the_imports_end_where_another_statement_begins():
    found = [ast.unparse(statement) for statement in leading_imports(SCRIPT.encode())]
    assert found[0] == "from __future__ import annotations"
    assert found[-1] == "import os"
    assert len(found) == 5
    assert len(leading_imports(b"import os\nimport sys")) == 2
    assert leading_imports(b"print(1)\nimport sys") == []


def preloaded(path: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import os, sys, instep.launch.script_imports;"
        "print(*[x in sys.modules for x in ('wave', 'colorsys', 'sndhdr')], 'INSTEP_PRELOAD' in os.environ)"
    )
    environ = {"INSTEP_PRELOAD": str(path), "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)


def test_what_cannot_be_imported_is_left_to_the_script(tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    ended = preloaded(path, tmp_path)
    assert (ended.stdout, ended.stderr) == ("True True False False\n", "")
    path.write_text("import wave, (")
    assert preloaded(path, tmp_path).stdout == "False False False False\n"


def test_an_import_that_starts_threads_is_warned_of(tmp_path: Path):
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    path = tmp_path / "script.py"
    path.write_text("import threaded\n")
    assert "starts threads or CUDA, and ranks that are forked afterwards may hang" in (
        preloaded(path, tmp_path).stderr
    )
