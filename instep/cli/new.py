"""``instep new``: writes a training script to start from."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from instep.cli.exit_codes import DONE, USAGE, report_error

PROGRAM = "instep new"
STARTER = "starter.py"


def main(args: Sequence[str]) -> int:
    """Write the script that ``args`` name; return the exit code."""
    words = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Write a commented training script, to be made one's own.",
        allow_abbrev=False,
    )
    words.add_argument("script", type=Path, metavar="SCRIPT", help="the file, which must not be there yet")
    try:
        path: Path = words.parse_args(args).script
        text = resources.files("instep.recipes").joinpath(STARTER).read_text(encoding="utf-8")
        if path.is_dir():
            raise ValueError(f"{path} is a folder: pass the name of a file: instep new {path}/train.py")
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise FileExistsError(f"{path} is there already: pass another name, or remove it") from None
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else USAGE
    except Exception as error:
        return report_error(PROGRAM, error)
    quoted = shlex.quote(str(path))
    print(f"wrote {path}; run it: python {quoted}, or on ranks that may die: instep run -n 2 {quoted}")
    return DONE
