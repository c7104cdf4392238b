"""``instep compare RUN_A RUN_B``: the first step in which two runs differ, the parameter, and the cause."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from instep.cli.exit_codes import DONE, FAILED, report_error
from instep.record.compare import (
    BEFORE,
    INITIAL,
    Cause,
    Comparison,
    DifferingMicroBatch,
    FirstDifference,
    after,
    compare,
)
from instep.record.directory import command_again
from instep.record.jsonl import Fields
from instep.record.step_lines import RecordedRun, placement_text, read_run

PROGRAM = "instep compare"
DESCRIPTION = """\
Compare two runs bit by bit: the first step and parameter that differ, and the cause.

Exit codes: 0 same bits, 1 they differ, 2 usage.\
"""
SHOWN = 8  # lines of a list, before it says how many more there are


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Two runs and the format of the answer."""

    run_a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_A")]
    """Directory of one run."""
    run_b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_B")]
    """Directory of the other."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print all findings as JSON."""


def main(args: Sequence[str]) -> int:
    """Compare as ``args`` say; return the exit code."""
    try:
        options = tyro.cli(CompareOptions, prog=PROGRAM, description=DESCRIPTION, args=list(args))
        a, b = read_run(options.run_a), read_run(options.run_b)
        found = compare(a, b)
        if options.json:
            notes = {str(run.path): run.notes for run in (a, b)}
            print(json.dumps({**found.as_json(), "notes": notes}, indent=1))
        else:
            print("\n".join(words(a, b, found)))
        return DONE if found.same else FAILED
    except (Exception, KeyboardInterrupt) as error:
        return report_error(PROGRAM, error)


def words(a: RecordedRun, b: RecordedRun, found: Comparison) -> Iterator[str]:
    """The lines to print."""
    for name, run in (("A", a), ("B", b)):
        yield f"{name}  {run.path}: {_history(run)}"
        for trouble in [*found.troubles[str(run.path)], *run.notes]:
            yield f"   warning: {trouble}"
    if found.contract:
        yield "these runs have different numerical configurations, so their bits may differ:"
        yield from _shortened(found.contract)
    if found.logged:
        yield "what the scripts logged last differs:"
        yield from _shortened(found.logged)
    if found.first is None:
        yield f"same bits in all {found.num_common} steps that both have{_longer(a, b)}"
    else:
        yield from _different(a, b, found.first, is_expected=bool(found.contract))


def _history(run: RecordedRun) -> str:
    """Where a run began, was resumed, moved, and took another contract."""
    parts = [f"{len(run.steps)} steps"]
    for number, line in enumerate(run.starts):
        parts.append(
            f"{'continued' if number else 'started'} at step {line['step']} on {placement_text(line)}"
        )
    parts += [f"the contract changed at step {line['step']}{_changed(line)}" for line in run.accepted]
    parts += [
        f"step {step} skipped: {line.skipped}" for step, line in sorted(run.steps.items()) if line.skipped
    ]
    sizes = run.numerical.get("batch.global_size")
    if run.steps and type(sizes) is int:
        parts.append(f"samples 0 to {(max(run.steps) + 1) * sizes - 1}")
    hidden = len(parts) - 1 - SHOWN
    return "; ".join([*parts[: SHOWN + 1], *([f"{hidden} more events"] if hidden > 0 else [])])


def _changed(line: Fields) -> str:
    """The differences of the contract that ``line`` accepts."""
    differences = line.get("differences")
    known = [str(words) for words in differences] if isinstance(differences, list) else []
    return f" ({_listed(known)})" if known else ""


def _different(a: RecordedRun, b: RecordedRun, found: FirstDifference, *, is_expected: bool) -> Iterator[str]:
    yield f"they differ from {'the initial state' if found.step == INITIAL else f'step {found.step}'} on:"
    for name, (left, right) in found.fields.items():
        yield f"   {name}: {f'{left[:24]} in A, {right[:24]} in B' if left else right}"
    if found.last_whole is not None:
        yield f"   the whole state was last the same {after(found.last_whole)}"
    yield from _parameters(found)
    if found.cause is None:
        settings = "the different configurations, above" if is_expected else _accepted(a, b, found.step)
        yield from [f"cause: {settings}"] if settings else _how_to_learn_more(a, b, found)
    else:
        yield from _cause(found.cause)


def _accepted(a: RecordedRun, b: RecordedRun, first: int) -> str:
    """The last contract that one of the runs accepted up to step ``first``; "" for none."""
    found = [
        (line["step"], f"{name} continued under another contract at step {line['step']}{_changed(line)}")
        for name, run in (("A", a), ("B", b))
        for line in run.accepted
        if line["step"] <= first
    ]
    return max(found)[1] if found else ""


def _parameters(found: FirstDifference) -> Iterator[str]:
    if not found.parameters:
        yield "parameter: not known: no line has a different hash of the state"
        return
    number = f"{len(found.parameters)} of the {found.num_compared} hashed"
    yield f"parameter: {_listed(found.parameters)} ({number} {after(found.parameters_step or 0)})"


def _cause(cause: Cause) -> Iterator[str]:
    said = "before the step" if cause.part == BEFORE else cause.part
    yield f"cause: {said}: {cause.what}"
    if cause.parameters:
        yield f"   in {_listed(cause.parameters)}"
    yield from _shortened([_leaf(odd) for odd in cause.leaves])
    if cause.part == BEFORE and cause.leaves:
        yield "   run both again with --record.hash-every 1 to find the step whose update differs"


def _leaf(odd: DifferingMicroBatch) -> str:
    # Backward computes the last parameter's gradient first.
    first = odd.parameters[-1]
    others = f" and {len(odd.parameters) - 1} more" if len(odd.parameters) > 1 else ""
    return f"micro-batch {odd.leaf}, by rank {odd.ranks[0]} in A and {odd.ranks[1]} in B: {first}{others}"


def _how_to_learn_more(a: RecordedRun, b: RecordedRun, found: FirstDifference) -> Iterator[str]:
    if found.step == INITIAL:
        yield "cause: the runs did not begin from the same state"
        return
    yield "cause: unknown without the hashes of micro-batches; these commands write them:"
    paths = []
    for run in (a, b):
        paths.append(run.path)
        if found.step not in run.steps or run.steps[found.step].reduced is None:
            paths[-1] = beside = run.path.with_name(f"{run.path.name}-leaves")
            flags = ("--stop-after", str(found.step + 1), "--record.leaves")
            command = command_again(run.path, beside, run.starts, flags)
            notebook = f"instep.Run({str(beside)!r}, record={{'leaves': True}}) in its notebook"
            yield f"   {command or notebook}"
    yield f"   {PROGRAM} {shlex.join(map(str, paths))}"


def _longer(a: RecordedRun, b: RecordedRun) -> str:
    ends = max(a.steps), max(b.steps)
    if ends[0] == ends[1]:
        return ""
    return f"; {'A' if ends[0] > ends[1] else 'B'} continues to step {max(ends)}"


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


def _shortened(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"   {line}" for line in lines[:SHOWN])
    if len(lines) > SHOWN:
        yield f"   and {len(lines) - SHOWN} more"
