"""The state that a training has while it is in a mesh: held, hashed and compared, whatever it is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from instep.checkpoint.manifest import fingerprint
from instep.checkpoint.state import TrainingState
from instep.elastic.heartbeat import Heartbeat
from instep.events import COMPARISON
from instep.mesh.mesh import Mesh
from instep.mesh.process_group import Group
from instep.ordered.hash import Entry, Sampled, SharedHash, bare
from instep.ordered.replicas import compare_replicas
from instep.run.rank_state import Made, RankState
from instep.run.timing import Timing


class HeldState:
    """What a recipe's trainer and a script's training have in common.

    In time order: ``mesh`` and ``group`` are set when ranks meet, ``_hold`` the state when the model is
    wrapped for them; then it may be asked for, until ``_let_go``.
    """

    heartbeat: Heartbeat
    rank_state: RankState
    state: TrainingState
    mesh: Mesh
    group: Group
    timing: Timing
    _hash: SharedHash

    def _hold(self, state: TrainingState) -> None:
        """This is the state from now on."""
        self.state = state
        enter = self.heartbeat.enter if state.is_divided else _ignore
        self._hash = SharedHash(state.group, enter, self.heartbeat.beat)
        self.timing = Timing(self.mesh.recorder, self.group.size)

    def _let_go(self) -> None:
        """Give the mesh back, if there is one, and the state with it."""
        if (mesh := self.__dict__.pop("mesh", None)) is not None:
            mesh.recorder.keep_in_memory()  # a thread that is stuck may record on; the file is the next one's
            for name in ("state", "_hash", "group"):
                self.__dict__.pop(name, None)
            mesh.close()

    @property
    def has_joined(self) -> bool:
        """Whether there is a state, in a mesh, now."""
        return "state" in self.__dict__

    @property
    def steps_done(self) -> int:
        """Optimizer steps that the state is of."""
        return self.rank_state.steps_done

    @property
    def last(self) -> Made | None:
        """The step that led here."""
        return self.rank_state.last

    @property
    def owns(self) -> bool:
        """Whether this rank owns some of the state, or all: it writes that, and takes part in its hash."""
        return self.state.is_divided or self.mesh.rank == 0

    def entries(self) -> list[Entry]:
        """What this rank holds of the state, by name: all of a tensor, or its shard of it; nothing before
        it has joined."""
        if not self.has_joined:
            return []
        return [(bare(shard.name), shard.tensor) for shard in self.state.hashed()]

    def state_sha256(self) -> str:
        """The hash of weights, moments and step. Collective where the state is divided."""
        return self.state_digests()[0]

    def state_digests(self) -> tuple[str, dict[str, str]]:
        """``state_sha256``, and the short hash of each tensor. Collective where the state is divided."""
        self.heartbeat.enter("hash")
        found = self._hash.digests(self.state.owned(self.state.hashed()), self.steps_done)
        self.heartbeat.enter("gather")  # others are told of it next, or wait for it
        return found

    def sampled(self, every: int) -> list[Sampled]:
        """The blocks of the state whose turn it is, one in ``every``. Collective where it is divided."""
        return self._hash.samples(self.state.owned(self.state.hashed()), self.steps_done, every)

    def compare_replicas(self) -> None:
        """Raise ``ReplicasDiffer`` unless ranks that hold the same shards hold the same bits. Collective."""
        self.heartbeat.enter("gather")
        with self.mesh.recorder.span(COMPARISON, lane="host"):
            compare_replicas(self.state.hashed(), self.steps_done, self.group)


def contract_number(contract: Mapping[str, Any], canary: str) -> int:
    """A number above 0 that is another one for another ``contract``, or for another ``canary``."""
    known = f"{fingerprint(contract)} {canary}"
    return int.from_bytes(hashlib.sha256(known.encode()).digest()[:7]) + 1


def _ignore(phase: str) -> None:
    """Of what one rank does for itself, no phase is told."""
