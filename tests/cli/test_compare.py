"""``instep compare``: what it says in words, how it ends, and that no file makes it stumble."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instep.cli.compare import main
from instep.cli.exit_codes import DONE, FAILED, USAGE
from instep.cli.train import parse
from instep.recipes import text_config
from instep.record.directory import CONFIG, RECORD
from instep.record.step_lines import Made, accepted, started, step_line
from instep.run.toml import to_toml

SIZE = 32


def append(path: Path, *lines: dict[str, Any]) -> None:
    with (path / RECORD).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def begun(step: int, ranks: int, numerical: dict[str, Any] | None = None) -> dict[str, Any]:
    layout = {"world_size": ranks, "placement": {"dp": ranks}, "strategy": "bucketed"}
    return started(step, layout, restarts=0, fingerprint="", numerical=numerical or {})


def write(path: Path, losses: list[float], ranks: int = 1, **numerical: Any) -> Path:
    """A run of as many steps as it has losses."""
    path.mkdir()
    (path / CONFIG).write_text(to_toml(text_config.default()))
    append(path, begun(0, ranks, {"batch.global_size": SIZE, **numerical}))
    for step, loss in enumerate(losses):
        sample = [("head.weight", 3, f"{int(loss * 16):08x}")]
        append(path, step_line(step, Made(loss=loss, norm=1.0), cursor=(step + 1) * SIZE, sampled=sample))
    return path


def add_leaves(path: Path, step: int, leaves: list[tuple[int, str]], reduced: str) -> None:
    """Give the line of ``step`` hashes of gradients: of each micro-batch the rank, and that of the weight."""
    lines = [json.loads(line) for line in (path / RECORD).read_text().splitlines()]
    line = next(line for line in lines if "event" not in line and line["step"] == step)
    line["leaves"] = [
        {"leaf": leaf, "rank": rank, "parameters": {"head.weight": digest, "head.bias": "0"}}
        for leaf, (rank, digest) in enumerate(leaves)
    ]
    line["reduced"] = {"head.weight": reduced, "head.bias": "0"}
    (path / RECORD).write_text("")
    append(path, *lines)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two that differ in step 2."""
    return write(tmp_path / "a", [4.0, 3.0, 2.5, 2.0]), write(tmp_path / "b", [4.0, 3.0, 2.75, 2.0], 2)


def said(capsys: pytest.CaptureFixture[str], *args: object, code: int) -> str:
    assert main([str(arg) for arg in args]) == code
    out, err = capsys.readouterr()
    return err if code == USAGE else out


def test_equal_runs_end_with_0_and_say_how_far_they_are_equal(tmp_path, capsys):
    a, b = write(tmp_path / "a", [4.0, 3.0]), write(tmp_path / "b", [4.0, 3.0, 2.5], 2)
    out = said(capsys, a, b, code=DONE)
    assert "same bits in all 2 steps that both have; B continues to step 2" in out
    assert f"B  {b}: 3 steps; started at step 0 on dp=2, bucketed; samples 0 to 95" in out


def test_a_parting_ends_with_1_and_names_step_field_and_parameter(runs, capsys):
    out = said(capsys, *runs, code=FAILED)
    assert "they differ from step 2 on:" in out
    assert "   loss: 2.5 in A, 2.75 in B" in out
    assert "parameter: head.weight (1 of the 1 hashed after step 2)" in out


def test_without_leaves_it_prints_commands_that_the_parser_takes(runs, capsys):
    out = said(capsys, *runs, code=FAILED)
    commands = [line.split() for line in out.splitlines() if line.startswith("   instep ")]
    for command, run in zip(commands, runs, strict=False):
        config = parse(command[2:])
        assert (config.stop_after, config.record.leaves, config.resume) == (3, True, False)
        assert config.run_dir == run.with_name(f"{run.name}-leaves")
    assert commands[2] == ["instep", "compare", f"{runs[0]}-leaves", f"{runs[1]}-leaves"]


@pytest.mark.parametrize(
    ("leaves", "reduced", "expected"),
    [
        (
            [(0, "x"), (1, "z")],
            "s",
            "cause: computing: gradients of micro-batches differ, before any was added",
        ),
        (
            [(0, "x"), (1, "y")],
            "t",
            "cause: reducing: the gradient of every micro-batch is the same, their sum",
        ),
        ([(0, "x"), (1, "y")], "s", "cause: updating: the reduced gradient is the same, what was made of it"),
        ([(0, "w"), (1, "z")], "s", "cause: before the step: the gradient of every micro-batch differs"),
    ],
    ids=["computing", "reducing", "updating", "before"],
)
def test_with_leaves_it_says_what_did_it(runs, capsys, leaves, reduced, expected):
    add_leaves(runs[0], 2, [(0, "x"), (0, "y")], "s")
    add_leaves(runs[1], 2, leaves, reduced)
    out = said(capsys, *runs, code=FAILED)
    assert expected in out
    if "computing" in expected:
        assert "   micro-batch 1, by rank 0 in A and 1 in B: head.weight" in out.splitlines()


def test_other_settings_are_said_first(tmp_path, capsys):
    a, b = write(tmp_path / "a", [4.0], seed=0), write(tmp_path / "b", [3.0], seed=1)
    out = said(capsys, a, b, code=FAILED)
    expected = "so their bits may differ:\n   seed: 0 in A, 1 in B\n"
    assert expected in out and out.index(expected) < out.index("they differ from")
    assert out.splitlines()[-1] == "cause: the different configurations, above"


def test_a_contract_that_was_accepted_before_they_part_is_the_cause(runs, capsys):
    append(runs[1], accepted(2, ["lr: 1 in the checkpoint, 2 now"]))
    out = said(capsys, *runs, code=FAILED)
    told = "cause: B continued under another contract at step 2 (lr: 1 in the checkpoint, 2 now)"
    assert out.splitlines()[-1] == told


def test_interruptions_moves_and_torn_lines_are_told(runs, capsys):
    append(runs[1], accepted(4, ["threads: 1 in the checkpoint, 2 now"]), begun(4, 2))
    with (runs[1] / RECORD).open("a") as file:
        file.write('{"step": 4, "cur')
    out = said(capsys, *runs, code=FAILED)
    assert "continued at step 4 on dp=2, bucketed; the contract changed at step 4 (" in out
    assert "at step 4 (threads: 1 in the checkpoint, 2 now)" in out
    assert f"   warning: {runs[1] / RECORD}, line 8: torn, and left out" in out


@pytest.mark.parametrize("content", [b"", b"[]\n", b"\x80\x81\n", b'{"step": 1.5}\n', b"[" * 99_999 + b"\n"])
def test_a_file_that_is_no_record_is_one_line_on_stderr(runs, capsys, content):
    (runs[1] / RECORD).write_bytes(content)
    err = said(capsys, *runs, code=USAGE)
    assert err.startswith("instep compare: error: ") and err.count("\n") == 1
    assert str(runs[1]) in err


def test_what_is_no_run_is_a_usage_error(runs, tmp_path, capsys):
    assert "nowhere: expected the directory of a run" in said(
        capsys, runs[0], tmp_path / "nowhere", code=USAGE
    )
    with pytest.raises(SystemExit) as ended:
        main([str(runs[0])])
    assert ended.value.code == USAGE
