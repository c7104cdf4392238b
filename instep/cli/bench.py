"""``instep bench WORD``: parses the options of a measurement, then imports torch and starts it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

import tyro

from instep.bench.options import (
    BucketsOptions,
    CollectivesOptions,
    DataParallelOptions,
    LinkOptions,
    MemorySaversOptions,
    PipelineOptions,
    ScalingOptions,
    StepsOptions,
)
from instep.cli.exit_codes import DONE, report_error

PROGRAM = "instep bench"
DESCRIPTION = """\
Measure on this machine: results on stdout, progress on stderr.

Exit codes: 0 done, 1 failed, 2 usage.\
"""
OPTIONS = {
    "collectives": CollectivesOptions,
    "steps": StepsOptions,  # over a link LINK
    "buckets": BucketsOptions,
    "scaling": ScalingOptions,
    "data-parallel": DataParallelOptions,
    "memory-savers": MemorySaversOptions,
    "pipeline": PipelineOptions,
}
MODULES = {kind: f"instep.bench.{word.replace('-', '_')}" for word, kind in OPTIONS.items()}
LINK = "instep.bench.link"


def parse(args: Sequence[str]) -> Any:
    """The options that ``args`` ask for.

    Raises:
        SystemExit: 0 after ``--help``; 2 after what is not an option, with the nearest that are.
    """
    kinds: Any = Union[tuple(Annotated[kind, tyro.conf.subcommand(word)] for word, kind in OPTIONS.items())]  # noqa: UP007
    return tyro.cli(
        kinds,
        prog=PROGRAM,
        description=DESCRIPTION,
        args=list(args) or ["--help"],
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )


def main(args: Sequence[str]) -> int:
    """Measure as ``args`` say; return the exit code."""
    try:
        options = parse(args)
        options.check()
        over_link = isinstance(options, LinkOptions) and options.link
        if not over_link:
            from instep.launch.launch import warm

            warm()  # the process that ranks are forked from loads torch while this one does
        steps_over_link = over_link and isinstance(options, StepsOptions)
        importlib.import_module(LINK if steps_over_link else MODULES[type(options)]).run(options)
        sys.stdout.flush()
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        return report_error(PROGRAM, error)
