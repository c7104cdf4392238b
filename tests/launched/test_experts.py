"""``instep train --model.experts``: one hash for every layout, also after a fault and with other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launched.command import faults, summary, train
from tests.launched.conftest import STEPS

EXPERTS = ("--model.experts", 4, "--optim.aux-loss", 0, "--optim.balance-rate", 0.01)
LAYOUTS = {
    "ep": ("-n", 2, "--parallel.ep", 2),
    "dp and ep, killed": ("-n", 4, "--parallel.ep", 2, *faults("kill:rank=1,step=3")),
    "pp and ep": ("-n", 4, "--parallel.pp", 2, "--parallel.ep", 2),
    "stage 1 and ep": ("-n", 4, "--parallel.ep", 4, "--parallel.shard-stage", 1),
    "stage 3": ("-n", 2, "--parallel.shard-stage", 3),
}


@pytest.fixture(scope="module")
def of_one(recipe: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("experts")
    ended = train(*recipe, *EXPERTS, "-n", 1, "--run-dir", "run", cwd=path)
    assert ended.code == 0, ended.err
    assert "expert_load_max" in ended.out
    return str(summary(path / "run")["state_sha256"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_hash_of_one_rank(
    layout: str, of_one: str, recipe: tuple[str, ...], tmp_path: Path
) -> None:
    ended = train(*recipe, *EXPERTS, *LAYOUTS[layout], "--run-dir", "run", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert summary(tmp_path / "run")["state_sha256"] == of_one


def test_a_run_stopped_with_divided_experts_goes_on_with_fewer_ranks(
    of_one: str, recipe: tuple[str, ...], tmp_path: Path
) -> None:
    half = ("--stop-after", STEPS // 2, "--checkpoint.every", 2, "--run-dir", "run")
    ended = train(*recipe, *EXPERTS, "-n", 4, "--parallel.ep", 4, *half, cwd=tmp_path)
    assert ended.code == 75, ended.err
    ended = train(*recipe, *EXPERTS, "-n", 3, "--run-dir", "run", "--resume", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert summary(tmp_path / "run")["state_sha256"] == of_one
