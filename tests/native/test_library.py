"""A core is used only if it was compiled from the source beside it; without one Python does the same."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from instep.native import build, library
from instep.native.build import BuildFailed
from instep.reduce.node_format import BucketNodes
from instep.reduce.transport import add_up
from instep.reduce.tree import plan_sum
from instep.shm import segment
from tests.native.without import without_core

needs_compiler = pytest.mark.skipif(library.core() is None, reason="there is no compiled native core")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where a library would lie, for a process that has not looked yet."""
    monkeypatch.setattr(library, "_found", cache(library._found.__wrapped__))
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "core.so")
    return tmp_path / "core.so"


def of_other_source(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build(path)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O2"))


def without_its_source(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build(path)
    monkeypatch.setattr(build, "SOURCE", path.with_name("core.c"))


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda path, _: None, "it was not compiled"),
        (lambda path, _: path.write_bytes(b"no library"), "it cannot be loaded"),
        pytest.param(of_other_source, "it was compiled from other source", marks=needs_compiler),
        pytest.param(without_its_source, "it cannot be loaded: ", marks=needs_compiler),
    ],
)
def test_another_library_or_none_is_not_used_and_python_does_the_same(fresh, monkeypatch, prepare, reason):
    prepare(fresh, monkeypatch)
    assert library.core() is None and library.absence().startswith(reason)
    values, home = [torch.full((5,), x) for x in (1.0, 2.0)], torch.empty(5)
    add_up(values, plan_sum(((0,), (1,)), 2), 0.5, [home], BucketNodes(1, 1, torch.float32))
    assert home.tolist() == [1.5] * 5


@needs_compiler
def test_a_library_of_this_source_is_used(fresh):
    build.build(fresh)
    assert library.core() is not None and library.absence() == ""


def test_without_a_compiler_building_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildFailed, match="no C compiler"):
        build.build(tmp_path / "core.so", {})
    with pytest.raises(BuildFailed, match="nowhere"):
        build.build(tmp_path / "core.so", {"CC": "/nowhere/cc -O1"})
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(BuildFailed, match="x86_64 or aarch64, not linux on riscv64"):
        build.build(tmp_path / "core.so", {})


@needs_compiler
def test_a_compiler_that_knows_one_target_only_is_enough(tmp_path):
    """As some that have no ifunc."""
    script = tmp_path / "cc"
    script.write_text(
        '#!/bin/sh\ncase "$*" in *ONE_TARGET*) exec cc "$@";; esac\necho "error: x" >&2; exit 1\n'
    )
    script.chmod(0o755)
    assert "ONE_TARGET" in build.build(tmp_path / "core.so", {"CC": str(script)})
    assert library.load(tmp_path / "core.so")[0] is not None


def test_the_command_is_no_failure_without_a_compiler(tmp_path):
    copy = tmp_path / "build.py"
    copy.write_bytes(Path(build.__file__).read_bytes())
    (tmp_path / "core.c").write_bytes(build.SOURCE.read_bytes())
    ended = subprocess.run(
        [sys.executable, copy], env={"CC": "/nowhere/cc"}, capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("native core: not compiled") and ended.stdout.count("\n") == 1
    assert "ziglang" in ended.stdout


def test_ranks_share_memory_with_the_core_and_nowhere_else():
    assert segment.available() == (library.core() is not None)
    with without_core():
        assert segment.why_not() == "shm needs Linux and the native core: it was not compiled"
