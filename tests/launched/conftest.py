"""Runs that many tests look at or go on from: two that nothing disturbed, one that stopped half-way."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from instep.recipes import text_config
from instep.run.toml import to_toml
from tests.launched.command import train

STEPS = 8


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The flags of the tiny recipe on a text of 19 kB: dropout, clipping, AdamW, warm-up."""
    path = tmp_path_factory.mktemp("recipe")
    text = path / "text"
    text.write_bytes(b"".join(hashlib.sha256(bytes([i])).hexdigest().encode() for i in range(256)))
    toml = path / "tiny.toml"
    toml.write_text(to_toml(text_config.tiny()))
    return "--config", str(toml), "--data", str(text), "--steps", str(STEPS)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, recipe: tuple[str, ...]) -> Path:
    """The run directory of all steps on one rank."""
    path = tmp_path_factory.mktemp("undisturbed")
    ended = train(*recipe, "-n", 1, "--run-dir", path / "run", cwd=path)
    assert ended.code == 0, ended.err
    return path / "run"


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory, recipe: tuple[str, ...]) -> Path:
    """The run directory of half the steps on two ranks, with checkpoints after steps 2 and 4."""
    path = tmp_path_factory.mktemp("stopped")
    half = ("--stop-after", STEPS // 2, "--checkpoint.every", 2)
    ended = train(*recipe, *half, "-n", 2, "--run-dir", path / "run", cwd=path)
    assert ended.code == 75, ended.err
    return path / "run"


@pytest.fixture
def half_way(stopped: Path, tmp_path: Path) -> Callable[[], Path]:
    """A copy of ``stopped`` at each call."""

    def copy() -> Path:
        number = sum(1 for _ in tmp_path.glob("half-way-*"))
        return Path(shutil.copytree(stopped, tmp_path / f"half-way-{number}"))

    return copy
