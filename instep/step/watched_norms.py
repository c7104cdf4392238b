"""What batch norm would do to its buffers, written down in the place of doing it.

While the forward of a norm runs, its buffers are ``Watched``: tensors over the same memory that are told of
every operation on them. ``batch_norm`` is given scratch memory in their place and a momentum of 1, which
leaves the bare statistics of the batch there; a number that is added to a counter is kept. Both become
``BufferChange``s (``reduce/running.py``). Whatever else forward does to the buffers happens to their
memory, where the declared step finds it, and refuses it by name.

Watched are the layers of torch (``nn.BatchNorm1d``, ``nn.InstanceNorm2d``, ...), and every module that names
the buffers of its own which ``F.batch_norm``, ``F.instance_norm`` and ``add_`` of an integer change:

    running_statistics = ("mean", "variance", "num_batches")
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from instep.reduce.running import BufferChange, Changes, Rule

PROBE = float(1 << 24)  # what rounding to float32 has cut off, times this, is a number of float32 again
RUNNING = ("running_mean", "running_var")
_AS_BUILT_IN = ("input", "weight", "bias", *RUNNING)
_AS_FUNCTION = ("input", *RUNNING, "weight", "bias")


@dataclass(frozen=True)
class Norm:
    """A module whose running statistics can be told apart: the number of each buffer, by its attribute."""

    name: str
    module: nn.Module
    numbers: Mapping[str, int]


@dataclass(frozen=True)
class Measured:
    """What a forward has measured for one buffer, (numel,) or (num_rows, numel)."""

    number: int
    statistic: Tensor
    counter: int = -1  # whose count gives the momentum
    num_rows: int = 0


def find_norms(named: Iterable[tuple[str, nn.Module]]) -> tuple[list[Norm], list[Tensor]]:
    """The norms among modules with names, and their buffers by number; one that two share has one number."""
    buffers: list[Tensor] = []
    number: dict[int, int] = {}
    norms = []
    for name, owner in named:
        if not owner._buffers:  # most: to ask one for what it has not takes a microsecond
            continue
        numbers = {}
        for key in _watched_keys(owner):
            buffer = owner._buffers.get(key)
            if buffer is None or buffer.is_complex() or buffer.dtype is torch.bool:
                continue
            if id(buffer) not in number:
                number[id(buffer)] = len(buffers)
                buffers.append(buffer)
            numbers[key] = number[id(buffer)]
        if numbers:
            norms.append(Norm(name, owner, numbers))
    return norms, buffers


def _watched_keys(owner: nn.Module) -> Sequence[str]:
    named = getattr(owner, "running_statistics", None)
    if isinstance(named, tuple):
        return [key for key in named if isinstance(key, str)]
    return list(owner._buffers) if isinstance(owner, _NormBase) else ()


class Watched(Tensor):
    """A buffer as a norm sees it while its forward runs: the same memory, and told of every operation.

    ``buffer`` is the real one, ``counter`` the one counter of the same norm. Of a counter: ``added`` is what
    forwards have added in this micro-batch; ``momentum`` what a norm makes of the count, from when it has
    read it until it uses that; ``was_read``: something else may have read it.
    """

    recording: Recording
    buffer: Tensor
    number: int
    counter: Watched | None
    added: int
    momentum: float | None
    was_read: bool
    is_counter: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return HANDLERS.get(func, _other)(func, args, kwargs or {})

    @classmethod
    def of(cls, buffer: Tensor, number: int, recording: Recording) -> Watched:
        """``buffer``, watched for ``recording``."""
        watched = torch.Tensor._make_subclass(cls, buffer.detach())
        watched.recording, watched.buffer, watched.number, watched.counter = recording, buffer, number, None
        watched.is_counter = not buffer.is_floating_point()
        watched.begin()
        return watched

    def begin(self) -> None:
        """A micro-batch begins."""
        self.added, self.momentum, self.was_read = 0, None, False


class Recording:
    """What the forwards of ``norms`` change, in one micro-batch at a time.

    ``modules`` are what computes in the place of the norms' own, by the identity of these. Within ``open``,
    the buffers of a norm are watched from ``show`` until ``hide``. After it, ``changes`` are what was seen.
    """

    def __init__(self, norms: Sequence[Norm], modules: Mapping[int, nn.Module] | None = None) -> None:
        self.is_open = False
        if modules is not None:
            norms = [replace(norm, module=modules[id(norm.module)]) for norm in norms]
        self._norms = {id(norm.module): norm for norm in norms}
        self._watched: dict[int, Watched] = {}
        self._of_norm: dict[int, dict[str, Watched]] = {}  # by the norm's identity
        self._shown: dict[int, nn.Module] = {}
        self._parts: list[dict[Any, list[Measured]]] = []
        self._touched: set[int] = set()

    @contextmanager
    def open(self, *, shown: bool = False) -> Iterator[None]:
        """A micro-batch; all norms are ``shown`` in it, where no hook does that."""
        self._parts, self._touched = [{}], set()
        for watched in self._watched.values():
            watched.begin()
        self.is_open = True
        try:
            for norm in self._norms.values() if shown else ():
                self.show(norm.module)
            yield
        finally:
            self.is_open = False
            for module in list(self._shown.values()):  # all of them, or that of a forward that raised
                self.hide(module)

    def show(self, module: nn.Module) -> None:
        """The forward of ``module`` begins."""
        if not self.is_open or id(module) not in self._norms:
            return
        if id(module) not in self._of_norm:
            self._of_norm[id(module)] = self._watch(self._norms[id(module)])
        buffers = module._buffers
        for key, watched in self._of_norm[id(module)].items():
            if buffers.get(key) is watched.buffer:
                buffers[key] = watched
        self._shown[id(module)] = module

    def hide(self, module: nn.Module) -> None:
        """The forward of ``module`` has ended."""
        if self._shown.pop(id(module), None) is not None:
            buffers = module._buffers
            for key, watched in self._of_norm[id(module)].items():
                if buffers.get(key) is watched:
                    buffers[key] = watched.buffer

    def _watch(self, norm: Norm) -> dict[str, Watched]:
        watched = {}
        for key, number in norm.numbers.items():
            buffer = norm.module._buffers.get(key)
            if buffer is not None and number not in self._watched:
                self._watched[number] = Watched.of(buffer, number, self)
            if number in self._watched:
                watched[key] = self._watched[number]
        counters = [x for x in watched.values() if x.is_counter]
        for x in watched.values():
            x.counter = counters[0] if len(counters) == 1 else None
        return watched

    def add(self, rule: Rule, watched: Watched, momentum: float | None, measured: Measured) -> None:
        """A forward changes ``watched`` by ``rule``; without ``momentum``, the counter's count gives it."""
        if watched.number in self._touched:  # a part has one change of each, whose order does not matter
            self._parts.append({})
            self._touched = set()
        self._touched |= {watched.number, measured.counter}
        alike = watched.dtype, watched.buffer.device, watched.number if measured.num_rows else -1
        self._parts[-1].setdefault((rule, momentum, alike), []).append(measured)

    def changes(self) -> Changes:
        """What the micro-batch has changed.

        Raises:
            ValueError: forward has looked at a counter that it changes.
        """
        for number, watched in self._watched.items():
            if watched.added and (watched.was_read or watched.momentum is not None):
                raise looked_at_counter(self._name(number))
        return [
            _together(rule, momentum, measured)
            for part in self._parts
            for (rule, momentum, _), measured in sorted(part.items(), key=_counts_first)
        ]

    def _name(self, number: int) -> str:
        names = (
            f"{norm.name}.{key}".lstrip(".")
            for norm in self._norms.values()
            for key, its in norm.numbers.items()
            if its == number
        )
        return next(names)


def looked_at_counter(name: str) -> ValueError:
    """What to raise when forward computes with the counter ``name``, beside counting."""
    return ValueError(
        f"forward counts in buffer {name!r}, and looks at it, in a declared step: what it finds would depend "
        "on which rank had which micro-batch. Pass forward what it needs (the step, micro_batch.index), put "
        "the layer into eval() mode, or train with plain backward outside of micro_batches()"
    )


def _counts_first(item: tuple[Any, Any]) -> bool:
    """Sorts: a momentum may be made of a count."""
    return item[0][0] is not Rule.COUNT


def _together(
    rule: Rule, momentum: float | None, measured: Sequence[Measured]
) -> tuple[BufferChange, Tensor]:
    numbers = tuple(x.number for x in measured)
    counters = tuple(x.counter for x in measured) if momentum is None else ()
    statistics = torch.cat([x.statistic.reshape(-1) for x in measured])
    return BufferChange(rule, numbers, momentum, counters, measured[0].num_rows), statistics


Handler = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""What is done for an operation with ``Watched`` among its arguments."""


def _other(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Any operation, on the buffer's memory: what it writes there is found when the micro-batch ends."""
    result = func(*map(_with_added, args), **kwargs)
    if isinstance(result, Tensor) or getattr(func, "__name__", "") != "__get__":  # not a dtype, or a shape
        for x in args:
            if isinstance(x, Watched):
                x.was_read = True
    return result


def _with_added(x: Any) -> Any:
    return x.buffer + x.added if isinstance(x, Watched) and x.added else x


def _float(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``float(counter)``, of which a norm without momentum makes one."""
    counter = args[0]
    count = _other(func, args, kwargs) if counter.momentum is not None else float(_with_added(counter))
    if counter.is_counter and count:
        counter.momentum = 1.0 / count
    return count


def _add(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``counter.add_(1)``."""
    counter, number = args if len(args) == 2 and not kwargs else (args[0], None)
    if type(number) is not int or not _can_record([counter]) or not counter.is_counter:
        return _other(func, args, kwargs)
    counter.added += number
    nothing = torch.empty(0, dtype=counter.dtype, device="cpu")
    counter.recording.add(Rule.COUNT, counter, number, Measured(counter.number, nothing))
    return counter


def _copy(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``copy.deepcopy``, in a hook of the user: a buffer like any other."""
    return func(args[0].buffer, *args[1:], **kwargs)


def _batch_norm(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``func``, but what it would do to the buffers is recorded."""
    given = {**dict(zip(PARAMETERS[func], args, strict=False)), **kwargs}
    watched = {key: x for key in RUNNING if (x := given.get(key)) is not None}
    if not given.get("training", False) or not _can_record(watched.values()):
        return _other(func, args, kwargs)
    has_run = True
    # -0.0, because 0 * -0.0 + 1 * x is x, with its sign.
    bare = {key: torch.full_like(x.buffer, -0.0) for key, x in watched.items()}
    try:
        return func(**{**given, **bare, "momentum": 1.0})
    except BaseException:
        # Checkpointing ends a recompute at the last tensor that backward needs: the kernel has run by then.
        has_run = not all(bool(x.signbit().all()) for x in bare.values())
        raise
    finally:
        if has_run:
            rules = _rules(given["input"])
            _record(watched, _unrounded(given, bare, rules), rules, given.get("momentum", 0.1))


def _instance_norm(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """As ``_batch_norm``. To torch it is one with a channel for each instance, and a mean over instances."""
    given = {**dict(zip(PARAMETERS[func], args, strict=False)), **kwargs}
    watched = {key: x for key in RUNNING if (x := given.get(key)) is not None}
    if not given.get("use_input_stats", True) or not _can_record(watched.values()):
        return _other(func, args, kwargs)
    output = func(**{**given, **dict.fromkeys(RUNNING)})
    x = given["input"].detach()
    num_rows, num_features = x.shape[:2]
    x = x.contiguous().view(1, num_rows * num_features, *x.shape[2:])
    bare = {key: torch.full_like(x.buffer.repeat(num_rows), -0.0) for key, x in watched.items()}
    F.batch_norm(x, bare.get(RUNNING[0]), bare.get(RUNNING[1]), training=True, momentum=1.0)
    _record(watched, bare, _rules(x), given.get("momentum", 0.1), num_rows)
    return output


def _can_record(watched: Collection[Any]) -> bool:
    for x in watched:
        if not isinstance(x, Watched) or not x.recording.is_open:
            return False
    return len(watched) > 0


def _record(
    watched: Mapping[str, Watched],
    bare: Mapping[str, Tensor],
    rules: Mapping[str, Rule],
    momentum: float,
    num_rows: int = 0,
) -> None:
    """The bare statistics of a batch were measured for ``watched``."""
    counter = next(iter(watched.values())).counter
    is_of_count = counter is not None and counter.momentum == momentum
    for key, x in watched.items():
        number, m = (counter.number, None) if counter is not None and is_of_count else (-1, float(momentum))
        x.recording.add(rules[key], x, m, Measured(x.number, bare[key], number, num_rows))
    if counter is not None and is_of_count:
        counter.momentum = None


def _rules(x: Tensor) -> dict[str, Rule]:
    """How torch's kernel for an input ``x`` computes a running mean and a running variance.

    Source: ``batch_norm_cpu_update_stats_template`` in torch's aten/src/ATen/native/Normalization.cpp.
    """
    formats = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
    if not x.is_cpu:
        rules = Rule.SUM_IN_T, Rule.SUM_IN_T
    elif not any(x.is_contiguous(memory_format=dense) for dense in formats):
        rules = Rule.ALL_IN_64, Rule.ALL_IN_64
    else:
        rules = Rule.SUM_IN_T, Rule.SUM_IN_32 if x.itemsize == 2 else Rule.SUM_IN_64
    return dict(zip(RUNNING, rules, strict=True))


def _unrounded(
    given: Mapping[str, Any], bare: Mapping[str, Tensor], rules: Mapping[str, Rule]
) -> Mapping[str, Tensor]:
    """``bare``, in float64 if a rule is so: the kernel then sums with more bits of a variance than it keeps.

    With the momentum M and the rounded variance r for an old value, the kernel's new one is M * (v - r) + r,
    which shows 24 bits more of the variance v. It takes the kernel twice.
    """
    if Rule.ALL_IN_64 not in rules.values():
        return bare
    wide = {key: x.double() for key, x in bare.items()}
    rounded = bare.get(RUNNING[1])
    if rounded is not None and rounded.dtype is torch.float32:
        probe = rounded.clone()
        F.batch_norm(given["input"].detach(), torch.zeros_like(probe), probe, training=True, momentum=PROBE)
        cut_off = (probe.double() - rounded.double()) / PROBE
        wide[RUNNING[1]] = rounded.double() + cut_off.nan_to_num(0.0, 0.0, 0.0)
    return wide


PARAMETERS: dict[Any, Sequence[str]] = {
    torch.batch_norm: (*_AS_BUILT_IN, "training", "momentum", "eps", "cudnn_enabled"),
    F.batch_norm: (*_AS_FUNCTION, "training", "momentum", "eps"),
    torch.instance_norm: (*_AS_BUILT_IN, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
    F.instance_norm: (*_AS_FUNCTION, "use_input_stats", "momentum", "eps"),
}
HANDLERS: dict[Any, Handler] = {
    torch.batch_norm: _batch_norm,
    F.batch_norm: _batch_norm,
    torch.instance_norm: _instance_norm,
    F.instance_norm: _instance_norm,
    Tensor.add_: _add,
    Tensor.__float__: _float,
    Tensor.__deepcopy__: _copy,
}
