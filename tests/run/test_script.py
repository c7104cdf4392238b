"""A script as the work of a process: how it is run, and what of it the bits of a run depend on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from instep.run.script import ScriptCall, execute, script_fields, script_path


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One that imports a module beside it, in a process that is restored."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    path = tmp_path / "train.py"
    path.write_text("import sys\nfrom mine_beside import value\nfound = value, sys.argv[1:], __name__\n")
    (tmp_path / "mine_beside.py").write_text("value = 1\n")
    yield path
    sys.modules.pop("mine_beside", None)


def fields_of(script: Path, *arguments: str) -> dict[str, object]:
    """Of the script as it is now, freshly run."""
    sys.modules.pop("mine_beside", None)
    execute(ScriptCall(script, arguments))
    return script_fields(script)


def test_a_script_is_run_as_python_would(script: Path) -> None:
    execute(ScriptCall(script, ("--lr", "1e-3")))
    main = sys.modules["__main__"]
    assert main.found == (1, ["--lr", "1e-3"], "__main__")
    assert script_path() == script
    assert sys.path[0] == str(script.parent)


def test_code_and_modules_beside_are_in_the_contract(script: Path) -> None:
    before = fields_of(script)
    assert set(before) == {"script.code", "script.code.mine_beside"}
    (script.parent / "mine_beside.py").write_text("value = 22\n")
    beside = fields_of(script)
    assert {name for name in before if before[name] != beside[name]} == {"script.code.mine_beside"}
    script.write_text(script.read_text() + "more = 1\n")
    code = fields_of(script)
    assert {name for name in before if code[name] != beside[name]} == {"script.code"}


def test_modules_from_elsewhere_are_not(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fields_of(script)
    environment = script.parent / "env" / "lib" / "site-packages" / "theirs.py"
    for place in (
        environment,
        script.parent.with_name("elsewhere") / "other.py",
        script.parent / "native.so",
    ):
        module = ModuleType(place.stem)
        module.__file__ = str(place)
        monkeypatch.setitem(sys.modules, place.stem, module)
    assert script_fields(script) == before


def test_without_a_file_there_is_no_code(script: Path) -> None:
    """In a notebook, and at a prompt."""
    assert script_path() is None
    assert script_fields(None) == {}


def test_a_function_is_called_in_the_place_of_running_the_file(script: Path) -> None:
    found: list[int] = []
    execute(ScriptCall(script, main=found.append, config=3))
    assert found == [3]
    assert script_path() is None  # nothing of this process has become the script
