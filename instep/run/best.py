"""Which checkpoint is the best: that of the step whose figure was better than all before it.

The script logs the figure, perhaps on the first rank alone, which decides for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from instep.checkpoint.manifest import Json
from instep.errors import CheckpointRejected

LOWER, HIGHER = "min:", "max:"


@dataclass
class Best:
    """The best ``value`` so far of the figure ``name``, after ``step`` steps (-1: none)."""

    name: str
    higher: bool
    value: float = math.nan
    step: int = -1

    @staticmethod
    def of(setting: str) -> Best | None:
        """As ``checkpoint.best`` says: ``val_loss``, ``max:val_acc``; None for "".

        Raises:
            ValueError: it does not say whether more is better.
        """
        if not setting:
            return None
        if setting.startswith((LOWER, HIGHER)):
            return Best(setting[len(LOWER) :], setting.startswith(HIGHER))
        if "loss" in setting:
            return Best(setting, higher=False)
        raise ValueError(
            f"checkpoint.best {setting!r}: expected to be told which is better: {HIGHER}{setting} or "
            f"{LOWER}{setting}"
        )

    def improves(self, step: int, value: float | None) -> bool:
        """Whether ``value``, after ``step`` steps, is the best so far, and from now on it is."""
        if value is None or math.isnan(value):
            return False
        is_better = self.step < 0 or (value > self.value if self.higher else value < self.value)
        if is_better:
            self.value, self.step = value, step
        return step == self.step

    def to_json(self) -> Json:
        """For a checkpoint: what ``is_best`` reads."""
        return [self.value, self.step] if self.step >= 0 else None

    def restore(self, state: Json) -> None:
        """Go on from what ``to_json`` has returned.

        Raises:
            CheckpointRejected: it is something else.
        """
        kinds = [type(x) for x in state] if isinstance(state, list) else []
        if state is not None and kinds not in ([float, int], [int, int]):
            raise CheckpointRejected(
                f"expected the best figure and its step, got {str(state)[:80]}: take another checkpoint"
            )
        self.value, self.step = (math.nan, -1) if state is None else (float(state[0]), state[1])
