"""``instep report``: where the time of a run or a profile went, as a page, traces, a chart, words, tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from instep.cli.exit_codes import DONE, report_error
from instep.timeline.profile_tables import profile_lines
from instep.timeline.profiler import read_records

PROGRAM = "instep report"
DESCRIPTION = """\
Show where the time of a run's steps went, which rank was slow, and what would make it faster.

Writes into the run's directory report.html (one file, needs no network), report.json (its figures),
trace/trace.json.gz (for ui.perfetto.dev), trace/hta/ (for Holistic Trace Analysis), and
trace/step.png and .svg. The run may be finished, running or killed.

For a file of torch.profiler (export_chrome_trace; .json or .json.gz) it prints where the time
of its steps went, with tables of operators and kernels, and writes nothing.

Exit codes: 0 done, 1 failed, 2 usage.\
"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What to report, and where to."""

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_DIR|PROFILE")]
    """Directory of a run of instep train, or a file of torch.profiler."""
    out: Path | None = None
    """Write into this directory instead."""
    steps: tuple[int, ...] = ()
    """The steps of the pictures, counted from 0; by default the median, the slowest and the fastest."""
    trace_steps: int = 20
    """How many of the last steps go into the traces; 0: none are written."""


def main(args: Sequence[str]) -> int:
    """Report as ``args`` say; return the exit code."""
    try:
        options = tyro.cli(ReportOptions, prog=PROGRAM, description=DESCRIPTION, args=list(args))
        if options.run_dir.exists() and not options.run_dir.is_dir():
            for line in profile_lines(*read_records(options.run_dir)):
                print(line)
            return DONE
        # From here on torch is imported, which --help and a mistyped flag do not wait for.
        from instep.record.report_data import write_report

        for line in write_report(options.run_dir, options.out, options.steps, options.trace_steps):
            print(line)
        return DONE
    except BrokenPipeError:  # the reader has seen enough
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        return report_error(PROGRAM, error)
