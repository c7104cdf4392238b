"""The scripts of examples/: under torch's DDP, and as runs that lose ranks and end with the same bits."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from instep.launch.launch import launch
from tests.launched.command import ROOT, events, instep, summary

SHORTER = {
    "gan.py": {"STEPS, BATCH, NOISE = 400,": "STEPS, BATCH, NOISE = 8,"},
    "language.py": {"default=150": "default=12"},
    "vision.py": {"NUM_HELD_OUT = 4, 960, 200": "NUM_HELD_OUT = 2, 128, 20"},
}
KILLS = (
    "kill:rank=1,step=2,phase=backward",
    "kill:rank=0,step=4,phase=update",
    "kill:rank=1,step=5,phase=loss",
)


def shortened(folder: str, name: str, to: Path, replaced: tuple[str, str] = ("", "")) -> Path:
    """A copy of an example that takes 8 steps, or 12."""
    text = (ROOT / "examples" / folder / name).read_text()
    for old, new in [*SHORTER[name].items(), replaced]:
        assert old in text
        text = text.replace(old, new) if old else text
    to.mkdir(exist_ok=True)
    (to / name).write_text(text)
    return to / name


def as_under_torchrun(script: Path) -> None:
    """One rank's part."""
    sys.argv = [str(script)]
    os.dup2(os.open(script.with_suffix(f".{os.environ['RANK']}"), os.O_CREAT | os.O_WRONLY), 1)
    runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORTER)
def test_a_script_trains_under_ddp(name: str, tmp_path: Path) -> None:
    """Where ranks meet is in the environment that torchrun makes; this one has it not."""
    begin = 'dist.init_process_group("gloo"'
    meet = f", init_method='file://{tmp_path}/meet', rank=int(os.environ['RANK']), world_size=2"
    script = shortened("ddp", name, tmp_path / "ddp", (begin, begin + meet))
    script.write_text("import os\n" + script.read_text())
    launch(as_under_torchrun, (script,), ranks=2)
    said = script.with_suffix(".0").read_text()
    assert "radius" in said or "told right" in said or "step 0: loss 5." in said


@pytest.mark.parametrize(
    ("folder", "name", "undisturbed"),
    [
        pytest.param("run", "gan.py", 2, marks=pytest.mark.slow),  # the plain loop: the bits of as many ranks
        pytest.param("run", "language.py", 2, marks=pytest.mark.slow),
        ("run", "vision.py", 1),
        pytest.param("declared", "gan.py", 1, marks=pytest.mark.slow),
        pytest.param("declared", "language.py", 1, marks=pytest.mark.slow),
    ],
)
def test_a_script_ends_with_the_same_bits_after_three_kills(
    folder: str, name: str, undisturbed: int, tmp_path: Path
) -> None:
    script = shortened(folder, name, tmp_path / "scripts")
    faults = [word for spec in KILLS for word in ("--fault", spec)]
    hashes = []
    for run_dir, words in (("alone", ["-n", undisturbed]), ("killed", ["-n", 2, *faults])):
        ended = instep("run", *words, "--run-dir", run_dir, script, cwd=tmp_path)
        assert ended.code == 0, ended.err
        hashes.append(summary(tmp_path / run_dir)["state_sha256"])
    assert hashes[0] == hashes[1]
    failures = events(tmp_path / "killed", "failure")
    assert [(x["rank"], x["step"]) for x in failures] == [(1, 2), (0, 4), (1, 5)]


def test_the_starter_survives_a_kill(tmp_path: Path) -> None:
    ended = instep("run", "-n", 2, "--fault", KILLS[0], ROOT / "examples" / "starter.py", cwd=tmp_path)
    assert ended.code == 0, ended.err
    told = summary(tmp_path / "runs" / "mine")
    assert told["steps"] == 300 and told["loss_last"] < told["loss_first"]
    assert len(events(tmp_path / "runs" / "mine", "recovery")) == 1
