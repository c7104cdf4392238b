"""Which steps are skipped: those on a list, those whose gradient is not finite, and, if asked, spikes.

A skipped step counts as a step: its samples are read, the schedule of the learning rate goes on, and weights
and moments stay, because the optimizer finds no gradients. Nothing but the step's number and
the norms so far is looked at, and a norm has the same bits on every rank and any number of them; so all
ranks decide alike without a message, and on every placement the same steps are skipped.

A spike is a norm above median + n x MAD of the last accepted norms (MAD: the median absolute deviation from
the median, which a few outliers do not move, as they would the standard deviation).
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from instep.checkpoint.manifest import Json
from instep.errors import CheckpointRejected
from instep.run.settings import ChecksConfig

WINDOW = 64  # accepted norms that a spike is measured by
ENOUGH = 16  # of them, before the guard acts
LEAST_DEVIATION = 0.01  # of the median: norms that hardly change must not make a hair trigger


class Health:
    """Decides about one step after the other.

    Before a step: ``planned``. After its backward: ``judge``, once; if that gives a reason, ``exhausted``
    says whether it was one too many. ``state`` belongs to the state that training carries from step to step,
    beside weights and moments: a step that is made again needs the state of before it.

    ``skipped`` counts the steps that ``judge`` has had skipped, ``in_a_row`` those since the last accepted
    one; planned ones are in neither.
    """

    def __init__(self, checks: ChecksConfig) -> None:
        self.checks = checks
        self.skipped = 0
        self.in_a_row = 0
        self._norms: deque[float] = deque(maxlen=WINDOW)

    @property
    def exhausted(self) -> bool:
        """Whether more steps in a row were skipped than ``max_skipped``: the run must end."""
        return self.in_a_row > self.checks.max_skipped

    @property
    def at_the_limit(self) -> bool:
        """Whether one more skipped step ends the run."""
        return self.in_a_row >= self.checks.max_skipped

    def planned(self, step: int) -> str | None:
        """Why ``step``, counted from 0, is skipped whatever its gradient, or None. It needs no forward."""
        listed = step in self.checks.skip_steps
        return f"step {step} is in skip_steps" if listed else None

    def judge(self, norm: float) -> str | None:
        """Why the step whose gradient has this ``norm``, before clipping, is to be skipped, or None."""
        reason = self._reason(norm)
        if reason is not None:
            self.skipped += 1
            self.in_a_row += 1
            return reason
        self.in_a_row = 0
        if self.checks.spike:
            self._norms.append(norm)
        return None

    def state(self) -> Json:
        """All that the next decisions depend on, besides the settings."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "norms": list(self._norms)}

    def restore(self, state: Json) -> None:
        """Go on from what ``state`` has returned, here or elsewhere.

        Raises:
            CheckpointRejected: it is nothing that ``state`` returns.
        """
        match state:
            case {"skipped": skipped, "in_a_row": in_a_row, "norms": [*norms], **more} if (
                not more
                and (type(skipped) is type(in_a_row) is int and 0 <= in_a_row <= skipped)
                and (len(norms) <= WINDOW and all(map(_is_norm, norms)))
            ):
                self.skipped, self.in_a_row = skipped, in_a_row
                self._norms = deque(norms, maxlen=WINDOW)
            case _:
                raise CheckpointRejected(
                    "the state of the step checks: expected two counts, skipped and in_a_row, and at most "
                    f"{WINDOW} finite norms, got {str(state)[:80]}"
                )

    def _reason(self, norm: float) -> str | None:
        if not math.isfinite(norm):
            return f"gradient norm is {norm}"
        if not self.checks.spike or len(self._norms) < ENOUGH:
            return None
        middle = median(self._norms)
        deviation = max(median(abs(norm - middle) for norm in self._norms), LEAST_DEVIATION * middle)
        if norm > middle + self.checks.spike * deviation:
            return f"spike: norm {norm:.4g}, median {middle:.4g} + {self.checks.spike:g} x {deviation:.4g}"
        return None


def _is_norm(value: Json) -> bool:
    return type(value) is float and math.isfinite(value) and value >= 0
