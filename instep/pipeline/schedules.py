"""The schedules of the literature, as generators of what each rank computes. Begin with ``naive``.

F: forward, B: backward = I, which another stage waits for, and W, for which none does; p ranks, m
micro-batches, v chunks (stages per rank). Each schedule mends what the one before leaves:

    naive         one micro-batch after the other: one rank works, p - 1 wait
    gpipe         all forwards, then all backwards: waits only while it fills and drains, (p-1)/m of the work,
                  but holds m micro-batches' activations
    1f1b          each backward as soon as it can be: the same waits, activations of p micro-batches at most
    interleaved   v smaller stages per rank: fills and drains in a v-th of the time, v times the messages
    zb-h1         W apart, where 1f1b would drain: a third of the waits, and its activations
    zb-h2         fills with more forwards, 2p - 1 micro-batches' activations: no waits if F = I = W
    zb-v          two stages per rank, the second half of the model on the way back: that with p activations

                  stages of 4 ranks        0 1 2 3            looped, 2 chunks: 0 1 2 3     V: 0 1 2 3
                                                                                4 5 6 7        7 6 5 4

Sources: Y. Huang et al., "GPipe", 2019 (gpipe). D. Narayanan et al., "PipeDream", 2019, and "Efficient
Large-Scale Language Model Training on GPU Clusters", 2021 (1f1b, interleaved). P. Qi et al., "Zero Bubble
Pipeline Parallelism", 2024 (zb-*).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from instep.pipeline.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Schedule
from instep.pipeline.check import check

V_CHUNKS = 2  # of zb-v: one down the V, one up
OWN = "your own"


def naive(ranks: int, micro_batches: int) -> Schedule:
    """One stage at a time: a micro-batch is through, forward and backward, before the next one begins."""
    order = [(kind, k) for k in range(micro_batches) for kind in (FORWARD, BACKWARD)]
    return Schedule.of([[Action(rank, *one) for one in order] for rank in range(ranks)], "naive")


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards."""
    order = [(kind, k) for kind in (FORWARD, BACKWARD) for k in range(micro_batches)]
    return Schedule.of([[Action(rank, *one) for one in order] for rank in range(ranks)], "gpipe")


def one_forward_one_backward(ranks: int, micro_batches: int) -> Schedule:
    """As many forwards as there are ranks behind, then forward and backward in turns, then backwards."""
    rows = []
    for rank in range(ranks):
        forwards = [Action(rank, FORWARD, k) for k in range(micro_batches)]
        backwards = [[Action(rank, BACKWARD, k)] for k in range(micro_batches)]
        rows.append(_in_turns(forwards, backwards, ahead=ranks - 1 - rank))
    return Schedule.of(rows, "1f1b")


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1f1b over ``chunks`` stages per rank: rank r holds stages r, r + p, r + 2p, ...; Megatron's order.

    Micro-batches go in groups of p: a group goes through the rank's first stage, then through its second,
    and so on, so that it has been around all ranks when the second stage needs it. Megatron and the closed
    forms suppose that p divides m. Here it need not: there are then as many groups, nearly equal and a
    little larger than p, which hold more activations, (v-1) g + 2p - 1 for groups of g, and wait no longer.
    (A last group smaller than p would not do: ranks would wait for it, or for each other for ever.)
    """
    last = chunks - 1
    groups = _groups(micro_batches, max(micro_batches // ranks, 1))
    order = [(chunk, k) for group in groups for chunk in range(chunks) for k in group]
    warm_up = last * len(groups[0])
    rows = []
    for rank in range(ranks):
        forwards = [Action(chunk * ranks + rank, FORWARD, k) for chunk, k in order]
        backwards = [[Action((last - chunk) * ranks + rank, BACKWARD, k)] for chunk, k in order]
        rows.append(_in_turns(forwards, backwards, ahead=warm_up + 2 * (ranks - 1 - rank)))
    return Schedule.of(rows, "interleaved")


def _groups(micro_batches: int, number: int) -> list[range]:
    """``number`` runs of micro-batches, nearly equal; none is longer than the first."""
    edges = [-(-micro_batches * i // number) for i in range(number + 1)]
    return [range(first, end) for first, end in pairwise(edges)]


def zero_bubble_h1(ranks: int, micro_batches: int) -> Schedule:
    """1f1b with W apart: rank r is r weight-gradients late, so that all ranks hold at most p activations."""
    return _zero_bubble(ranks, micro_batches, 1, "zb-h1")


def zero_bubble_h2(ranks: int, micro_batches: int) -> Schedule:
    """Twice as many forwards before the first backward, and W twice as late: 2p - 1 activations on each."""
    return _zero_bubble(ranks, micro_batches, 2, "zb-h2")


def _zero_bubble(ranks: int, micro_batches: int, depth: int, name: str) -> Schedule:
    """What rank r lacks of forwards ahead, it holds in weight-gradients: ``depth`` (p-1-r) + ``depth`` r."""
    rows = []
    for rank in range(ranks):
        late = depth * rank
        forwards = [Action(rank, FORWARD, k) for k in range(micro_batches)]
        backwards = [[Action(rank, INPUT_GRADIENT, k)] for k in range(micro_batches)]
        for k in range(micro_batches):
            backwards[min(k + late, micro_batches - 1)].append(Action(rank, WEIGHT_GRADIENT, k))
        rows.append(_in_turns(forwards, backwards, ahead=depth * (ranks - 1 - rank)))
    return Schedule.of(rows, name)


def zero_bubble_v(ranks: int, micro_batches: int) -> Schedule:
    """Two stages per rank, in a V: rank r holds stages r and 2p-1-r, so the last stage is where the first is.

    A micro-batch comes back to the rank that it started from, so each rank soon has backwards to do, and no
    rank holds more than any other. Written for at least 2p - 1 micro-batches; with fewer, those that are
    not there are left out.
    """
    rows = []
    for rank in range(ranks):
        stages = rank, V_CHUNKS * ranks - 1 - rank
        letters = _v_letters(ranks, max(micro_batches, 2 * ranks - 1), rank)
        counts: dict[str, int] = {}
        row = []
        for letter in letters:
            k = counts.get(letter, 0)
            counts[letter] = k + 1
            if k < micro_batches:
                row.append(Action(stages[letter.islower()], letter.upper(), k))
        rows.append(row)
    return Schedule.of(rows, "zb-v")


def _v_letters(ranks: int, micro_batches: int, rank: int) -> str:
    """A rank's order in letters: F, I, W of the stage on the way down, f, i, w of that on the way up.

    The k-th of a letter is that of micro-batch k.
    """
    behind = ranks - rank
    return (
        "F" * (2 * behind - 1)  # until the first micro-batch is back
        + "fF" * rank
        + "fiw" * behind
        + "FIWfiw" * (micro_batches - 2 * ranks + 1 + rank)
        + "IWfiw" * (behind - 1)  # the last forwards come up
        + "Ii" * rank
        + "IW" * behind
        + "w" * rank
        + "W" * rank
    )


def _in_turns(forwards: list[Action], backwards: list[list[Action]], ahead: int) -> list[Action]:
    """The first ``ahead`` forwards, then a forward and a backward in turns, then the backwards left."""
    row = forwards[:ahead]
    for k, backward in enumerate(backwards):
        row += [*forwards[ahead + k : ahead + k + 1], *backward]
    return row


NAMES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
    "zb-v": zero_bubble_v,
}


def own(given: str, chunks: int | None = None) -> Schedule | None:
    """The schedule whose text is ``given``; None for one of ``NAMES``.

    Raises:
        ValueError: it is neither, it is illegal, or ``chunks`` are given where the text says what stages do.
    """
    if given in NAMES:
        return None
    try:
        found = Schedule.parse(given, OWN)
    except ValueError as error:
        if len(given.split()) > 1:  # a text, though not a right one
            raise ValueError(f"the schedule of your own: {error}") from None
        raise ValueError(
            f"expected a schedule of {', '.join(NAMES)}, or the text of one of your own, a row of actions "
            f"per rank, got {given[:40]!r}: {error}. Pass the text of a file, not its path"
        ) from None
    check(found)
    if chunks is not None:
        raise ValueError(
            f"a schedule of your own says itself which stages a rank has, got chunks={chunks}: leave it out"
        )
    return found


def generate(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule called ``name``, one of ``NAMES``.

    Args:
        chunks: stages per rank. Only interleaved leaves a choice, by default 2; zb-v has 2, the others 1.

    Raises:
        ValueError: there is none of this name, or not with so many ranks, micro-batches or chunks.
    """
    if name not in NAMES:
        raise ValueError(f"expected a schedule of {', '.join(NAMES)}, got {name!r}")
    if ranks < 1 or micro_batches < 1 or (chunks is not None and chunks < 1):
        counts = f"{ranks} ranks, {micro_batches} micro-batches" + (f", {chunks} chunks" if chunks else "")
        raise ValueError(f"expected at least one of each, got {counts}")
    if name == "interleaved" and chunks is not None:
        return interleaved(ranks, micro_batches, chunks)
    made = NAMES[name](ranks, micro_batches)
    has = made.num_stages // ranks
    if chunks not in (None, has):
        raise ValueError(
            f"{name} has {has} stages per rank, got chunks={chunks}: leave it out, or take interleaved"
        )
    return made
