"""``instep bench WORD``: reads the options of a measurement, then starts it; torch is imported after that."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from instep.bench.options import (
    BucketsOptions,
    CollectivesOptions,
    DataParallelOptions,
    MemorySaversOptions,
    ModelOptions,
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
AnyOptions = (
    CollectivesOptions
    | StepsOptions
    | BucketsOptions
    | ScalingOptions
    | DataParallelOptions
    | MemorySaversOptions
    | PipelineOptions
)
Options = (
    Annotated[CollectivesOptions, tyro.conf.subcommand("collectives")]
    | Annotated[StepsOptions, tyro.conf.subcommand("steps")]
    | Annotated[BucketsOptions, tyro.conf.subcommand("buckets")]
    | Annotated[ScalingOptions, tyro.conf.subcommand("scaling")]
    | Annotated[DataParallelOptions, tyro.conf.subcommand("data-parallel")]
    | Annotated[MemorySaversOptions, tyro.conf.subcommand("memory-savers")]
    | Annotated[PipelineOptions, tyro.conf.subcommand("pipeline")]
)
MODULES = {
    CollectivesOptions: "instep.bench.collectives",
    StepsOptions: "instep.bench.steps",  # over a link LINK
    BucketsOptions: "instep.bench.buckets",
    ScalingOptions: "instep.bench.scaling",
    DataParallelOptions: "instep.bench.data_parallel",
    MemorySaversOptions: "instep.bench.memory_savers",
    PipelineOptions: "instep.bench.pipeline",
}
LINK = "instep.bench.link"


def parse(args: Sequence[str]) -> AnyOptions:
    """The options that ``args`` ask for.

    Raises:
        SystemExit: 0 after ``--help``; 2 after what is not an option, with the nearest that are.
    """
    options: AnyOptions = tyro.cli(
        Options,
        prog=PROGRAM,
        description=DESCRIPTION,
        args=list(args) or ["--help"],
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )
    return options


def main(args: Sequence[str]) -> int:
    """Measure as ``args`` say; return the exit code."""
    try:
        options = parse(args)
        options.check()
        over_link = isinstance(options, CollectivesOptions | ModelOptions) and options.link
        if not over_link:
            from instep.launch.launch import warm

            warm()  # the process that ranks are forked from loads torch while this one does
        steps_over_link = over_link and isinstance(options, StepsOptions)
        importlib.import_module(LINK if steps_over_link else MODULES[type(options)]).run(options)
        sys.stdout.flush()
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        return report_error(PROGRAM, error)
