"""``instep compare RUN_A RUN_B``: the first step at which two runs part, the parameter, and the cause."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from instep.cli.exit_codes import DONE, FAILED, report_error
from instep.run.again import again
from instep.run.compare import BEFORE, Cause, Comparison, DifferingMicroBatch, FirstDifference, compare
from instep.run.ledger import Fields, RecordedRun, placement_text, read_run

PROGRAM = "instep compare"
DESCRIPTION = """\
Compare two runs bit by bit: where do they part, in which parameter, and what caused it?

Exit codes: 0 the same bits, 1 they part, 2 usage.\
"""
SHOWN = 8  # lines of a list, before it says how many more there are


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Two runs and how to say it."""

    run_a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_A")]
    """Directory of one run."""
    run_b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_B")]
    """Directory of the other."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print everything that was found as JSON."""


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
        yield "these runs cannot be expected to have the same bits:"
        yield from _shortened(found.contract)
    if found.canaries is not None:
        yield (
            f"their canaries differ, {found.canaries[0][:16]} in A and {found.canaries[1][:16]} in B: the "
            "gradient of one and the same micro-batch was another"
        )
    if found.parting is None:
        yield f"the same bits in all {found.num_common} steps that both have{_longer(a, b)}"
    else:
        yield from _parted(a, b, found.parting, is_expected=bool(found.contract))


def _history(run: RecordedRun) -> str:
    """Where a run began, was taken up again, moved, and took another contract."""
    parts = [f"{len(run.steps)} steps"]
    for number, line in enumerate(run.starts):
        parts.append(
            f"{'went on' if number else 'started'} after step {line['step']} on {placement_text(line)}"
        )
    parts += [f"accepted another contract after step {line['step']}{_changed(line)}" for line in run.accepted]
    for line in run.others:
        where = placement_text(line)
        parts.append(f"{line['event']} after step {line['step']}{f': {where}' if where else ''}")
    parts += [
        f"step {step} skipped: {line.skipped}" for step, line in sorted(run.steps.items()) if line.skipped
    ]
    sizes = run.numerical.get("batch.global_size")
    if run.steps and type(sizes) is int:
        parts.append(f"samples 0 to {max(run.steps) * sizes - 1}")
    hidden = len(parts) - 1 - SHOWN
    return "; ".join([*parts[: SHOWN + 1], *([f"{hidden} more events"] if hidden > 0 else [])])


def _changed(line: Fields) -> str:
    """What was another in the contract that a line of the ledger has accepted."""
    differences = line.get("differences")
    known = [str(words) for words in differences] if isinstance(differences, list) else []
    return f" ({_listed(known)})" if known else ""


def _parted(a: RecordedRun, b: RecordedRun, parting: FirstDifference, *, is_expected: bool) -> Iterator[str]:
    yield f"they part at step {parting.step}:"
    for name, (left, right) in parting.fields.items():
        yield f"   {name}: {f'{_value(left)} in A, {_value(right)} in B' if left else right}"
    if parting.last_whole is not None:
        yield f"   the whole state was last seen to be the same after step {parting.last_whole}"
    yield from _parameters(parting)
    if parting.cause is None:
        settings = "what differs between them, above" if is_expected else _accepted(a, b, parting.step)
        yield from [f"cause: {settings}"] if settings else _how_to_learn_more(a, b, parting)
    else:
        yield from _cause(parting.cause)


def _accepted(a: RecordedRun, b: RecordedRun, parted: int) -> str:
    """The last contract that one of the runs took on before step ``parted``; "" for none."""
    found = [
        (line["step"], f"{name} has gone on under another contract after step {line['step']}{_changed(line)}")
        for name, run in (("A", a), ("B", b))
        for line in run.accepted
        if line["step"] < parted
    ]
    return max(found)[1] if found else ""


def _value(text: str) -> str:
    """A float's bits with its digits beside them; the beginning of a hash."""
    if "0x" in text:
        return f"{text} ({float.fromhex(text):.9g})"
    return text[:16] if len(text) == 64 else text


def _parameters(parting: FirstDifference) -> Iterator[str]:
    if not parting.parameters:
        yield "parameter: none is known to differ yet: no line has another hash of the state"
        return
    number = f"{len(parting.parameters)} of the {parting.num_compared} that the line of"
    yield f"parameter: {_listed(parting.parameters)} ({number} step {parting.parameters_step} tells of)"


def _cause(cause: Cause) -> Iterator[str]:
    said = "came into the step" if cause.part == BEFORE else cause.part
    yield f"cause: {said}: {cause.what}"
    if cause.parameters:
        yield f"   in {_listed(cause.parameters)}"
    yield from _shortened([_leaf(odd) for odd in cause.leaves])
    if cause.part == BEFORE and cause.leaves:
        yield "   run both again with --record.hash-every 1 to see after which step the state differs"


def _leaf(odd: DifferingMicroBatch) -> str:
    # Backward comes to the last parameter first.
    first = odd.parameters[-1]
    others = f" and {len(odd.parameters) - 1} more" if len(odd.parameters) > 1 else ""
    return f"micro-batch {odd.leaf}, by rank {odd.ranks[0]} in A and {odd.ranks[1]} in B: {first}{others}"


def _how_to_learn_more(a: RecordedRun, b: RecordedRun, parting: FirstDifference) -> Iterator[str]:
    if parting.step == 0:
        yield "cause: the runs did not begin from the same state"
        return
    yield "cause: not known without the hashes of micro-batches; these commands write them:"
    for run in (a, b):
        if parting.step not in run.reduced:
            beside = run.path.with_name(f"{run.path.name}-leaves")
            command = again(run.path, beside, ("--stop-after", str(parting.step), "--record.leaves"))
            notebook = f"instep.Run({str(beside)!r}, record={{'leaves': True}}) in its notebook"
            yield f"   {command or notebook}"
    runs = [
        r.path if parting.step in r.reduced else r.path.with_name(f"{r.path.name}-leaves") for r in (a, b)
    ]
    yield f"   {PROGRAM} {shlex.join(map(str, runs))}"


def _longer(a: RecordedRun, b: RecordedRun) -> str:
    ends = max(a.steps), max(b.steps)
    if ends[0] == ends[1]:
        return ""
    return f"; {'A' if ends[0] > ends[1] else 'B'} goes on to step {max(ends)}"


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


def _shortened(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"   {line}" for line in lines[:SHOWN])
    if len(lines) > SHOWN:
        yield f"   and {len(lines) - SHOWN} more"
