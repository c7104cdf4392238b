"""``instep train``: a recipe, which is a script, on ranks of this host or on those of a launcher."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

import tyro

from instep.cli import run
from instep.cli.exit_codes import USAGE, exit_code, report_error
from instep.launch.launch_environment import detect
from instep.recipes.text_config import Config, check_ranks, check_rows, check_world, local_ranks
from instep.recipes.text_options import PROGRAM, parse

TEXT = "text"
SCRIPTS = {"images": "ImagesConfig", "pairs": "PairsConfig"}  # other recipes, and their options


def main(args: Sequence[str]) -> int:
    """Train as ``args`` say; return the exit code."""
    if args and args[0] in SCRIPTS:
        return _train_by_script(args[0], args[1:])
    if args and args[0] == TEXT:
        args = args[1:]
    speaks = True
    try:
        # All ranks read the same words, and until they have met, the first of each host speaks for it.
        speaks = detect(os.environ).local_rank == 0
        config = parse(args, quiet=not speaks)
        ranks = _num_ranks(config)
        speaks = True
        return train(config, ranks)
    except (Exception, KeyboardInterrupt) as error:
        return report_error(PROGRAM, error) if speaks else exit_code(error)


def train(config: Config, ranks: int) -> int:
    """Train as ``config`` says, on new ranks or on those that a launcher has started; the exit code."""
    run.preload("instep.recipes.text")
    # From here on torch is imported, which --help and a mistyped flag do not wait for.
    from instep.elastic.faults import parse_all
    from instep.net.device import num_gpus, resolve
    from instep.recipes import text
    from instep.record import loggers
    from instep.run import launch_script
    from instep.run.script import ScriptCall

    loggers.check(config.logs.names)
    parallel = config.parallel
    wanted = resolve(parallel.named_device, parallel.named_backend, 1)
    if wanted.type == "cuda" and not config.ranks and ranks > 1 and detect(os.environ).source == "single":
        ranks = min(ranks, num_gpus() if wanted.index is None else 1)
        check_rows(ranks, parallel.shard_ranks)
    for fault in parse_all(config.fault):
        check_ranks(config, fault.ranks)
    call = ScriptCall(
        path=Path(str(text.__file__)),
        main=text.main,
        config=config,
        run_dir=config.run_dir,
        resume=config.resume,
        accept_contract=config.accept_contract,
        stop_after=config.stop_after,
        fault=config.fault,
        timeout_s=config.timeout_s,
        threads=config.parallel.threads,
    )
    return launch_script.launch_script(call, ranks=ranks, min_ranks=config.min_ranks)


def _num_ranks(config: Config) -> int:
    """How many processes to start; those that a launcher has started are checked."""
    place = detect(os.environ)
    if place.source != "single":
        check_world(config, place.world_size, restarted=bool(place.restart_count))
        return place.world_size
    ranks = local_ranks(config, len(os.sched_getaffinity(0)))
    check_rows(ranks, config.parallel.shard_ranks)
    return ranks


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
