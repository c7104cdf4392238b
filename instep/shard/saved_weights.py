"""What autograd saves of gathered weights: a note of where they lie, not the memory itself.

A node of backward keeps the tensors that it will need. Were it given the weights, their memory would have to
stay until then; were that taken away behind its back, it would compute with whatever is there instead. So
inside the forward of a sharded module a hook sees everything that is saved:

    a view of a unit's gathered memory    its place is noted; unpacked, the unit is gathered again
    anything else                         is kept as it is

Whichever node needs a weight then finds it, whatever path backward came by: a loss that no output leads to, a
detached weight, another part of the graph. Views that are kept elsewhere, in attributes or a second graph,
hold their memory, which ``Unit.free`` leaves to them.

Hooks switch torch's check off that nothing saved was changed in place, so it is done here, with its words. A
hook of the user's that is there already stays the only one (``torch.utils.checkpoint``, ``save_on_cpu``): it
may count what is saved, and what it keeps of a unit holds the memory. A ``Watching`` one is given all that is
no weight of a unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from instep.shard.unit import Unit

_hooks: Any = torch._C._autograd


class Plain(NamedTuple):
    """A tensor that is no weight, and how often it had been changed; None if that is not counted."""

    tensor: Tensor
    version: int | None

    @classmethod
    def of(cls, x: Tensor) -> Plain:
        return cls(x, None if x.is_inference() else x._version)

    def unpack(self) -> Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                _changed(f"{self.tensor.dtype} {list(self.tensor.shape)}", self.tensor._version, self.version)
            )
        return self.tensor


class Weight(NamedTuple):
    """Where in the gathered memory of a unit a saved tensor lies."""

    owner: weakref.ref[SavedWeights]
    unit: int
    parameter: int
    version: int  # of that parameter
    dtype: torch.dtype
    shape: Sequence[int]
    strides: Sequence[int]
    offset: int
    conj: bool
    neg: bool

    def unpack(self) -> Tensor:
        owner = self.owner()
        if owner is None or owner.closed:
            raise RuntimeError(
                "backward needs weights of a sharded module that was closed, or dropped, after its forward: "
                "call backward() before close()"
            )
        unit = owner.units[self.unit]
        version = unit.parameters[self.parameter]._version
        if version != self.version:
            raise RuntimeError(
                _changed(f"parameter {unit.names[self.parameter]!r}", version, self.version)
                + "; an optimizer step or a load between forward and backward does that"
            )
        owner.bring(unit)
        with torch.no_grad():
            x = torch.empty(0, dtype=self.dtype, device=unit.flat.device)
            x.set_(unit.storage, self.offset, self.shape, self.strides)
            x = x.conj() if self.conj else x
            return torch._neg_view(x) if self.neg else x


class Packed(Protocol):
    """What stands in the graph for a tensor."""

    def unpack(self) -> Tensor: ...


class Watching:
    """A hook that looks at what is saved, and keeps it as it is: ``pack`` returns what stands for it."""

    def __init__(self, pack: Callable[[Tensor], Packed]) -> None:
        self._pack = pack

    def __call__(self, x: Tensor) -> Packed:
        return self._pack(x)


class SavedWeights:
    """Notes what is saved of ``units`` while a module that uses them runs.

    ``enter`` and ``leave`` every such module, or whatever uses them: the hook is there inside the outermost.
    ``bring`` makes a unit whole, if it is not. ``storages`` finds a unit by the memory that it has now.
    """

    def __init__(
        self, units: Sequence[Unit], storages: dict[int, Unit], bring: Callable[[Unit], None]
    ) -> None:
        self.units, self.bring = units, bring
        self.closed = False
        self._storages = storages
        self._stack: list[object] = []
        self._pack = _weakly(self)
        self._beneath: Watching | None = None

    def enter(self, module: object) -> None:
        """The forward of ``module`` begins."""
        if not self._stack and torch.is_grad_enabled() and self._may_push():
            self._beneath = watching()
            _hooks._push_saved_tensors_default_hooks(self._pack, unpack)
        self._stack.append(module)

    def leave(self, module: object) -> None:
        """The forward of ``module`` has ended, or was left by an exception."""
        if any(m is module for m in self._stack):
            while self._stack.pop() is not module:
                pass
            if not self._stack:
                self._remove()

    def reset(self) -> None:
        """No module runs: what was interrupted has not been left."""
        if self._stack:
            self._stack.clear()
            self._remove()

    def forget(self) -> None:
        """The units are used no more, and may go."""
        self._storages.clear()

    def pack(self, x: Tensor) -> Packed:
        try:
            unit = self._storages.get(x.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # it has no storage
            return Plain(x, None)
        if unit is None:
            return Plain.of(x) if self._beneath is None else self._beneath(x)
        if not unit.shown:
            raise RuntimeError(
                f"weights of unit {unit.name!r} ({', '.join(unit.names)}) were used in a forward where they "
                "are not gathered, and show NaN: call the module that they belong to, or make all that uses "
                "them one unit, with fully_shard(..., units=[...])"
            )
        i = unit.shown_at(x.storage_offset() * x.itemsize // unit.flat.itemsize)
        return Weight(
            weakref.ref(self),
            unit.number,
            i,
            unit.parameters[i]._version,
            x.dtype,
            x.shape,
            x.stride(),
            int(x.storage_offset()),
            x.is_conj(),
            x.is_neg(),
        )

    def _may_push(self) -> bool:
        is_free = top() is None or watching() is not None
        return bool(_hooks._saved_tensors_hooks_is_enabled()) and is_free

    def _remove(self) -> None:
        self._beneath = None
        found = top()
        if found is not None and found[0] is self._pack:
            _hooks._pop_saved_tensors_default_hooks()


def unpack(packed: Packed) -> Tensor:
    """What ``packed`` stands for."""
    return packed.unpack()


def top() -> tuple[Any, Any] | None:
    """The hook that is told of what is saved now, in this thread, and the one that unpacks."""
    found: tuple[Any, Any] | None = _hooks._top_saved_tensors_default_hooks(True)
    return found


def watching() -> Watching | None:
    """The hook of now, if it is one."""
    found = top()
    return found[0] if found is not None and isinstance(found[0], Watching) else None


def _weakly(saved: SavedWeights) -> Callable[[Tensor], Packed]:
    """``pack``; graphs keep it, and must not keep the module alive that may keep the graph."""
    reference = weakref.ref(saved)

    def pack(x: Tensor) -> Packed:
        alive = reference()
        return Plain(x, None) if alive is None else alive.pack(x)

    return pack


def _changed(what: str, version: int, expected: int) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} is at version {version}; expected version {expected} instead"
    )
