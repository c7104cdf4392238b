"""The public names: they exist, they are few, they carry the public path, and importing instep is free."""

import subprocess
import sys
from types import ModuleType

import pytest

import instep

OBJECTS = [name for name in instep.__all__ if not name.startswith("__")]


def test_the_names_are_sorted_and_few():
    assert list(instep.__all__) == sorted(set(instep.__all__))
    assert len(instep.__all__) <= 21


def test_the_names_are_all_that_a_user_sees():
    assert dir(instep) == list(instep.__all__)
    with pytest.raises(AttributeError, match="module 'instep' has no attribute 'Data'"):
        instep.Data  # noqa: B018


@pytest.mark.parametrize("name", OBJECTS)
def test_every_name_can_be_imported_and_says_so(name):
    public = getattr(instep, name)
    assert public is getattr(instep, name)
    if isinstance(public, ModuleType):
        assert public.__name__ == f"instep.{name}"
    else:
        assert public.__module__ == "instep"


def test_errors_carry_the_public_path():
    for name in instep.errors.__all__:
        assert getattr(instep.errors, name).__module__ == "instep.errors"


def test_importing_instep_imports_no_torch():
    code = "import sys, instep; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
