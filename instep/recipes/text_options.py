"""The command line of the text recipe: a config from the recipe, a TOML file and flags, in this order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from instep.models.config import PRESETS
from instep.recipes import text_config
from instep.recipes.text_config import Config, validate
from instep.record.directory import CONFIG
from instep.run import flags, toml

PROGRAM = "instep train"
# Said anew whenever a run is started or resumed.
LAUNCH = ("ranks", "min_ranks", "run_dir", "resume", "accept_contract", "fault", "stop_after")
DEMOS: dict[str, dict[str, Any]] = {
    "overlap": {  # one backward per step on each of two ranks, and seven buckets
        "steps": 200,
        "model": {"layers": 4},
        "batch": {"global_size": 8},
        "parallel": {"bucket_mb": 0.5},
    }
}
DESCRIPTION = """\
Train a small GPT on text, with the same bits on any number of ranks.

Exit codes: 0 done, 1 failed, 2 usage, 3 checkpoint rejected, 75 stopped early (continue with --resume).\
"""


@dataclass(frozen=True, kw_only=True)
class TrainFlags(flags.LaunchFlags, Config):
    """A config as flags, and from where it is taken first."""

    config_file: Annotated[Path | None, tyro.conf.arg(name="config", metavar="FILE.toml")] = None
    """Take the settings from this file first; flags override them."""
    demo: Literal["overlap"] | None = None
    """Take the settings of a demonstration first; flags override them. overlap: several buckets, all but the
    last sent while backward runs."""
    preset: Annotated[str | None, tyro.conf.arg(name="model.preset", metavar="|".join(PRESETS))] = None
    """Take layers, width and heads from the usual table of GPT sizes; flags override them."""


def parse(args: Sequence[str], *, quiet: bool = False) -> Config:
    """The config that ``args`` ask for; with ``quiet`` neither help nor a usage error is printed.

    Raises:
        ValueError: a config that cannot be run, in words for the user.
        OSError: the TOML file cannot be read.
        SystemExit: 0 after ``--help``; 2 after a flag that does not exist, with the nearest that do.
    """
    names = [field.name for field in fields(Config)]

    def parsed(default: Config) -> TrainFlags:
        start = TrainFlags(**{name: getattr(default, name) for name in names})
        return flags.parse(start, args, program=PROGRAM, description=DESCRIPTION, quiet=quiet)

    found = parsed(text_config.default())
    base = _base(found)
    if base != text_config.default():  # the other flags override it
        found = parsed(base)
    config = Config(**{name: getattr(found, name) for name in names})
    validate(config)
    return config


def parse_script(args: Sequence[str]) -> Config:
    """As ``parse``, for the recipe's script, which has not been started by ``instep train``.

    Raises:
        ValueError: also for a setting that is for who starts the ranks, and would do nothing here.
    """
    config = parse(args)
    for name in ("min_ranks", "fault", "stop_after"):
        if getattr(config, name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} has no effect on the script itself: pass it to {PROGRAM}, or to instep run before "
                "the script"
            )
    return config


def _base(found: TrainFlags) -> Config:
    """What the flags override: the run that is resumed, the file, and the preset that they name."""
    base = text_config.default()
    if found.resume and found.run_dir is not None and (found.run_dir / CONFIG).is_file():
        # A run goes on as it was, but where and how far is said anew.
        saved = toml.load_toml(found.run_dir / CONFIG)
        again = {name: value for name, value in saved.items() if name not in LAUNCH}
        base = text_config.merge(base, again, source=str(found.run_dir / CONFIG))
    if found.config_file is not None:
        base = text_config.merge(base, toml.load_toml(found.config_file), source=str(found.config_file))
    if found.demo is not None:
        base = text_config.merge(base, DEMOS[found.demo], source="command line")
    if found.preset is not None:
        base = text_config.merge(base, {"model": {"preset": found.preset}}, source="command line")
    return base
