"""What ``instep train`` makes of its arguments, and how it ends when they mean nothing."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from instep.cli.exit_codes import DONE, USAGE
from instep.cli.train import main
from instep.launch import launch
from instep.recipes import text, text_config
from instep.recipes.text_config import Config
from instep.recipes.text_options import parse, parse_script
from instep.run import start
from instep.run.script import ScriptCall
from instep.run.toml import to_toml

# The command's words, each with a value and what it becomes.
FLAGS = [
    ("-n 3", "ranks", 3),
    ("--ranks 3", "ranks", 3),
    ("--steps 7", "steps", 7),
    ("--seed 7", "seed", 7),
    ("--run-dir some/where", "run_dir", Path("some/where")),
    ("--resume", "resume", True),
    ("--data text", "data", Path("text")),
    ("--stop-after 5", "stop_after", 5),
    ("--timeout-s 5", "timeout_s", 5.0),
    ("--autocast bf16", "autocast", "bf16"),
    ("--model.layers 3", "model.layers", 3),
    ("--model.width 64", "model.width", 64),
    ("--model.heads 2", "model.heads", 2),
    ("--model.context 32", "model.context", 32),
    ("--model.dropout 0.5", "model.dropout", 0.5),
    ("--model.no-tied", "model.tied", False),
    ("--model.checkpoint", "model.checkpoint", True),
    ("--batch.global-size 64", "batch.global_size", 64),
    ("--batch.micro-size 8", "batch.micro_size", 8),
    ("--optim.name sgd", "optim.name", "sgd"),
    ("--optim.lr 1e-4", "optim.lr", 1e-4),
    ("--optim.clip 0", "optim.clip", 0.0),
    ("--optim.betas 0.8 0.9", "optim.betas", (0.8, 0.9)),
    ("--parallel.strategy flat", "parallel.strategy", "flat"),
    ("--parallel.bucket-mb 0.1", "parallel.bucket_mb", 0.1),
    ("--parallel.ordered", "parallel.ordered", True),
    ("--parallel.no-ordered", "parallel.ordered", False),
    ("--parallel.backend gloo", "parallel.backend", "gloo"),
]


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('steps = 50\n[model]\npreset = "small"\nlayers = 6\n[optim]\nlr = 1\n')
    return path


@pytest.fixture
def runs(monkeypatch):
    """The calls and configs that were run, in place of running them."""
    found = SimpleNamespace(started=[], calls=[])

    def run(call: ScriptCall, config: Config) -> int:
        assert call.main is text.main and config.ranks > 0
        found.started.append(call.config)
        found.calls.append(call)
        return DONE

    monkeypatch.setattr(launch, "warm", lambda *modules: None)
    monkeypatch.setattr(start, "launch_script", run)
    return found


def test_without_arguments_the_default_recipe_is_run(runs):
    assert main([]) == DONE
    assert runs.started == [text_config.default()]
    assert type(runs.started[0]) is Config


@pytest.mark.parametrize(("flag", "name", "value"), FLAGS, ids=[flag for flag, _, _ in FLAGS])
def test_a_flag_changes_one_setting(flag, name, value):
    config, base = parse(flag.split()), text_config.default()
    topic, _, setting = name.rpartition(".")
    changed = replace(getattr(base, topic), **{setting: value}) if topic else value
    assert config == replace(base, **{topic or setting: changed})


@pytest.mark.parametrize("flags", ["--min-ranks 1", "--fault kill:step=3", "--stop-after 2"])
def test_the_script_refuses_what_is_for_who_starts_the_ranks(flags):
    assert parse_script(["--steps", "9"]) == parse(["--steps", "9"])
    flag, _ = flags.split()
    with pytest.raises(ValueError, match=f"^{flag} has no effect on the script itself"):
        parse_script(flags.split())


def test_flags_override_the_file_and_the_file_the_recipe(toml):
    config = parse(["--steps", "9", f"--config={toml}", "--model.heads", "6"])
    assert (config.steps, config.optim.lr, config.seed) == (9, 1.0, text_config.default().seed)
    assert (config.model.layers, config.model.width, config.model.heads) == (6, 768, 6)


def test_a_demonstration_yields_to_other_flags():
    config = parse(["--model.width", "64", "--demo", "overlap"])
    assert (config.model.width, config.parallel.strategy) == (64, "bucketed")
    weights = 12 * config.model.layers * 128**2 * 4 / 2**20  # of the blocks alone, in MiB
    assert config.parallel.bucket_mb < weights / 5
    assert config.num_leaves == 2  # two ranks have one backward each, and all of it can hide messages


# What torchrun tells the second of two ranks on this host.
SECOND_RANK = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize("args", ["--model.layer 3", "--steps 0", "--config absent.toml", "--help"])
@pytest.mark.parametrize("rank", [0, 1])
def test_before_ranks_have_met_the_first_of_a_host_speaks_for_it(args, rank, runs, monkeypatch, capsys):
    for name, value in SECOND_RANK.items():
        monkeypatch.setenv(name, str(rank) if name.endswith("RANK") else value)
    try:
        code = main(args.split())
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert code == (DONE if args == "--help" else USAGE)
    assert bool(said.out + said.err) is (rank == 0)
    assert runs.started == []


def test_half_an_environment_is_a_usage_error(runs, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert main([]) == USAGE
    assert capsys.readouterr().err.startswith("instep train: error: expected WORLD_SIZE in the environment")


@pytest.mark.parametrize("flag", ["--run-dir", "--run_dir"])
def test_a_run_goes_on_with_its_own_config_and_says_anew_where_and_how_far(flag: str, tmp_path: Path) -> None:
    """With underscores, which tyro takes too, it went on with the settings of the default recipe."""
    saved = replace(text_config.default(), seed=7, ranks=5, stop_after=3, run_dir=Path("elsewhere"))
    (tmp_path / "config.toml").write_text(to_toml(saved))
    resumed = parse(["--resume", flag, str(tmp_path), "--steps", "9"])
    assert resumed == replace(text_config.default(), seed=7, steps=9, resume=True, run_dir=tmp_path)


def test_what_the_command_says_is_what_the_script_s_run_takes(runs, tmp_path: Path) -> None:
    flags = ["-n", "2", "--run-dir", str(tmp_path), "--fault", "kill:step=3", "--stop-after", "2"]
    assert main(flags) == DONE
    said = {"ranks": 2, "run_dir": tmp_path, "fault": ("kill:step=3",), "stop_after": 2}
    assert runs.calls[0].given == {"min_ranks": 0, "resume": False, "accept_contract": False, **said}
