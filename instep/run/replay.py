"""Steps that are made twice, by other ranks the second time, and compared: what a step depends on besides its
state, its samples and its number shows here.

    keep the state | step: rank 0 has micro-batches 0 1, rank 1 has 2 3 | hash every gradient, and the state
    go back        | step: rank 0 has micro-batches 2 3, rank 1 has 0 1 | hash again: all equal?

So it finds a loss that reads the clock or a generator of its own, an object that changes and is not
registered, and a rank that computes otherwise than the others. It costs the step once more, and a copy of the
state.

If a gradient came out otherwise, it may be the rank, or what the step depends on. So the step is made on:

    by rank   0   1   2      as usual                 micro-batch 0 came to   a
              1   2   0      each has the next one's                              a
              2   0   1      each has the next but one's                      b            rank 1, so far
              0   1   2      as usual, again                                  a
              1   2   0      ...                                                  a
              2   0   1                                                       b            rank 1, each time

Every micro-batch has the opinions of three ranks, each of them twice. A rank that computes otherwise than two
others, and comes to the same again, is named; if any came to something else the second time, it is not known
to be the rank. Two ranks have no majority, and both are named.

Where each rank has data of its own, outside of ``micro_batches``, the same ranks compute again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from instep.errors import ReplicasDiffer
from instep.launch.rank_exit import mark_secondary
from instep.replicate.gradient_hashes import GradientHashes, model_of, reductions_of
from instep.run.recovery import Copy
from instep.run.step import StepWork
from instep.state.replicas import Digests, Odd, listed, odd_one_out, ranks_listed, way_out
from instep.step.reduction import Reduction

OPERATION = "the comparison of a step that was made twice"
LIMIT_BYTES = 1 << 28
DIGITS = 10  # of a gradient's hash, of which there are many
SHOWN = 8  # micro-batches, and ranks, in a message

CLOCK = (
    "Look in the loop for a clock, for random numbers of a generator of its own (draw them from "
    "torch's, Python's or numpy's, which are keyed), and for an object that changes and is not registered. "
    "If there is none, "
)
STEADY = (
    "Every rank reproduced its own gradients, so no clock and no random "
    "number is the cause: the arithmetic or memory of {0} is broken, or it has another processor or other "
    "libraries, or the script does something else there"
)


class Opinion(NamedTuple):
    """What came of a micro-batch on ``rank``: a hash of each gradient, by the parameter's name."""

    rank: int
    gradients: Digests


class Doubt(NamedTuple):
    """A micro-batch of which not all ``opinions``, in the order of time, are alike; None: a rank's own."""

    micro_batch: int | None
    opinions: Sequence[Opinion]


class StepReplay:
    """Makes one step in ``every`` of ``work`` twice, and more often if it came out otherwise; 0: none.

    ``begin`` and ``end`` of each step: ``end`` says whether it is to be made again. Stages of a pipeline are
    computed by other ranks each, as parts of one model are that are reduced apart.
    """

    def __init__(self, work: StepWork, every: int) -> None:
        self.work, self.training, self.every = work, work.training, every
        self._copy: Copy | None = None
        self._seen: list[dict[str, Any]] = []  # by attempt: what this rank has of each reduction
        self._states: list[Mapping[str, str]] = []

    def begin(self) -> dict[str, Reduction]:
        """A step begins, for the first time or another: what is to be watched, by its key."""
        if not self.every or self.training.steps_done % self.every:
            return {}
        if self._copy is None:
            self._copy, self._seen, self._states = Copy(self.training), [], []
        found = self._reductions()
        for reduction in found.values():
            reduction.shift = self._shifts[len(self._states)]
        return found

    def end(self) -> bool:
        """The step is over: whether all ranks are to make it again. Collective, where it was watched.

        Raises:
            ReplicasDiffer: on all ranks: it came out otherwise.
        """
        if self._copy is None:
            return False
        self.stop()
        names = self._names()
        self._seen.append({name: _said(self.work.hashes[name], names[name]) for name in names})
        self._states.append(self.training.state_digests()[1])
        if self._goes_on():
            self._go_back(self._copy)
            return True
        self._copy = None
        return False

    def stop(self) -> None:
        """Have the usual micro-batches again."""
        for reduction in self._reductions().values():
            reduction.shift = 0

    def give_up(self) -> None:
        """A rank was lost: the step begins anew, whatever was kept of it."""
        self.stop()
        self._copy = None

    def _goes_on(self) -> bool:
        """Whether there is more to find out by making the step again."""
        group = self.training.mesh.world.group
        made, planned = len(self._states), len(self._shifts)
        if made == 1 or 2 < made < planned:
            return True
        told = self._gather()
        doubts = _doubts(told, made)
        changed = {rank: its["changed"] for rank, its in told.items() if its["changed"]}
        if not doubts and not changed:
            return False
        if made < planned and any(len({rank for rank, _ in x.opinions}) > 1 for x in doubts):
            return True
        error = what_differs(self.training.steps_done, made, doubts, changed)
        raise mark_secondary(error) if group.rank else error

    def _go_back(self, copy: Copy) -> None:
        """To the state of before the step; what was kept of it may be in use from here on."""
        self._copy = None
        copy.put(self.training)
        del copy
        self._copy = Copy(self.training)

    def _gather(self) -> dict[int, Any]:
        """What each rank has seen, by global rank, and which tensors of its state were others. Collective."""
        first, *others = self._states
        changed = [name for name, its in first.items() if any(x.get(name) != its for x in others)]
        mine = json.dumps({"seen": self._seen, "changed": changed, "names": self._names()}).encode()
        group = self.training.mesh.world.group
        everyone = group.all_gather_bytes(mine, OPERATION, limit=LIMIT_BYTES)
        return {rank: json.loads(x) for rank, x in zip(group.ranks, everyone, strict=True)}

    def _names(self) -> dict[str, Sequence[str]]:
        """Of the parameters, by reduction."""
        return {name: reduction.names for name, reduction in self._reductions().items()}

    def _reductions(self) -> dict[str, Reduction]:
        return dict(reductions_of(self.training.registered.models))

    @property
    def _shifts(self) -> tuple[int, ...]:
        return shifts(self.training.mesh.data.size)


def shifts(num_ranks: int) -> tuple[int, ...]:
    """How many ranks further each has its micro-batches from, by attempt; after two it may be over."""
    others = min(num_ranks, 3)
    return (0, 0) if others == 1 else (*range(others), *range(others))


def what_differs(
    step: int, times: int, doubts: Sequence[Doubt], changed: Mapping[int, Sequence[str]]
) -> ReplicasDiffer:
    """What to raise: which rank it is, or that it is none. ``changed`` tensors of the state, by rank."""
    often = "twice" if times == 2 else f"{times} times"
    begins = f"step {step} was made {often}, from the same state, and"
    odd = odd_rank(doubts)
    if odd is not None:
        lines = _shown(doubts, _steady)
        whose = ranks_listed(odd.ranks) if odd.certain else "one of them"
        # Where three have come to three values, more ranks would not tell more.
        on_more = ", on three ranks or more, so that it is named" * (len(odd.ranks) == 2 and not odd.certain)
        return ReplicasDiffer(
            f"{begins} ranks computed different gradients of one micro-batch:{lines}\n"
            f"{STEADY.format(whose)}.\n{way_out(odd)}{on_more}",
            ranks=odd.ranks,
            parameters=odd.names,
        )
    states = [f"rank {rank}: {names[0]!r} after the step" for rank, names in changed.items()]
    lines = _shown(doubts, _unsteady) + _listed(states)
    alone = _alone(doubts)
    broken = (
        "a rank's arithmetic or memory is broken"
        if alone is None
        else f"rank {alone}'s arithmetic or memory is faulty: only its gradients changed"
    )
    return ReplicasDiffer(
        f"{begins} came out otherwise:{lines}\n{CLOCK}{broken}",
        ranks=tuple(changed),
        parameters=tuple(next((names[:1] for names in changed.values()), ())),
    )


def odd_rank(doubts: Sequence[Doubt]) -> Odd | None:
    """The ranks that computed otherwise; None if it may not be the rank.

    That is, if there are no doubts, or a rank came to something else when it computed the same again.
    """
    votes = []
    for doubt in doubts:
        said: dict[int, Digests] = {}
        for rank, gradients in doubt.opinions:
            if said.setdefault(rank, gradients) != gradients:
                return None
        votes.append(said)
    return odd_one_out(*votes)


def _steady(doubt: Doubt) -> str:
    """Who computed otherwise, each time."""
    odd = odd_one_out(dict(doubt.opinions))
    assert odd is not None
    blame = f": {ranks_listed(odd.ranks)} computed otherwise" if odd.certain else ", all that were asked"
    return f"by {_asked(doubt)}{blame}: {listed(odd.names)}"


def _unsteady(doubt: Doubt) -> str:
    """What came out otherwise, where it may not be the rank."""
    first, *others = (gradients for _, gradients in doubt.opinions)
    name = next(name for name, its in first.items() if any(x.get(name) != its for x in others))
    values = len({gradients.get(name) for _, gradients in doubt.opinions})
    times = len(doubt.opinions)
    often = "twice" if times == 2 else f"{times} times"
    return f"computed {often}, by {_asked(doubt)}: {values} different gradients of {name!r}"


def _asked(doubt: Doubt) -> str:
    return ranks_listed(tuple(sorted({rank for rank, _ in doubt.opinions})))


def _alone(doubts: Sequence[Doubt]) -> int | None:
    """The one rank that all opinions beside a majority come from, if there is a majority in every doubt."""
    ranks = set()
    for doubt in doubts:
        said = [tuple(gradients.values()) for _, gradients in doubt.opinions]
        (most, times), *_ = Counter(said).most_common()
        if 2 * times <= len(said):
            return None
        ranks |= {rank for (rank, _), its in zip(doubt.opinions, said, strict=True) if its != most}
    return ranks.pop() if len(ranks) == 1 else None


def _shown(doubts: Sequence[Doubt], said: Callable[[Doubt], str]) -> str:
    """What is ``said`` of each, a line for each."""
    return _listed([f"{_named(doubt)}, {said(doubt)}" for doubt in doubts])


def _named(doubt: Doubt) -> str:
    if doubt.micro_batch is None:
        return f"rank {doubt.opinions[0].rank}'s own data"
    return f"micro-batch {doubt.micro_batch}"


def _listed(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "".join(f"\n  {line}" for line in [*lines[:SHOWN], *more])


def _said(seen: GradientHashes, names: Sequence[str]) -> dict[str, Any]:
    """What a rank tells of one reduction."""
    leaves = {str(leaf): [its.get(x, "")[:DIGITS] for x in names] for leaf, its in seen.firsts.items()}
    return {"declared": seen.declared, "begun_ns": seen.begun_ns, "leaves": leaves}


def _doubts(told: Mapping[int, Any], times: int) -> list[Doubt]:
    """Those micro-batches that did not come to the same each time, of the first model that has some: later
    ones may have had other weights for it.
    """
    names = {key: own for its in told.values() for key, own in its["names"].items()}
    several = len(set(map(model_of, names))) > 1
    opinions: dict[tuple[str, bool, int], list[Opinion]] = {}
    for attempt in range(times):
        for rank, its in told.items():
            for key, seen in its["seen"][attempt].items():
                own = [f"{model_of(key)}.{name}" for name in names[key]] if several else names[key]
                for leaf, digests in seen["leaves"].items():
                    of_it = opinions.setdefault((key, seen["declared"], int(leaf)), [])
                    of_it.append(Opinion(rank, dict(zip(own, digests, strict=True))))
    for first in _in_order(told):
        doubts = [
            Doubt(leaf if declared else None, its)
            for (key, declared, leaf), its in sorted(opinions.items())
            if model_of(key) == first and any(each.gradients != its[0].gradients for each in its)
        ]
        if doubts:
            return doubts
    return []


def _in_order(told: Mapping[int, Any]) -> list[str]:
    """The models of a step, the first one first, as a rank saw them that had a part in most."""
    seen = (sorted((x["begun_ns"], key) for key, x in its["seen"][0].items()) for its in told.values())
    return max(
        (list(dict.fromkeys(model_of(key) for begun_ns, key in its if begun_ns)) for its in seen), key=len
    )
