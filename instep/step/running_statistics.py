"""Batch norm in declared steps: forward measures, and the step's end applies what all micro-batches measured.

What forwards measure is written down (``watched_norms.py``); the ranks tell it each other when all gradients
have arrived, and then every rank applies it in the order of the micro-batches (``reduce/running.py``).

Until then the buffers are as before the step. So a forward in eval mode within a step computes with the
statistics of before the step, on any number of ranks, and of a step that is given up nothing is left.
Forwards count as in a loop without instep: one that checkpointing computes again counts again.

It costs one small exchange per step, of the statistics of a rank's micro-batches; without norms, nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from instep.errors import Desync
from instep.hook import Hook, weakly
from instep.net.agree import all_tell
from instep.net.lane import Lane
from instep.net.process_group import Group
from instep.reduce.running import Changes, apply, from_bytes, to_bytes
from instep.step.watched_norms import Recording, find_norms

EXCHANGE = "the exchange of running statistics"
LIMIT_BYTES = 1 << 32  # of one rank's


class RunningStatistics:
    """The running statistics of a module in declared steps, which ranks of ``group`` exchange on ``lane``.

    A step: ``begin``; each visit of a micro-batch within ``leaf``; ``exchange``, when all gradients have
    arrived, and ``apply``, when nothing can fail any more. Or ``leave`` in the place of ``exchange``.
    ``handles`` are of the hooks.
    """

    def __init__(self, group: Group, lane: Lane) -> None:
        self.handles = Handles()
        self._group, self._lane = group, lane
        self._hooked: WeakSet[nn.Module] = WeakSet()
        self._recording = Recording([])
        self._buffers: list[Tensor] = []
        self._measured: dict[int, Changes] = {}  # by micro-batch

    def begin(self, named_modules: Iterable[tuple[str, nn.Module]]) -> int:
        """A step begins, of these; how many buffers it may change, which has to be the same on all ranks."""
        norms, self._buffers = find_norms(named_modules)
        self._recording = Recording(norms)
        self._measured = {}
        for norm in norms:
            if norm.module not in self._hooked:
                self._hook(norm.module)
        return len(self._buffers)

    def _hook(self, norm: nn.Module) -> None:
        self._hooked.add(norm)
        show, hide = EagerHook(weakly(self._show)), EagerHook(weakly(self._hide))
        # The last before forward and the first after it: the hooks of others see the module as it is.
        self.handles.add(norm.register_forward_pre_hook(show))
        self.handles.add(norm.register_forward_hook(hide, prepend=True))

    def _show(self, norm: nn.Module, args: Any) -> None:
        self._recording.show(norm)

    def _hide(self, norm: nn.Module, args: Any, output: Any) -> None:
        self._recording.hide(norm)

    def leaf(self, index: int) -> AbstractContextManager[None]:
        """Around a visit of micro-batch ``index``, to which belongs what forwards measure. Several add up.

        Raises:
            ValueError: forward has looked at a counter that it changes.
        """
        return self._recorded(index) if self._buffers else nullcontext()

    @contextmanager
    def _recorded(self, index: int) -> Iterator[None]:
        with self._recording.open():
            yield
        if changes := self._recording.changes():
            self._measured[index] = [*self._measured.get(index, ()), *changes]

    def exchange(self) -> None:
        """Tell the others what the micro-batches of this rank have measured. Collective.

        Raises:
            Desync: a rank has left the step.
            PeerLost: a rank did not come.
        """
        self._lane.run(EXCHANGE, self._tell).wait()

    def leave(self) -> None:
        """Let the others know, in their ``exchange``, that this rank has left the step."""
        self._lane.submit(EXCHANGE, self._say_goodbye, awaited=False)

    def apply(self) -> None:
        """Every buffer gets its value of after the step."""
        measured, self._measured = self._measured, {}
        apply(self._buffers, measured)

    def _tell(self) -> None:
        everyone = self._gather(lambda: to_bytes(self._measured) if self._measured else b"")
        for rank, data in zip(self._group.ranks, everyone, strict=True):
            if data and rank != self._group.global_rank:
                self._measured |= from_bytes(data, self._buffers, f"rank {rank}")

    def _say_goodbye(self) -> None:
        with suppress(Desync):  # its own
            self._gather(_has_left)

    def _gather(self, mine: Callable[[], bytes]) -> list[bytes]:
        kinds, limit = (Desync,), LIMIT_BYTES
        return all_tell(self._group, EXCHANGE, mine, lambda data: data, errors=kinds, limit=limit)[1]


def _has_left() -> bytes:
    raise Desync(
        "left the step when its gradients had been sent (an exception, or a break out of micro_batches): no "
        "gradient was written, and no running statistic"
    )


class Handles:
    """Handles of hooks that come one by one, and are removed together."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class EagerHook(Hook):
    """A hook that compiled code leaves out, without a break in its graph.

    What a compiled norm does to its buffers is not seen, and the declared step refuses it.
    """

    def __call__(self, *args: Any) -> Any:
        if self.function is not None and not is_dynamo_compiling():
            self.function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> EagerHook:
        return EagerHook()
