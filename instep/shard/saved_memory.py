"""What autograd keeps for backward, counted while it is kept: the memory of activations.

Autograd tells of each tensor that it keeps, if it is asked (``torch.autograd.graph.saved_tensors_hooks``).
Asking costs some microseconds per tensor, so of a script one step is asked, the first that a process makes,
which is slow in any case. No bit depends on it: what was kept is given back as it is, with torch's check that
it was not changed in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from instep.shard.saved_weights import Plain, Watching, top, unpack, watching
from instep.state.homes import homes

Key = tuple[torch.device, int]

_hooks: Any = torch._C._autograd


class Saved:
    """What autograd keeps for backward of what is computed within ``watch``, but for ``known`` tensors.

    ``nbytes`` is that of now, ``peak`` the most there was: each storage once, from when it is first kept
    until the last part of the graph that needs it is gone. Weights that autocast has converted are among
    it, as they are kept like the rest. What a block under ``checkpoint`` computes again is not.

    ``is_complete`` is False where some of it was hidden: there was another hook before, which stays the only
    one, or ``torch.func`` has computed gradients, which it does under no hook.
    """

    def __init__(
        self, known: Iterable[Tensor] = (), gathered: Callable[[], Iterable[Tensor]] = tuple
    ) -> None:
        """Weights that are ``gathered`` when they are kept are known too."""
        self.nbytes = self.peak = 0
        self.is_complete = True
        self._known, self._gathered = {_key(x) for x in known}, gathered
        self._uses: dict[Key, int] = {}
        self._lock = threading.RLock()  # backward of a GPU lets go in a thread of its own

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what the forward in here keeps, of this thread alone. Backward may follow."""
        is_free = top() is None or watching() is not None
        if not is_free or not _hooks._saved_tensors_hooks_is_enabled():
            self.is_complete = False
            yield
            return
        own = Watching(self._keep)
        _hooks._push_saved_tensors_default_hooks(own, unpack)
        try:
            with _gives_way.to(own, self._hidden):
                yield
        finally:
            _take_away(own)

    def _hidden(self) -> None:
        self.is_complete = False

    def _keep(self, x: Tensor) -> _Kept:
        # An operator's own output, kept with its history, would keep the operator that keeps it.
        kept = _Kept(x.detach(), self)
        if not kept.nbytes:  # what is known may be gone before the graph is, and others have its place then
            return kept
        with self._lock:
            uses = self._uses.get(kept.key, 0)
            self._uses[kept.key] = uses + 1
            if not uses:
                self.nbytes += kept.nbytes
                self.peak = max(self.peak, self.nbytes)
        return kept

    def release(self, kept: _Kept) -> None:
        if not kept.nbytes:
            return
        with self._lock:
            self._uses[kept.key] -= 1
            if not self._uses[kept.key]:
                del self._uses[kept.key]
                self.nbytes -= kept.nbytes

    def keeps(self, x: Tensor) -> bool:
        """Whether the memory of ``x`` is among what is kept now."""
        return _key(x) in self._uses

    def counts(self, key: Key) -> bool:
        return key not in self._known and all(key != _key(weights) for weights in self._gathered())


class _Kept:
    """A tensor in the graph, which lives as long as the graph has it."""

    nbytes = 0

    def __init__(self, tensor: Tensor, saved: Saved) -> None:
        self.plain, self.saved = Plain.of(tensor), saved
        with suppress(NotImplementedError, RuntimeError):  # it has no memory: torch.compile looks ahead
            self.key = _key(tensor)
            if saved.counts(self.key):
                self.nbytes = sum(x.untyped_storage().nbytes() for x in parts_of(tensor))

    def unpack(self) -> Tensor:
        return self.plain.unpack()

    def __del__(self) -> None:
        self.saved.release(self)


def _take_away(own: Watching) -> None:
    """Whatever an exception has left above it stays."""
    above = []
    while (found := top()) is not None:
        _hooks._pop_saved_tensors_default_hooks()
        if found[0] is own:
            break
        above.append(found)
    for pair in reversed(above):
        _hooks._push_saved_tensors_default_hooks(*pair)


def saved_beside(module: nn.Module, inputs: Iterable[Tensor] = ()) -> Saved:
    """For what is computed with ``module``: parameters, buffers and ``inputs`` are kept anyway."""
    there = homes(module.parameters())

    def gathered() -> list[Tensor]:
        return [x for home in there for x in home.gathered]

    return Saved([*module.parameters(), *module.buffers(), *inputs], gathered)


def parts_of(x: Tensor) -> list[Tensor]:
    """``x`` as tensors that have a storage."""
    return [x._indices(), x._values()] if x.is_sparse else [x]


def _key(x: Tensor) -> Key:
    return x.device, parts_of(x)[-1].untyped_storage().data_ptr()


class _GivesWay:
    """``torch.func`` computes gradients where there is no hook, and raises where there is one: has it find
    none as long as it says that it does. It says so by two functions of torch, which are others meanwhile."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._of_thread = threading.local()  # as the hooks are
        self._torchs: tuple[Callable[..., None], Callable[[], None]] | None = None

    @contextmanager
    def to(self, own: Watching, hidden: Callable[[], None]) -> Iterator[None]:
        """``own`` is the hook of this thread; ``hidden`` is told when it has given way."""
        before = getattr(self._of_thread, "watched", None)
        self._of_thread.watched, self._of_thread.gone = (own, hidden), False
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._torchs = _hooks._saved_tensors_hooks_disable, _hooks._saved_tensors_hooks_enable
                _hooks._saved_tensors_hooks_disable = self._disable
                _hooks._saved_tensors_hooks_enable = self._enable
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._torchs is not None:
                    _hooks._saved_tensors_hooks_disable, _hooks._saved_tensors_hooks_enable = self._torchs
            self._of_thread.watched = before

    def _disable(self, *words: Any, **named: Any) -> None:
        watched = getattr(self._of_thread, "watched", None)
        if watched is not None and watching() is watched[0]:
            _hooks._pop_saved_tensors_default_hooks()
            self._of_thread.gone = True
            watched[1]()
        assert self._torchs is not None
        self._torchs[0](*words, **named)

    def _enable(self) -> None:
        assert self._torchs is not None
        self._torchs[1]()
        watched = getattr(self._of_thread, "watched", None)
        if watched is not None and self._of_thread.gone:
            self._of_thread.gone = False
            _hooks._push_saved_tensors_default_hooks(watched[0], unpack)


_gives_way = _GivesWay()
