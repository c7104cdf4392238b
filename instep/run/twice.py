"""Steps that are made twice, by other ranks the second time, and compared: what a step depends on besides its
state, its samples and its number shows here.

    keep the state | step: rank 0 has micro-batches 0 1, rank 1 has 2 3 | hash every gradient, and the state
    go back        | step: rank 0 has micro-batches 2 3, rank 1 has 0 1 | hash again: all equal?

So it finds a loss that reads the clock or a generator of its own, an object that changes and is not
registered, and a rank that computes otherwise than the others. It costs the step once more, and a copy of the
state. Where each rank has data of its own, under a parameter server, and where gradients are divided
(``fully_shard``), the same ranks compute again, and the states are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from instep.errors import ReplicasDiffer
from instep.mesh.rank_process import as_told
from instep.replicate.gradient_hashes import GradientHashes
from instep.replicate.wrapper import DataParallel
from instep.run.recovery import Copy
from instep.run.script_step import StepWork

OPERATION = "the comparison of a step that was made twice"
LIMIT_BYTES = 1 << 28
DIGITS = 10  # of a gradient's hash, of which there are many

Votes = dict[str, dict[str, list[str]]]
"""By model, and micro-batch: the hash of each parameter's gradient."""


class Twice:
    """Makes one step in ``every`` of ``work`` twice; 0: none.

    ``begin`` and ``end`` of each step: ``end`` says whether it is to be made again.
    """

    def __init__(self, work: StepWork, every: int) -> None:
        self.work, self.training, self.every = work, work.training, every
        self._copy: Copy | None = None
        self._votes: list[Votes] = []
        self._states: list[Mapping[str, str]] = []

    def begin(self) -> bool:
        """A step begins, for the first time or the second; whether it is to be watched."""
        if not self.every or self.training.steps_done % self.every:
            return False
        if self._copy is None:
            self._copy, self._votes, self._states = Copy(self.training), [], []
        for model in self.work.reduced.values():
            if isinstance(model, DataParallel):  # a server adds what each rank sends in the ranks' order
                model._reducer.turn = len(self._states)
        return True

    def end(self) -> bool:
        """The step is over: whether all ranks are to make it again. Collective, where it was watched.

        Raises:
            ReplicasDiffer: on all ranks: it came out otherwise.
        """
        if self._copy is None:
            return False
        self.stop()
        training, reduced = self.training, self.work.reduced
        self._votes.append({name: _leaves(reduced[name], x) for name, x in self.work.hashes.items()})
        self._states.append(training.state_digests()[1])
        if len(self._states) == 1:
            self._copy.put(training)
            return True
        self._compare()
        self._copy = None
        return False

    def stop(self) -> None:
        """Have the usual micro-batches again."""
        for model in self.work.reduced.values():
            model._reducer.turn = 0

    def give_up(self) -> None:
        """A rank was lost: the step begins anew, whatever was kept of it."""
        self.stop()
        self._copy = None

    def _compare(self) -> None:
        training, group = self.training, self.training.mesh.world.group
        changed = [name for name, its in self._states[0].items() if self._states[1].get(name) != its]
        mine = json.dumps({"votes": self._votes, "changed": changed}).encode()
        everyone = [json.loads(x) for x in group.all_gather_bytes(mine, OPERATION, limit=LIMIT_BYTES)]
        told = dict(zip(group.ranks, everyone, strict=True))
        lines = [*_gradients(told, self._names()), *_states(told)]
        if not lines:
            return
        ranks = tuple(rank for rank, its in told.items() if its["changed"])
        error = ReplicasDiffer(
            f"step {training.steps_done} was made twice, from the same state, and came out otherwise:\n  "
            + "\n  ".join(lines)
            + "\nLook in the loop for a clock, for random numbers of a generator of its own (draw them from "
            "torch's, Python's or numpy's, which are keyed), and for an object that changes and is not "
            "registered. If there is none, a rank's arithmetic or memory is broken",
            ranks=ranks,
            parameters=tuple(changed[:1]),
        )
        raise as_told(error) if group.rank else error

    def _names(self) -> dict[str, list[str]]:
        return {name: list(model._reducer.names) for name, model in self.work.reduced.items()}


def _leaves(model: Any, seen: GradientHashes) -> dict[str, list[str]]:
    """By micro-batch, where all ranks mean the same by its number."""
    if model.step_mode != "declared":
        return {}
    names = model._reducer.names
    return {
        str(leaf): [digests.get(name, "")[:DIGITS] for name in names] for leaf, digests in seen.leaves.items()
    }


def _gradients(told: Mapping[int, Any], names: Mapping[str, list[str]]) -> list[str]:
    """A line for each micro-batch whose gradient came out otherwise."""
    votes: dict[tuple[str, int], list[tuple[int, list[str]]]] = {}
    attempts = [(number, rank) for number in range(2) for rank in told]  # as they were made
    for number, rank in attempts:
        for model, leaves in told[rank]["votes"][number].items():
            for leaf, digests in leaves.items():
                votes.setdefault((model, int(leaf)), []).append((rank, digests))
    lines = []
    for (model, leaf), its in sorted(votes.items()):
        first = next((i for i in range(len(its[0][1])) if len({digests[i] for _, digests in its}) > 1), None)
        if first is not None:
            by = " and then ".join(f"rank {rank}" for rank, _ in its)
            lines.append(f"micro-batch {leaf}, by {by}: the gradient of {names[model][first]!r}")
    return lines


def _states(told: Mapping[int, Any]) -> list[str]:
    """A line for the ranks whose state came out otherwise."""
    found = {rank: its["changed"] for rank, its in told.items() if its["changed"]}
    return [f"rank {rank}: {changed[0]!r} after the step" for rank, changed in list(found.items())[:8]]
