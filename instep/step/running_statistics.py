"""Batch norm in declared steps: running statistics that do not depend on the placement.

Batch norm changes its buffers in forward, once per micro-batch:

    running = (1 - momentum) * running + momentum * statistic

If every rank did so for its own micro-batches, the ranks' buffers would differ. So forward only measures, and
at the end of the step every rank applies the measurements of all micro-batches, in their order:

    rank 0   measures in micro-batches 0, 1     |  all-gather  |   applies 0, 1, 2, 3
    rank 1   measures in micro-batches 2, 3     |              |   applies 0, 1, 2, 3

To measure, the forward of a norm runs on scratch buffers with a momentum of 1, which leaves the bare
statistics there. ``lerp_`` applies them in the dtype of the buffers, with the same bits on all placements; a
plain loop, where the kernel rounds in its own way, may have other bits.

Until the end of the step the buffers are as before it. So a forward in eval mode within a step computes with
those, on any number of ranks, and a step that is given up leaves no trace. What checkpointing computes again
in backward is not measured a second time. The norms are torch's own (``nn.BatchNorm1d``,
``nn.InstanceNorm2d``, ...); any other buffer that forward changes is refused (``micro_batches.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

from instep.errors import Desync
from instep.hook import Hook, weakly
from instep.memory import bytes_of, tensor_of
from instep.reduce.header import OPERATIONS, STATISTICS

if TYPE_CHECKING:
    from instep.step.reduction import Reduction

EXCHANGE = OPERATIONS[STATISTICS]
LIMIT_BYTES = 1 << 32  # of one rank's
FORWARDS = (_BatchNorm.forward, _InstanceNorm.forward)
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Measured(NamedTuple):
    """What one forward of norm number ``norm`` has measured; ``momentum`` None: a cumulative average."""

    norm: int
    momentum: float | None
    mean: Tensor  # (num_features,), in the dtype of the buffer
    variance: Tensor


class OverGlobalBatch(_BatchNorm):
    """A norm whose statistics are those of all micro-batches; ``settling`` is the step that finds them."""

    settling: Any = None


def tracking_norms(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of ``modules`` that are norms of torch, with torch's own forward, and track statistics."""
    norms = (m for m in modules if isinstance(m, _NormBase) and type(m).forward in FORWARDS)
    tracking = (m for m in norms if m.running_mean is not None and m.running_var is not None)
    return [m for m in tracking if "forward" not in vars(m)]


def running_buffers(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The buffers of ``tracking_norms(modules)``, each once."""
    buffers = (norm._buffers[key] for norm in tracking_norms(modules) for key in BUFFERS)
    return list({id(x): x for x in buffers if x is not None}.values())


class EagerHook(Hook):
    """A hook that compiled code leaves out, without a break in its graph.

    What a compiled norm does to its buffers is not seen, and the declared step refuses it.
    """

    def __call__(self, *args: Any) -> Any:
        if self.function is not None and not is_dynamo_compiling():
            self.function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> EagerHook:
        return EagerHook()


class RunningStatistics:
    """The running statistics of a module's norms in declared steps.

    A step: ``begin``; each visit of a micro-batch within ``leaf``, where norms measure instead of changing
    their buffers; ``exchange``, when all gradients have arrived, and ``apply``, when nothing can fail any
    more. ``remove`` removes all hooks.
    """

    def __init__(self) -> None:
        self.norms: list[nn.Module] = []
        self.measured: dict[int, list[Measured]] = {}  # by micro-batch
        self._found: list[Measured] | None = None  # of the open one
        self._kept: dict[nn.Module, tuple[float | None, dict[str, Tensor | None]]] = {}
        self._handles: list[RemovableHandle] = []

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """A step of ``modules`` begins."""
        self.measured = {}
        norms = tracking_norms(modules)
        if norms == self.norms:
            return
        self.remove()
        self.norms = norms
        self._numbers = {id(norm): number for number, norm in enumerate(norms)}
        before, after = EagerHook(weakly(self._before)), EagerHook(weakly(self._after))
        for norm in norms:
            # The last before forward and the first after it: the hooks of others see the module as it is.
            self._handles.append(norm.register_forward_pre_hook(before))
            self._handles.append(norm.register_forward_hook(after, prepend=True, always_call=True))

    def remove(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()

    def leaf(self, index: int) -> AbstractContextManager[None]:
        """Around a visit of micro-batch ``index``; several visits of one add up."""
        return self._measuring(index) if self.norms else nullcontext()

    @contextmanager
    def _measuring(self, index: int) -> Iterator[None]:
        self._found = []
        try:
            yield
            if self._found:
                self.measured.setdefault(index, []).extend(self._found)
        finally:
            self._found = None
            for norm in list(self._kept):  # of a forward that was interrupted
                self._restore(norm)

    def _before(self, norm: Any, args: Any) -> None:
        if self._found is None or not norm.training or norm in self._kept or id(norm) not in self._numbers:
            return
        self._kept[norm] = norm.momentum, {key: norm._buffers[key] for key in BUFFERS}
        norm.momentum = 1.0
        for key in BUFFERS:
            if (buffer := norm._buffers[key]) is not None:
                norm._buffers[key] = torch.zeros_like(buffer)

    def _after(self, norm: Any, args: Any, output: Any) -> None:
        if norm not in self._kept:
            return
        mean, variance = norm.running_mean, norm.running_var
        momentum = self._restore(norm)
        is_recomputed = torch._C._current_graph_task_id() != -1
        if self._found is not None and output is not None and not is_recomputed:
            self._found.append(Measured(self._numbers[id(norm)], momentum, mean, variance))

    def _restore(self, norm: Any) -> float | None:
        norm.momentum, buffers = self._kept.pop(norm)
        norm._buffers.update(buffers)
        momentum: float | None = norm.momentum
        return momentum

    def exchange(self, reducer: Reduction) -> None:
        """Tell the other ranks what the micro-batches of this one have measured. Collective.

        Raises:
            Desync: a rank has left the step.
            PeerLost: a rank did not come.
        """
        mine = to_bytes(self.measured) if self.measured else b""
        everyone = reducer.exchange_bytes(STATISTICS, EXCHANGE, mine, LIMIT_BYTES)
        for rank, data in zip(reducer.group.ranks, everyone, strict=True):
            if data and rank != reducer.group.global_rank:
                self.measured |= from_bytes(data, self.norms, f"rank {rank}")

    def apply(self) -> None:
        """Every buffer gets its value of after the step: all measurements, in the order of micro-batches."""
        for index in sorted(self.measured):
            for number, momentum, mean, variance in self.measured[index]:
                norm: Any = self.norms[number]
                count = norm.num_batches_tracked
                if count is not None:
                    count.add_(1)
                if momentum is None:
                    momentum = 0.0 if count is None else 1.0 / int(count)
                norm.running_mean.lerp_(mean.to(norm.running_mean.device), momentum)
                norm.running_var.lerp_(variance.to(norm.running_var.device), momentum)
        self.measured = {}


def to_bytes(by_micro_batch: Mapping[int, Sequence[Measured]]) -> bytes:
    """The message that ``from_bytes`` reads: a line of JSON, then means and variances."""
    every = [(index, x) for index, found in by_micro_batch.items() for x in found]
    rows = json.dumps([[index, x.norm, x.momentum] for index, x in every]).encode()
    return rows + b"\n" + b"".join(bytes_of(values) for _, x in every for values in (x.mean, x.variance))


def from_bytes(data: bytes, norms: Sequence[Any], whose: str) -> dict[int, list[Measured]]:
    """What another rank, ``whose``, has measured in each of its micro-batches.

    Raises:
        Desync: a rank with the same norms would not send this.
    """
    at = data.find(b"\n") + 1
    found: dict[int, list[Measured]] = {}
    try:
        for index, number, momentum in json.loads(data[:at]):
            if not 0 <= number < len(norms):
                raise ValueError(f"there is no norm {number}")
            values = []
            for buffer in (norms[number].running_mean, norms[number].running_var):
                values.append(tensor_of(data[at : at + buffer.nbytes], buffer.dtype).view(buffer.shape))
                at += buffer.nbytes
            found.setdefault(int(index), []).append(Measured(number, momentum, *values))
        if at != len(data):
            raise ValueError(f"expected {at} bytes, got {len(data)}")
    except (ValueError, TypeError, RuntimeError) as error:
        raise Desync(
            f"{whose} sent running statistics of other norms than this rank has: build the same modules on "
            "every rank"
        ) from error
    return found
