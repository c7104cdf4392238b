"""Faults on purpose: what happens to machines and programs, injected by name, rank, step and phase.

    instep train --fault kill:rank=1,step=3,phase=exchange --fault stop:rank=0,step=5

A step enters a phase again and again, as for each micro-batch, and "script" whenever it comes back from
another one: ``entry=3`` is the third time.

A fault happens once per run, also when the step is done again after it: the heartbeat page of the supervisor
remembers. Without a supervisor it happens once per process. (nan: each time. slow over several steps: once in
each.) To resize is the supervisor's part: the rank waits in its phase until that has noticed, so that with
fewer ranks this is the last step of the old ones.

What bad memory or arithmetic does to numbers is here, too. ``flip_bit`` writes past autograd's
version counter, as broken memory would: torch sees nothing. ``poison_gradients`` leaves all tensors alone and
makes a backward go wrong.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from instep.elastic.heartbeat import MAX_FAULTS, PHASES, HeartbeatPage

FOREVER_S = 1 << 20
RESIZE_S = 2.0  # for a supervisor that looks several times a second, when no other change is under way
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


@dataclass(frozen=True)
class Fault:
    """``kind`` happens to ``rank`` when it enters ``phase`` with ``step`` steps done, the ``entry``-th time,
    and ``after_ms`` later."""

    kind: str
    rank: int = 0
    step: int = 0
    phase: str = "forward"
    entry: int = 1
    after_ms: float = 0.0
    seconds: float = 0.0  # how long, for slow
    steps: int = 1  # in how many steps in a row, for slow
    code: int = 1  # of exit
    ranks: int = 0  # how many from then on, for resize
    name: str = ""  # of the entry of the state, for flip: "exp_avg/tokens.weight"; the first if empty

    def explains(self, rank: int, code: int) -> bool:
        """Whether a process of this ``rank`` that it happened to may have ended with this exit code."""
        return rank == self.rank and code == (self.code if self.kind == "exit" else ENDS.get(self.kind))

    @property
    def when(self) -> range:
        """The steps in which it happens."""
        return range(self.step, self.step + self.steps)

    def __str__(self) -> str:
        """As ``parse`` reads it."""
        default = Fault(self.kind)
        given = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)[1:]
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return f"{self.kind}:{','.join(given)}" if given else self.kind


def parse(spec: str) -> Fault:
    """``kind:key=value,...`` as a fault; ``ValueError`` in words for a user."""
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        raise ValueError(f"fault {spec!r}: expected one of {', '.join(KINDS)}, got {kind!r}")
    kinds = {field.name: type(getattr(Fault(kind), field.name)) for field in fields(Fault)[1:]}
    options: dict[str, Any] = {}
    for option in filter(None, rest.split(",")):
        key, _, value = option.partition("=")
        if key not in kinds:
            raise ValueError(f"fault {spec!r}: expected one of {', '.join(kinds)}, got {key!r}")
        try:
            options[key] = kinds[key](value)
        except ValueError:
            raise ValueError(
                f"fault {spec!r}: {key}: expected {kinds[key].__name__}, got {value!r}"
            ) from None
    fault = Fault(kind, **options)
    if fault.phase not in PHASES:
        raise ValueError(f"fault {spec!r}: phase: expected one of {', '.join(PHASES)}, got {fault.phase!r}")
    if fault.entry < 1:
        raise ValueError(f"fault {spec!r}: entry: expected 1 or more, got {fault.entry}")
    if fault.steps < 1 or (fault.steps > 1 and kind != "slow"):
        raise ValueError(f"fault {spec!r}: steps: expected 1, or more for slow, got {fault.steps}")
    if kind == "slow" and not fault.seconds:
        raise ValueError(f"fault {spec!r}: seconds: expected how long it takes, got none")
    if kind == "resize" and fault.ranks < 1:
        raise ValueError(f"fault {spec!r}: ranks: expected how many ranks there shall be, got {fault.ranks}")
    for key in ("seconds", "after_ms"):
        if not 0 <= getattr(fault, key) < FOREVER_S:
            raise ValueError(f"fault {spec!r}: {key}: expected 0 or more, got {getattr(fault, key)}")
    if fault.after_ms and kind not in SENT:
        raise ValueError(f"fault {spec!r}: after_ms: expected one of {', '.join(sorted(SENT))}, got {kind!r}")
    return fault


def parse_all(specs: Sequence[str]) -> tuple[Fault, ...]:
    """``parse`` of each; ``ValueError`` if they are too many."""
    if len(specs) > MAX_FAULTS:
        raise ValueError(f"expected at most {MAX_FAULTS} faults, got {len(specs)}")
    return tuple(map(parse, specs))


class FaultInjector:
    """The faults of one worker; ``reach`` is called at each phase, where there are faults.

    ``rank`` is set whenever the worker gets another; ``entries()`` are the named tensors of its state.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        page: HeartbeatPage | None = None,
        entries: Callable[[], Sequence[tuple[str, Tensor]]] = tuple,
    ) -> None:
        self.rank = 0
        self._faults = faults
        self._page = page
        self._entries = entries
        self._fired: set[tuple[int, int]] = set()
        self._entered: Counter[tuple[int, str]] = Counter()  # phases, with the steps done then

    @property
    def on_enter(self) -> Callable[[str, int], None] | None:
        """What is to be called at each phase, if anything is."""
        return self.reach if self._faults else None

    def reach(self, phase: str, step: int) -> None:
        """The worker enters ``phase`` with ``step`` steps done."""
        if phase == "join":  # and makes its step from the beginning
            self._entered.clear()
        self._entered[step, phase] += 1
        entered = self._entered[step, phase]
        for number, fault in enumerate(self._faults):
            here = (fault.rank, fault.phase) == (self.rank, phase) and step in fault.when
            here = here and entered >= fault.entry
            if here and fault.kind == "resize":
                self._await_resize(number, step)
            elif here and fault.kind not in ELSEWHERE and self._first(number, fault, step):
                self._inject(fault)

    def nan_due(self, step: int) -> Fault | None:
        """The fault that makes a gradient of ``step`` nan on this rank, each time that the step is made."""
        kind = ("nan", self.rank, step)
        return next((fault for fault in self._faults if (fault.kind, fault.rank, fault.step) == kind), None)

    def _await_resize(self, number: int, step: int) -> None:
        """Wait, once, until the supervisor has fired ``number``, unless the run ends or a rank is lost."""
        page = self._page
        if page is None or (number, step) in self._fired:  # a step may enter its phase again and again
            return
        self._fired.add((number, step))
        until, over = time.monotonic() + RESIZE_S, page.over
        while not (page.fired(number) or page.stop or page.over > over) and time.monotonic() < until:
            time.sleep(0.01)

    def _first(self, number: int, fault: Fault, step: int) -> bool:
        if self._page is not None and fault.steps == 1:
            return self._page.fire(number, fault.after_ms)
        first = (number, step) not in self._fired
        self._fired.add((number, step))
        return first

    def _inject(self, fault: Fault) -> None:
        if fault.kind == "flip":
            flip_bit(named(fault, self._entries()))
        elif fault.after_ms:
            threading.Timer(fault.after_ms / 1e3, KINDS[fault.kind], [fault]).start()
        else:
            KINDS[fault.kind](fault)


def named(fault: Fault, entries: Sequence[tuple[str, Tensor]]) -> Tensor:
    """The entry that ``fault`` names, the first by default."""
    found = [x for name, x in entries if fault.name in ("", name)]
    if not found:
        raise ValueError(f"fault {fault}: expected one of {', '.join(dict(entries))}, got {fault.name!r}")
    return found[0]


def _send(number: signal.Signals) -> Callable[[Fault], None]:
    return lambda fault: os.kill(os.getpid(), number)


def _raise(fault: Fault) -> None:
    raise RuntimeError(f"fault injected at step {fault.step} in {fault.phase}")


def _hang(fault: Fault) -> None:
    while True:
        time.sleep(FOREVER_S)


def _spin(fault: Fault) -> None:
    while True:
        pass


def _hold(fault: Fault) -> None:
    """Sleep without giving up the interpreter lock, as native code does that forgot to release it."""
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(FOREVER_S)


def _nothing(fault: Fault) -> None:
    """Done elsewhere."""


KINDS: dict[str, Callable[[Any], None]] = {
    "kill": _send(signal.SIGKILL),
    "segv": _send(signal.SIGSEGV),
    "abort": _send(signal.SIGABRT),
    "term": _send(signal.SIGTERM),
    "usr1": _send(signal.SIGUSR1),
    "int": _send(signal.SIGINT),
    "stop": _send(signal.SIGSTOP),
    "exit": lambda fault: os._exit(fault.code),
    "raise": _raise,
    "hang": _hang,
    "spin": _spin,
    "hold": _hold,
    "slow": lambda fault: time.sleep(fault.seconds),
    "flip": _nothing,
    "nan": _nothing,
    "resize": _nothing,
}
ENDS = {"kill": -signal.SIGKILL, "segv": -signal.SIGSEGV, "abort": -signal.SIGABRT}
SENT = frozenset({"kill", "segv", "abort", "term", "usr1", "int", "stop", "exit"})  # from any thread
ELSEWHERE = frozenset({"nan", "resize"})  # by who asks ``nan_due``, and in the supervisor


def flip_bit(tensor: Tensor, index: int = 0, bit: int = 20) -> None:
    """Flip one ``bit``, counted from the lowest, of element ``index`` of ``tensor``, in place.

    Elements are counted in logical order. In a float32, bits 0 to 22 are the fraction, 23 to 30 the
    exponent, 31 is the sign.

    Raises:
        ValueError: there is no such element or bit.
    """
    width = tensor.element_size()
    if width not in INTEGERS or not 0 <= bit < 8 * width:
        raise ValueError(f"bit {bit}: expected one of the {8 * width} bits of a {tensor.dtype}, at most 64")
    mask = 1 << bit
    if bit == 8 * width - 1:
        mask = -mask  # the sign bit of two's complement
    _element(tensor, index).view(INTEGERS[width]).bitwise_xor_(mask)


def poison_gradients(parameter: Tensor) -> RemovableHandle:
    """Until the handle that is returned is removed, every gradient of ``parameter`` is nan."""
    # Not full_like, which sparse ones do not have. None is what a function has passed on.
    return parameter.register_hook(lambda gradient: None if gradient is None else gradient * torch.nan)


def _element(tensor: Tensor, index: int) -> Tensor:
    """Element ``index`` as a view without dimensions that shares memory, but no version, with ``tensor``."""
    if not 0 <= index < tensor.numel():
        raise ValueError(f"index {index}: expected one of the {tensor.numel()} elements")
    position = []
    for size in reversed(tensor.shape):
        index, along = divmod(index, size)
        position.append(along)
    return tensor.data[tuple(reversed(position))]
