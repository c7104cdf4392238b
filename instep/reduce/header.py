"""The header that precedes every exchange, and the check that all ranks are in the same exchange.

A backend pairs whatever messages arrive next: a rank that is one bucket or one step ahead would be averaged
with the wrong numbers, or hang. Therefore every exchange starts with an all-gather of one small record per
rank (``exchange_headers`` of the transport). All ranks read the same records, reach the same verdict, and
raise the same error before any gradient is added.

    | version | declared | step | exchange | bucket | leaves | weight | times | left | ... | op | ... | flags

Other collective operations of a step start with a header of the same length, so a rank in another operation
is named at once instead of at the deadline. Their few words replace the flags.
"""

from __future__ import annotations

from array import array
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from instep.net.hang_report import Problem

VERSION = 11
BITS = 62  # flags per int64 word
_WORD = (1 << BITS) - 1
NUM_WORDS = 4  # at least, in the place of flags

REDUCE, COMPARE, UPDATE, NORM, UNSCALE, STATISTICS, GLOBAL_BATCH = range(7)
OPERATIONS = {
    REDUCE: "the exchange of gradients",
    COMPARE: "optimizer.step() with gradients that no exchange has reduced",
    UPDATE: "optimizer.step()",
    NORM: "clip_grad_norm_",
    UNSCALE: "a GradScaler's unscale_",
    STATISTICS: "the exchange of running statistics",
    GLOBAL_BATCH: "instep.nn.global_step",
}


class Header(NamedTuple):
    """One rank's record of the exchange that it starts. All ranks must agree on the fields in ``AGREED``."""

    version: int = VERSION
    declared: int = 0  # 1 for a declared step, 0 for an undeclared one
    step: int = 0  # number of optimizer steps so far
    exchange: int = 0  # number of exchanges since the last optimizer step
    bucket: int = 0
    num_elements: int = 0  # of the bucket, with padding
    num_leaves: int = 0  # G of the tree
    weight: int = 0  # sum of the weights of this rank's micro-batches
    ready_ns: int = 0  # when this rank's gradients were complete, time.monotonic_ns()
    launched_ns: int = 0  # when the bucket was queued for its exchange
    left: int = 0  # 1: this rank left the step early and sends nothing
    round: int = 0  # of the step, where each leaf travels on its own (shard/reducer.py)
    update_digest: int = 0  # of the optimizers' steps of parameters in shards (shard/reducer.py)
    declared_step: int = -1  # key of the random numbers of a declared step
    sampled: int = 0  # digest of a sample of the replicated weights (step/replica_watch.py)
    edited: int = 0  # digest of the number of writes to each since the last optimizer step
    num_running: int = 0  # norms whose running statistics follow (step/running_statistics.py)
    hooked: int = 0  # 1: the user's communication hook reduces, instead of the exchange
    op: int = REDUCE  # the operation, one of ``OPERATIONS``; a bucket follows ``REDUCE`` only
    data_position: int = -1  # of the data source of a declared step
    data_identity: int = 0  # digest of the settings that decide which samples the source reads
    buffers: int = 0  # checksum of the module's buffers, with the last bucket (step/agreement.py)
    input_digest: int = 0  # of this rank's first inputs or its loader's first sample (step/input_digest.py)


# Field: (what "rank 1" does, fix). A difference in one field causes differences in later ones.
AGREED = {
    "version": ("uses header version {}", "Install the same version of instep on every host"),
    "op": (
        "is in {}",
        "Each rank must do the same in the same order: synchronised backwards, clip_grad_norm_, a "
        "GradScaler's unscale_, optimizer.step(), gradients that are set by hand",
    ),
    "declared": ("is in {}", "Take the step inside model.micro_batches(G) on every rank, or on none"),
    "hooked": ("reduces with {}", "Call register_comm_hook on every rank, before the first backward"),
    "step": (
        "is at optimizer step {}",
        "Each rank must call optimizer.step() and synchronise equally often: give every rank the same number "
        "of batches, or use model.micro_batches(G), where a rank may have none",
    ),
    "exchange": (
        "is at synchronised backward {} since the last optimizer step",
        "Each rank must run the same number of synchronised backwards between two optimizer steps: look for "
        "a backward that some ranks skip, or that only some run under no_sync()",
    ),
    "declared_step": (
        "declares step {}",
        "Random numbers are keyed by the step: load the same checkpoint on every rank, and pass the same "
        "step= to micro_batches, or none",
    ),
    "data_identity": (
        "reads a data source with digest {}",
        "Pass to micro_batches(), on every rank, an instep.Loader with the same number of samples, sizes, "
        "seed, shuffle and lengths, or none on any",
    ),
    "data_position": (
        "is at sample {} of its data",
        "Read the data in the same steps on every rank, and resume at the same position",
    ),
    "round": ("is in round {} of micro-batches", "Every rank must run its micro_batches(G) loop to the end"),
    "bucket": ("sends bucket {}", "Each rank must run the same number of synchronised backwards"),
    "num_elements": ("has a bucket of {} elements", "Wrap the same module and options on every rank"),
    "num_leaves": ("expects {} micro-batches in the step", "Pass micro_batches the same G on every rank"),
    "update_digest": (
        "has made updates with digest {}",
        "Each rank must step the same sharded parameters with the same options (the learning rate for "
        "instance), and load a state, write to weights and call zero_grad() if the others do",
    ),
    "num_running": ("has running statistics of {} norms", "Track them on every rank, or on none"),
}
_VALUES: Mapping[str, Mapping[int, str]] = {
    "op": OPERATIONS,
    "declared": {0: "an undeclared step", 1: "a declared step"},
    "hooked": {0: "instep's exchange", 1: "a communication hook"},
}
NUM_FIELDS = len(Header._fields)
# A rank that has read nothing is not compared.
SAMPLE_DIFFERS = {
    "input_digest": (
        "has another first sample in its instep.Loader, digest {}",
        "Open the same data set on every rank, in the same order (sort what a directory lists), with the "
        "same library versions; what it draws has to come from generators of torch, Python, numpy or its own "
        "that exist before a sample is read",
    )
}
_agreed = itemgetter(*map(Header._fields.index, AGREED))
_left, _input_digest = map(attrgetter, ("left", "input_digest"))


def header_length(num_parameters: int) -> int:
    """Words of a header with two flags per parameter: has a gradient, is frozen."""
    return NUM_FIELDS + max(NUM_WORDS, -(-2 * num_parameters // BITS))


def pack(header: Header, flags: int, num_flags: int, length: int, words: Sequence[int] = ()) -> Tensor:
    """(length,) int64: the header, then ``flags``, one bit each, or the ``words`` of another operation."""
    row = [*header, *words]
    for start in range(0, num_flags, BITS):
        row.append(flags >> start & _WORD)
    # Through an array, in a third of the time that torch takes for a list.
    return torch.frombuffer(array("q", row + [0] * (length - len(row))), dtype=torch.int64)


def unpack(rows: Tensor, num_flags: int) -> tuple[list[Header], list[int]]:
    """Headers and flags by rank, from (W, length) words."""
    headers, flags = [], []
    for row in rows.tolist():
        headers.append(tuple.__new__(Header, row[:NUM_FIELDS]))  # ``_make`` without its call
        bits = 0
        for i in range(-(-num_flags // BITS)):
            bits |= row[NUM_FIELDS + i] << i * BITS
        flags.append(bits)
    return headers, flags


def disagreement(headers: Sequence[Header], ranks: Sequence[int]) -> Problem | None:
    """Why these headers do not belong to one exchange, naming ranks; None if they do."""
    if len(set(map(_agreed, headers))) == 1 and not any(map(_left, headers)):
        if headers[0].data_position < 0 or len({*map(_input_digest, headers)} - {0}) < 2:
            return None
        read = [(h.input_digest, rank) for h, rank in zip(headers, ranks, strict=True) if h.input_digest]
        return _out_of_step("input_digest", *zip(*read, strict=True))
    gone = [rank for rank, header in zip(ranks, headers, strict=True) if header.left]
    if gone:
        return Problem(
            f"{_names(gone)} left step {headers[0].step} before its gradients were complete (an exception, "
            "or a break out of micro_batches): nothing was reduced",
            f"{_names(gone)} left the step",
            "See the traceback of that rank for the cause",
        )
    for name in AGREED:
        values = [getattr(header, name) for header in headers]
        if len(set(values)) > 1:
            return _out_of_step(name, values, ranks)
    return None


def describe_step(header: Header) -> str:
    """The step of the loop that ``header`` belongs to, for error messages."""
    declared = f", in micro_batches(step={header.declared_step})" if header.declared else ""
    return f"after {header.step} optimizer step{'s' * (header.step != 1)}{declared}"


def _out_of_step(name: str, values: Sequence[int], ranks: Sequence[int]) -> Problem:
    """ "rank 2 sends bucket 7; ranks 0, 1: 6", with the odd ranks first."""
    phrase, fix = (AGREED | SAMPLE_DIFFERS)[name]
    text = {value: _VALUES.get(name, {}).get(value, str(value)) for value in values}
    common = Tally(values).most_common(1)[0][0]
    odd = {rank: value for rank, value in zip(ranks, values, strict=True) if value != common}
    differing = "; ".join(f"rank {rank} {phrase.format(text[value])}" for rank, value in odd.items())
    others = _names([rank for rank in ranks if rank not in odd])
    return Problem(
        f"the ranks are out of step: {differing}; {others}: {text[common]}",
        f"{_names([*odd])} {'is' if len(odd) == 1 else 'are'} out of step",
        fix,
    )


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
