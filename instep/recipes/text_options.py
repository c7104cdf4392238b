"""The command line of the text recipe: a config from the recipe, a TOML file and flags, in this order."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from instep.models.config import PRESETS
from instep.recipes import text_config
from instep.recipes.text_config import Config, validate
from instep.run import toml

PROGRAM = "instep train"
SAID_ANEW = ("ranks", "min_ranks", "run_dir", "resume", "accept_contract", "fault", "stop_after")
DESCRIPTION = """\
Train a small GPT on text, with the same bits on any number of ranks.

Exit codes: 0 done, 1 failed, 2 usage, 3 checkpoint rejected, 75 stopped before the end (--resume goes on).\
"""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Config):
    """What the command line adds to a config."""

    config_file: Annotated[Path | None, tyro.conf.arg(name="config", metavar="FILE.toml")] = None
    """Take the config from this file first; flags override it."""
    preset: Annotated[str | None, tyro.conf.arg(name="model.preset", metavar="|".join(PRESETS))] = None
    """Take layers, width and heads from the usual table of GPT sizes; flags override them."""
    # With the sentences that Config has.
    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 0
    fault: tyro.conf.UseAppendAction[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="KIND:KEY=VALUE,...")]
    ] = ()


def parse(args: Sequence[str], *, quiet: bool = False) -> Config:
    """The config that ``args`` ask for; with ``quiet`` neither help nor a usage error is printed.

    Raises:
        ValueError: a config that cannot be run, in words for the user.
        OSError: the TOML file cannot be read.
        SystemExit: 0 after ``--help``; 2 after a flag that does not exist, with the nearest that do.
    """
    names = [field.name for field in fields(Config)]
    base = _base(args)
    arguments = tyro.cli(
        TrainOptions,
        prog=PROGRAM,
        description=DESCRIPTION,
        args=list(args),
        default=TrainOptions(**{name: getattr(base, name) for name in names}),
        console_outputs=not quiet,
    )
    config = Config(**{name: getattr(arguments, name) for name in names})
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
                f"{flag}: expected by who starts the ranks, got by the script: {PROGRAM} {flag} ..., or "
                f"instep run {flag} ... before the script"
            )
    return config


def _base(args: Sequence[str]) -> Config:
    """The config that the other flags override: they need to know its values, so it is found before them."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path, nargs="?")
    first.add_argument("--model.preset", dest="preset", nargs="?")
    first.add_argument("--run-dir", type=Path, nargs="?")
    first.add_argument("--resume", action="store_true")
    given, _ = first.parse_known_args(args)
    base = text_config.default()
    if given.resume and given.run_dir is not None and (given.run_dir / toml.CONFIG).is_file():
        # A run goes on as it was, but where and how far is said anew.
        saved = toml.load_toml(given.run_dir / toml.CONFIG)
        again = {name: value for name, value in saved.items() if name not in SAID_ANEW}
        base = text_config.merge(base, again, source=str(given.run_dir / toml.CONFIG))
    if given.config is not None:
        base = text_config.merge(base, toml.load_toml(given.config), source=str(given.config))
    if given.preset is not None:
        base = text_config.merge(base, {"model": {"preset": given.preset}}, source="command line")
    return base
