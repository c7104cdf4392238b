"""``instep WORD ...``: finds the file of the word, and imports nothing else."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from instep import __version__
from instep.cli.exit_codes import DONE, USAGE
from instep.launch.output import open_standard_streams
from instep.launch.signals import hear_stop_signals

COMMANDS = {
    "train": "train a small GPT on text, with the same bits on any number of ranks",
    "run": "run your own training script, with ranks replaced when they die: instep run -n 4 train.py",
    "bench": "measure collectives, strategies, bucket sizes, scaling, threads, memory savers, pipelines",
    "show": "print a collective, round by round: each rank's messages and parts",
    "report": "show where the time of a run went, on a page, as traces, in words",
    "compare": "find the first step and parameter in which two runs differ, and the cause",
    "convert": "write the model of a checkpoint as files that other programs read",
    "plan": "predict memory and time of a step, for any placement, before any rank starts",
    "doctor": "check this machine for problems; --verify proves the gradients",
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the command that ``args`` (by default those of the process) name; return its exit code."""
    args = sys.argv[1:] if args is None else args
    open_standard_streams()
    hear_stop_signals()
    # That of the notebook that has started us, which matplotlib, used for files alone, would refuse.
    os.environ.pop("MPLBACKEND", None)
    word, rest = (args[0], args[1:]) if args else ("--help", ())
    if word in ("-h", "--help"):
        print(usage())
        return DONE
    if word == "--version":
        print(f"instep {__version__}")
        return DONE
    if word == "--completion":
        print(Path(__file__).with_name("completion.bash").read_text(encoding="utf-8"), end="")
        return DONE
    if word not in COMMANDS:
        close = difflib.get_close_matches(word, COMMANDS, n=1)
        fix = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(COMMANDS)}"
        print(f"instep: error: unknown command {word!r}: {fix}", file=sys.stderr)
        return USAGE
    code: int = importlib.import_module(f"instep.cli.{word}").main(rest)
    return code


def usage() -> str:
    """What ``instep --help`` prints."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: instep [-h] [--version] [--completion] COMMAND ...",
            "",
            "Data-parallel PyTorch training that gives the same bits on any number of processes.",
            "",
            "commands:",
            *(f"  {word:{width}}  {line}" for word, line in COMMANDS.items()),
            "",
            "instep COMMAND --help lists its options.",
            "source <(instep --completion) completes commands and flags in bash and zsh.",
        ]
    )
