"""The runner of the GPU benchmark: parts that hang, fail or differ, a run that is ended; and all on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
REPORT = """
import json, os, sys, time
def found(what, verdict):
    file = os.path.join(sys.argv[sys.argv.index("--output") + 1], "results.jsonl")
    with open(file, "a") as results:
        results.write(json.dumps({"part": sys.argv[1], "what": what, "verdict": verdict}) + "\\n")
"""
WITH_PARTS = """
import json, sys
sys.path.insert(0, {folder!r})
import run
run.PARTS = {{name: run.Part(*fields) for name, fields in json.loads(sys.argv.pop(1)).items()}}
run.GRACE_S = 0.5
sys.exit(run.main())
"""
GOOD = "found('first', 'same')"
HANGS = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
print("pid", child.pid, flush=True)
found('begun', 'same')
child.wait()
"""


def started(
    folder: Path, scripts: Mapping[str, str], *words: object, seconds: float = 10, needs_gpu: bool = False
) -> subprocess.Popen[str]:
    """The runner with parts that do what ``scripts`` say."""
    parts: dict[str, tuple[str, float, bool]] = {}
    for name, text in scripts.items():
        path = folder / f"{name}.py"
        path.write_text(REPORT + text)
        parts[name] = str(path), seconds, needs_gpu
    runner = WITH_PARTS.format(folder=str(FOLDER))
    command = [sys.executable, "-c", runner, json.dumps(parts), "--output", str(folder / "out")]
    command += ["--device", "cpu", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def findings(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "results.jsonl").read_text().splitlines()]


def ends(folder: Path) -> dict[str, str]:
    """By part, how it has ended."""
    return {x["part"]: x["verdict"] for x in findings(folder) if not x["what"]}


def assert_gone(pid: int) -> None:
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_part_that_hangs_is_cut_off_with_its_children_and_the_others_run(tmp_path: Path) -> None:
    scripts = {"before": GOOD, "hanging": HANGS, "after": GOOD}
    runner = started(tmp_path, scripts, "--minutes", 8 / 60, seconds=3)
    out, err = runner.communicate()
    assert runner.returncode == 1, err
    assert ends(tmp_path) == {"before": "done", "hanging": "cut off", "after": "done"}
    assert "hanging: cut off" in out and "Not as expected: hanging." in out
    assert "left] hanging: at most" in err
    said = next(x["log"] for x in findings(tmp_path) if x["verdict"] == "cut off")
    assert_gone(int(said.split()[1]))


@pytest.mark.parametrize(
    ("text", "amiss"),
    [
        (GOOD, None),
        ("found('a hash', 'differs')", "bad: a hash"),
        ("found('a rank', 'failed')", "bad: a rank"),
        (f"{GOOD}; raise SystemExit(3)", "bad"),
        ("found('a hash', 'info'); found('another', 'skipped')", None),
    ],
)
def test_the_exit_code_is_1_if_a_part_fails_or_differs(text: str, amiss: str | None, tmp_path: Path) -> None:
    runner = started(tmp_path, {"bad": text, "after": GOOD})
    out, err = runner.communicate()
    assert runner.returncode == (amiss is not None), err
    assert (f"Not as expected: {amiss}." in out) == (amiss is not None)
    assert ends(tmp_path)["after"] == "done"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_parts_are_as_they_should_be_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, FOLDER / "run.py", "--device", "cpu", "--quick", "--minutes", "18"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [*command, "--output", tmp_path / "out"], capture_output=True, text=True, env=environ
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = findings(tmp_path)
    assert {x["part"] for x in found if x.get("why") == "no GPU"} == {"tests", "nccl, one rank"}
    hashes = {x["sha256"] for x in found if "sha256" in x}
    assert len(hashes) == 1
    assert (tmp_path / "out" / "step.png").stat().st_size > 10_000
