"""What steps, schedules or feeds a registered model without being registered itself: an error, once it shows.

It would begin anew where a rank takes another's place, and where the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from instep.checkpoint.registered import Registered


class Unregistered:
    """Watches for an optimizer, a schedule or an ``instep.Loader`` that is not among ``registered``.

    A step: ``begin``, then ``end``; ``require_known`` before an optimizer steps.
    """

    def __init__(self, registered: Registered) -> None:
        self.registered = registered
        carried = list(registered.others.values())
        carried += [x for each in carried for x in getattr(each, "__dict__", {}).values()]  # wrapped once
        self._sources = [x for x in carried if hasattr(type(x), "advance") and hasattr(x, "position")]
        scheduled = {id(getattr(x, "optimizer", None)) for x in carried}
        self._unscheduled = {
            name: x
            for name, x in registered.optimizers.items()
            if hasattr(x.step, "_wrapped_by_lr_sched") and id(x) not in scheduled  # as torch marks it
        }
        self._rates = self._rates_now()
        self._positions: list[int] = []
        self._stepped: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # in which step it was seen

    def begin(self) -> None:
        """A step begins."""
        self._require_schedules()
        self._positions = [x.position for x in self._sources]

    def end(self, step: int, *, has_read: bool) -> None:
        """``step`` ends; whether it ``has_read`` what some loader gave."""
        self._require_schedules()
        if has_read and self._positions == [x.position for x in self._sources]:
            raise ValueError(
                f"step {step} has read from an instep.Loader that is not registered: a rank that takes "
                "another's place would read from the beginning, and so would a run that goes on: "
                "run.register(data=loader), by a name of its own"
            )

    def require_known(self, optimizer: Optimizer, step: int, steppers: Iterable[Optimizer]) -> None:
        """ValueError for one that is not registered, and steps a registered model, or steps again.

        One that a step makes for itself is made again with the step. ``steppers``: those of which registered
        optimizers are made.
        """
        self.registered.require_registered(optimizer)
        is_part = any(optimizer is local for local in steppers)
        if not is_part and self._stepped.setdefault(optimizer, step) != step:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            raise ValueError(
                f"{type(optimizer).__name__} steps {len(parameters)} parameters, the first of shape "
                f"{list(parameters[0].shape)}, and neither it nor their model is registered: they would be "
                "lost with a rank: register both"
            )

    def _rates_now(self) -> dict[str, list[object]]:
        return {name: [group["lr"] for group in x.param_groups] for name, x in self._unscheduled.items()}

    def _require_schedules(self) -> None:
        for name, rates in self._rates_now().items() if self._unscheduled else ():
            if rates != self._rates[name]:
                raise ValueError(
                    f"a schedule has changed the learning rate of {name!r}, and is not registered: it would "
                    "begin anew when a rank is replaced and when the run goes on: "
                    "run.register(schedule=schedule), by a name of its own"
                )
