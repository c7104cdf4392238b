"""A state that another process has: JSON that describes it, and values in memory that was made there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from instep.checkpoint.load import restore
from instep.checkpoint.manifest import canonical
from instep.checkpoint.state import TrainingState, merged
from instep.state.stored import Source, assemble, shards_from_json, shards_to_json

RANK = "0"


@dataclass
class Elsewhere:
    """What it is said to be, ``rows``, ``ties`` and ``options``, and its flat values by name."""

    rows: Any
    ties: Any
    options: Any
    values: dict[str, Tensor]

    @classmethod
    def of(cls, state: TrainingState) -> Elsewhere:
        """A copy of what ``state`` holds."""
        shards = state.shards()
        said = [shards_to_json(shards), state.ties(), state.options()]
        rows, ties, options = json.loads(canonical(said))
        return cls(rows, ties, options, {x.name: x.tensor.flatten().clone() for x in shards})

    def read_into(self, name: str, first: int, out: Tensor) -> None:
        """As ``state.stored.Reader``."""
        out.copy_(self.values[name][first : first + out.numel()])

    def source(self) -> Source:
        return Source(assemble({RANK: shards_from_json(self.rows)}), {RANK: self}, self.ties)

    def restore(self, state: TrainingState, step: int = 0, sha256: str | None = None) -> None:
        """Give ``state`` what is here, as far as it can be believed."""
        restore(state, self.source(), merged([self.options]), step, sha256)

    def layout(self) -> Mapping[str, tuple[list[int], str]]:
        """Shape and dtype by name, in order."""
        return {name: (shape, dtype) for name, shape, dtype, *_ in self.rows}

    def change(self, name: str, *, shape: list[int] | None = None, dtype: str | None = None) -> None:
        """Say another shape or dtype of one tensor; an unknown one is made."""
        row = next((row for row in self.rows if row[0] == name), None)
        if row is None:
            self.rows.append(row := [name, [], "float32", 0, 1, None])
        row[1], row[2] = row[1] if shape is None else shape, dtype or row[2]
        numel = 1
        for size in row[1]:
            numel *= size
        row[4] = numel

    def remove(self, name: str) -> None:
        self.rows = [row for row in self.rows if row[0] != name]
