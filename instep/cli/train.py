"""``instep train``: a config from the text recipe, a TOML file and flags, in this order; then the run. Other
recipes are scripts.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from instep.cli import run
from instep.cli.exit_codes import USAGE, exit_code, report_error
from instep.mesh.launch_environment import detect
from instep.models.config import PRESETS
from instep.recipes import text_config
from instep.recipes.text_config import Config, validate
from instep.run import toml

PROGRAM = "instep train"
TEXT, SCRIPTS = (
    "text",
    {"images": "ImagesConfig", "pairs": "PairsConfig"},
)  # recipes, and the options of those that are scripts
SAID_ANEW = ("ranks", "min_ranks", "run_dir", "resume", "accept_contract", "fault", "stop_after")
DESCRIPTION = """\
Train a small GPT on text, with the same bits on any number of ranks.

Other recipes: instep train images --help (a conv net on drawn shapes) and instep train pairs --help (a
classifier of sentence pairs by Hugging Face's libraries).

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


def main(args: Sequence[str]) -> int:
    """Train as ``args`` say; return the exit code."""
    if args and args[0] in SCRIPTS:
        return _train_by_script(args[0], args[1:])
    if args and args[0] == TEXT:
        args = args[1:]
    speaks = True
    try:
        place = detect(os.environ)
        # All ranks read the same words, and until they have met, the first of each host speaks for it.
        speaks = place.local_rank == 0
        config = parse(args, quiet=not speaks)
        speaks = True
        # From here on torch is imported, which --help and a mistyped flag do not wait for.
        if place.source == "single":
            from instep.mesh.launch import warm

            # The process that ranks are forked from loads torch, and all else, while this one does.
            warm("instep.recipes.text")
        from instep.recipes.text import run as run_text

        return run_text(config)
    except (Exception, KeyboardInterrupt) as error:
        return report_error(PROGRAM, error) if speaks else exit_code(error)


def _train_by_script(recipe: str, args: Sequence[str]) -> int:
    """Run the script of ``recipe``: words of ``instep run``, and its own in any order; the exit code."""
    program = f"{PROGRAM} {recipe}"
    words = argparse.ArgumentParser(prog=program, allow_abbrev=False, add_help=False)
    run.add_words(words)
    own = importlib.import_module(f"instep.recipes.{recipe}_config")
    speaks = True
    try:
        speaks = detect(os.environ).local_rank == 0
        given, rest = words.parse_known_args(args)
        if "-h" in rest or "--help" in rest:
            print(f"{words.format_help()}\nand of the recipe:\n")
        # Here already: a mistyped flag need not wait for torch, nor be told by every rank.
        tyro.cli(getattr(own, SCRIPTS[recipe]), prog=program, args=rest, console_outputs=speaks)
        given.script, given.arguments = Path(str(own.__file__)).with_name(f"{recipe}.py"), rest
        return run.run_script(given)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else USAGE
    except (Exception, KeyboardInterrupt) as error:
        return report_error(program, error) if speaks else exit_code(error)
