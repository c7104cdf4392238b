"""The header that goes before every exchange, and the verdict that all ranks draw from it alike.

A backend pairs whatever arrives next, so a rank that is one bucket or one step ahead would be averaged
with the wrong numbers, or hang. Every exchange therefore begins with one small record of each rank, which
all ranks see (``Transport.meet``). So all reach the same verdict, and on a bad one all raise the same error
before a single gradient has been added.

    | version | contract | steps | exchange | bucket | leaves | weight | times | left | round | act | flags |

Other things that ranks do together in a step begin with one too, of the same length: then a rank that does
something else is met there, and not awaited somewhere else until the deadline. What they have to tell each
other in a few words takes the place of the flags.
"""

from __future__ import annotations

from array import array
from collections import Counter as Tally
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from instep.mesh.hang_report import Problem

VERSION = 9
BITS = 62  # flags per int64 word
_WORD = (1 << BITS) - 1
NUM_WORDS = 4  # at least, in the place of flags

REDUCE, COMPARE, UPDATE, NORM, UNSCALE, MEET = range(6)
ACTS = {
    REDUCE: "exchanges gradients",
    COMPARE: "steps with gradients of its own, which no exchange has seen",
    UPDATE: "makes an optimizer step",
    NORM: "takes the norm of the gradients",
    UNSCALE: "unscales the gradients",
    MEET: "waits for all ranks outside of a step, for a state dict or a saved state",
}


class Header(NamedTuple):
    """What one rank says before it sends one bucket. All ranks must agree on ``AGREED``."""

    version: int
    declared: int  # 1 for a declared step, 0 for an undeclared one
    step: int  # optimizer steps so far
    exchange: int  # exchanges since the last optimizer step
    bucket: int
    num_elements: int  # of the bucket, with padding
    num_leaves: int  # G of the tree
    num_own: int  # leaves that this rank computed
    weight: int  # sum of their weights
    ready_ns: int  # when this rank's gradients were whole, time.monotonic_ns()
    launched_ns: int  # when it handed the bucket over, in its turn
    left: int  # 1: this rank left the step early and sends nothing
    round: int = 0  # of the step, where each leaf travels on its own (shard/reducer.py)
    num_carried: int = 0  # parameters whose reduced gradient of before is added to, which is in slices
    declared_step: int = -1  # what the random numbers of a declared step are keyed by
    sampled: int = 0  # digest of some of what other ranks hold too (step/replica_watch.py)
    edited: int = 0  # and of which of it was written to since the last optimizer step
    num_running: int = 0  # buffers whose running statistics follow (step/running_statistics.py)
    hooked: int = 0  # 1: a communication hook of the user's reduces, instead of the exchange
    act: int = REDUCE  # one of ``ACTS``: what ranks have come for; if to reduce, ``bucket`` follows
    data_position: int = -1  # of the source that the micro-batches of a declared step have their data from
    data_identity: int = 0  # digest of what decides which samples it reads
    buffers: int = 0  # with the last bucket: of the module's, a checksum (step/agreement.py)
    fed: int = 0  # what the first micro-batches of this rank were given (step/first_inputs.py)


AGREED = (
    "version",
    "act",
    "declared",
    "hooked",
    "step",
    "exchange",
    "declared_step",
    "data_identity",
    "data_position",
    "round",
    "bucket",
    "num_elements",
    "num_leaves",
    "num_carried",
    "num_running",
)
NUM_FIELDS = len(Header._fields)
_agreed = itemgetter(*map(Header._fields.index, AGREED))
_left = attrgetter("left")
WORDS = {
    "version": "speaks header version",
    "declared": "is in a declared step (1) or not (0):",
    "hooked": "reduces by a communication hook (1) or not (0):",
    "step": "has made optimizer steps:",
    "exchange": "has synchronised since then:",
    "declared_step": "declares step",
    "data_identity": "reads other samples; digest of data set and sizes:",
    "data_position": "has read samples of its data:",
    "round": "is in the round of micro-batches number",
    "bucket": "sends bucket",
    "num_elements": "has a bucket of elements:",
    "num_leaves": "expects micro-batches in the step:",
    "num_carried": "adds to gradients that were there before, of parameters of the unit:",
    "num_running": "has running statistics to tell of, of buffers:",
}


def header_length(num_parameters: int) -> int:
    """Words of a header with the flags of ``num_parameters``, which has each a gradient, which is frozen."""
    return NUM_FIELDS + max(NUM_WORDS, -(-2 * num_parameters // BITS))


def pack(header: Header, flags: int, num_flags: int, length: int, told: Sequence[int] = ()) -> Tensor:
    """(length,) int64: the header, then ``flags``, a bit for each, or the words ``told``."""
    words = [*header, *told]
    for start in range(0, num_flags, BITS):
        words.append(flags >> start & _WORD)
    # Through an array, in a third of the time that torch takes for a list.
    return torch.frombuffer(array("q", words + [0] * (length - len(words))), dtype=torch.int64)


def unpack(rows: Tensor, num_flags: int) -> tuple[list[Header], list[int]]:
    """Headers and flags by rank, out of (W, length) words."""
    headers, flags = [], []
    for row in rows.tolist():
        headers.append(tuple.__new__(Header, row[:NUM_FIELDS]))  # ``_make``, which is one call more
        told = 0
        for i in range(-(-num_flags // BITS)):
            told |= row[NUM_FIELDS + i] << i * BITS
        flags.append(told)
    return headers, flags


def words_of(rows: Tensor, count: int) -> list[list[int]]:
    """The ``count`` words that each rank has told, out of (W, length) words."""
    found: list[list[int]] = rows[:, NUM_FIELDS : NUM_FIELDS + count].tolist()
    return found


def disagreement(headers: Sequence[Header], ranks: Sequence[int]) -> Problem | None:
    """Why these headers do not belong to one exchange, in words that name ranks; None if they do."""
    if len(set(map(_agreed, headers))) == 1 and not any(map(_left, headers)):
        return None
    gone = [rank for rank, header in zip(ranks, headers, strict=True) if header.left]
    if gone:
        names = " and ".join(f"rank {rank}" for rank in gone)
        return Problem(
            f"{names} left step {headers[0].step} before its gradients were whole (an exception, or a break "
            "out of micro_batches): nothing was reduced",
            f"{names} left the step",
            "The cause stands in that rank's own traceback",
        )
    for name in AGREED:
        values = [getattr(header, name) for header in headers]
        if len(set(values)) > 1:
            return _out_of_step(name, values, ranks)
    return None


def whereabouts(header: Header) -> str:
    """Which step of the loop ``header`` is of, as errors say it."""
    declared = f", in micro_batches(step={header.declared_step})" if header.declared else ""
    return f"after {header.step} optimizer step{'s' * (header.step != 1)}{declared}"


def _out_of_step(name: str, values: Sequence[int], ranks: Sequence[int]) -> Problem:
    """ "rank 2 <does> 7, the others 6", with the odd ones first."""
    common = Tally(values).most_common(1)[0][0]
    in_words = {value: f"{WORDS[name]} {value}" for value in values} if name in WORDS else ACTS
    does = {value: in_words.get(value, f"has come for {value}") for value in values}
    odd = {rank: value for rank, value in zip(ranks, values, strict=True) if value != common}
    rest = ", ".join(str(rank) for rank in ranks if rank not in odd)
    others = f"{rest} {does[common]}" if name == "act" else f"{rest}: {common}"
    said = "; ".join(f"rank {rank} {does[value]}" for rank, value in odd.items())
    return Problem(
        f"the ranks are out of step: {said}; rank {others}",
        f"rank {', '.join(map(str, odd))} {'is' if len(odd) == 1 else 'are'} out of step",
        _FIX[name],
    )


_FIX = {
    "step": "Each rank must call optimizer.step() and synchronise equally often: give every rank the same "
    "number of batches, or use model.micro_batches(G), where a rank may have none",
    "exchange": "Each rank must run the same number of synchronised backwards between two optimizer steps: "
    "look for a backward that some ranks skip, or that only some run under no_sync()",
    "declared_step": "Random numbers are keyed by the step: load the same checkpoint on every rank, and pass "
    "the same step= to micro_batches, or none",
    "data_identity": "Pass to micro_batches(), on every rank, an instep.Loader with the same number of "
    "samples, sizes, seed, shuffle and lengths, or none on any",
    "data_position": "Read it in the same steps on every rank, and resume it at the same position",
    "round": "Every rank must run its loop over micro_batches(G) to the end",
    "bucket": "The same cause as a different number of synchronised backwards",
    "declared": "All ranks must take the same step inside model.micro_batches(G), or all outside of it",
    "act": "Each rank must do the same in the same order, on every rank or on none: synchronised backwards, "
    "clip_grad_norm_, a GradScaler's unscale_, optimizer.step(), gradients that are set by hand",
    "hooked": "Call register_comm_hook on every rank, before the first backward",
    "num_elements": "Wrap the same module, with the same options, on every rank",
    "num_leaves": "micro_batches(G) must be given the same G on every rank",
    "num_carried": "Each rank must discard gradients (zero_grad, .grad = None) at the same point of the loop",
    "num_running": "The norms of the module must track statistics on every rank, or on none",
    "version": "Install the same version of instep on every host",
}
