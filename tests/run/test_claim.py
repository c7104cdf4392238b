"""How ranks that a launcher has started come to one run directory, also after it has restarted them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from instep.launch.launch_environment import LaunchEnvironment
from instep.mesh.mesh import Mesh
from instep.net.process_group import Group
from instep.run import folder
from instep.run.folder import MADE_UP, RUNS, claim_together
from tests.world import world

HERE, THERE = "0123456789abcdef", "fedcba9876543210"  # two hosts' agents of one torchrun


def place(launch: str, restarts: int = 0) -> LaunchEnvironment:
    return LaunchEnvironment(0, 2, source="torchrun", launch=launch, restart_count=restarts)


def claim(run_dir: Path | None, place: LaunchEnvironment, group: Group) -> tuple[Path, bool]:
    """As a run does that has ended by its return."""
    held: list[folder.Claimed] = []
    try:
        return claim_together(run_dir, False, place, group, held.append)
    finally:
        for claimed in held:
            claimed.unlock()


def begun(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    folder.begin(path, "", [])
    return path


@world(2)
def test_the_name_is_made_up_by_one_rank_and_found_again_by_all(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, own = mesh.world.group, (HERE, THERE)[mesh.rank]
    monkeypatch.chdir(tmp_path)
    group.barrier("all are there")
    path, resume = claim(None, place(own), group)
    assert not resume and path.parent == RUNS
    assert MADE_UP.fullmatch(path.name)["launch"] == HERE
    if mesh.rank == 0:
        begun(path)
        begun(RUNS / f"train-20000101-000000-{HERE}")  # an older one
        begun(RUNS / f"train-20990101-000000-{'0' * 16}")  # of another launch
    # After the restart, rank 0 is where rank 1 was.
    other = (THERE, HERE)[mesh.rank]
    assert claim(None, place(other, restarts=1), group) == (path, True)


@world(2)
def test_a_restart_before_there_was_a_run_begins_one(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mesh.world.group.barrier("all are there")
    path, resume = claim(None, place(HERE, restarts=2), mesh.world.group)
    assert (path.is_dir(), resume) == (True, False)


@world(2)
def test_a_restart_that_cannot_know_its_run_says_so(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"torchrun does not say which run it restarts: pass --run-dir"):
        claim(None, place("", restarts=1), mesh.world.group)


@pytest.mark.parametrize("restarts", [0, 1])
@world(2)
def test_a_path_is_that_of_each_ranks_own_config(mesh: Mesh, tmp_path: Path, restarts: int) -> None:
    group, path = mesh.world.group, tmp_path / "run"
    if mesh.rank == 0 and restarts:
        begun(path)
    group.barrier("it is there")
    assert claim(path, place(HERE, restarts), group) == (path, bool(restarts))
    group.barrier("all have seen it")
    if mesh.rank == 0:
        shutil.rmtree(path)


@world(2)
def test_ranks_with_other_directories_are_told_which(mesh: Mesh, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    words = f"differ in run_dir: {paths[0]} on rank 0, but {paths[1]} on rank 1: give all ranks the same"
    with pytest.raises(ValueError, match=re.escape(words)):
        claim(paths[mesh.rank], place(HERE), mesh.world.group)
    assert not any(path.exists() for path in paths)


@pytest.mark.parametrize("name", ["/tmp/strange", "../strange", "train-20260101-000000/..", ""])
def test_what_another_rank_tells_is_a_name_and_no_path(name: str) -> None:
    with pytest.raises(ValueError, match="expected the name of a new run directory"):
        folder.made_up(name)


def test_a_link_is_no_directory_of_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    strange = begun(tmp_path / "strange")
    RUNS.mkdir()
    (RUNS / f"train-20260101-000000-{HERE}").symlink_to(strange)
    assert folder.of_launch({HERE}) is None
