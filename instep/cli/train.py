"""``instep train``: ``instep run`` on the script that the package ships, whose settings are flags."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from instep.cli import run
from instep.cli.exit_codes import exit_code, report_error
from instep.launch.launch_environment import detect
from instep.recipes.text_config import Config, check_ranks, check_rows, check_world, local_ranks
from instep.recipes.text_options import LAUNCH, PROGRAM, parse


def main(args: Sequence[str]) -> int:
    """Train as ``args`` say; return the exit code."""
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
    from instep.run import start
    from instep.run.script import ScriptCall

    loggers.check(config.record.loggers)
    parallel = config.parallel
    wanted = resolve(parallel.named_device, parallel.named_backend, 1)
    if wanted.type == "cuda" and not config.ranks and ranks > 1 and detect(os.environ).source == "single":
        ranks = min(ranks, num_gpus() if wanted.index is None else 1)
        check_rows(ranks, parallel.shard)
    for fault in parse_all(config.fault):
        check_ranks(config, fault.ranks)
    given = {name: getattr(config, name) for name in LAUNCH if getattr(config, name) is not None}
    call = ScriptCall(path=Path(str(text.__file__)), main=text.main, config=config, given=given)
    return start.launch_script(call, replace(config, ranks=ranks))


def _num_ranks(config: Config) -> int:
    """How many processes to start; those that a launcher has started are checked."""
    place = detect(os.environ)
    if place.source != "single":
        check_world(config, place.world_size, restarted=bool(place.restart_count))
        return place.world_size
    ranks = local_ranks(config, len(os.sched_getaffinity(0)))
    check_rows(ranks, config.parallel.shard)
    return ranks
