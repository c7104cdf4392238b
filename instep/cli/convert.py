"""``instep convert``: a checkpoint as files that other programs read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from instep.cli.exit_codes import DONE, report_error

PROGRAM = "instep convert"
DESCRIPTION = """\
Write the model of a checkpoint, of any number of ranks, as files that other programs read.

    instep convert runs/a --out model.safetensors
    instep convert runs/a --to transformers --weights BASE --out FOLDER

The second one writes a folder for from_pretrained: of transformers, or, where LoRA adapters were trained, of
peft. BASE is the folder that training began with: its config and tokenizer files are copied, and for adapters
it has their adapter_config.json. No network is used, and neither library is needed.

Exit codes: 0 done, 1 failed, 2 usage, 3 checkpoint rejected.\
"""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What to convert, and into what."""

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """A run, whose newest checkpoint that verifies is taken, or the directory of one checkpoint."""
    out: Path
    """The file, or with --to transformers the folder, to write; it must not be there yet."""
    to: Literal["safetensors", "transformers"] = "safetensors"
    """One plain file, or a folder for from_pretrained."""
    weights: Path | None = None
    """With --to transformers: the folder with config and tokenizer files."""
    optimizer: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """With --to safetensors: write the optimizer's moments, too."""


def main(args: Sequence[str]) -> int:
    """Convert as ``args`` say; return the exit code."""
    try:
        options = tyro.cli(ConvertOptions, prog=PROGRAM, description=DESCRIPTION, args=list(args))
        if (options.weights is not None) != (options.to == "transformers"):
            raise ValueError("--to transformers and --weights FOLDER need each other: pass both or neither")
        if options.to == "transformers" and options.optimizer:
            raise ValueError("--to transformers writes no moments: leave out --optimizer")
        # From here on torch is imported, which --help and a mistyped flag do not wait for.
        from instep.checkpoint.convert import find, to_safetensors
        from instep.integrations.pretrained import to_pretrained

        found = find(options.checkpoint)
        if options.weights is not None:
            to_pretrained(found, options.weights, options.out)
        else:
            to_safetensors(found, options.out, optimizer=options.optimizer)
            if left_out := len(found.manifest.frozen):
                print(f"{found.path} was saved without {left_out} frozen weights", file=sys.stderr)
        print(f"{options.out}: step {found.manifest.step}, from {found.path}")
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        return report_error(PROGRAM, error)
