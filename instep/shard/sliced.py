"""The class of a parameter while its weights are in slices: code that reads it gets its values.

Outside of the forward of its module a parameter has no values (``unit``), and a program may use it there all
the same: tied through a functional call, in a regulariser, in an average of the weights, in a log. So its
class is ``Sliced`` then, and torch hands over every function that is called with it:

    what asks about it (shape, .grad)   is answered as ever
    what reads or writes it             ``UnitReader.read`` makes it whole first, and keeps what was written

While its module runs, a parameter has its own class again, so that ordinary training does not pay for this.

A view of the values, as ``p.data`` and ``p.detach()`` are, is an ``Alias``: what is written to it goes to all
ranks' slices too. An alias that is kept until the weights have gone keeps the values that it had, and writing
to it raises.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from instep.reduce.placeholder import ABOUT, CONVERSIONS

if TYPE_CHECKING:
    from instep.shard.unit import Unit

# Beside ``ABOUT``: of a parameter itself, and of its place in a graph.
OWN = ABOUT | {"register_hook", "register_post_accumulate_grad_hook", "requires_grad_"}
# Attributes that every step asks for; what else is no tensor is found out.
ASKED = frozenset({"_post_accumulate_grad_hooks", "dtype", "requires_grad", "shape"})
without_dispatch: Any = torch._C.DisableTorchFunctionSubclass
_detach: Any = Tensor.detach
_grad: Any = Tensor.grad
_version: Any = Tensor._version


class UnitReader(Protocol):
    """Makes units whole for code that reads them outside of their modules."""

    def read(self, tensors: Sequence[Live], call: Callable[[], Any]) -> Any:
        """What ``call()`` returns, which uses ``tensors``."""


class Live(Tensor):
    """What shows values of a unit, and hands over every function that is called with it."""

    instep_unit: weakref.ref[Unit]
    instep_names: Mapping[int, str]  # of the unit's parameters, by their identity; they outlive the unit
    instep_class: ClassVar[type[Tensor]] = Tensor  # that it has for the function itself

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        called = getattr(func, "__name__", "")
        if called in OWN or (called == "__get__" and func.__self__.__name__ in ASKED):
            with without_dispatch():
                return func(*args, **(kwargs or {}))
        call = partial(func, *args, **(kwargs or {}))
        if called == "__set__" and func.__self__.__name__ == "data":
            return _assign(*args)
        if called == "__set__":
            return _as_it_is(call)
        if called in CONVERSIONS or called == "__get__":
            found = _as_it_is(call)
            if found is args[0] or not isinstance(found, Tensor):
                return found
            if called == "__get__" and func.__self__.__name__ == "data":
                call = args[0].detach  # which counts what is written to it, and ``data`` does not
        return _read([x for x in tree_leaves((args, kwargs)) if isinstance(x, Live)], call)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _copy(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), _copy(self))


class Alias(Live):
    """A view of values of ``instep_unit``."""

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, but to be read: what is written to it could not be seen."""
        array = super().numpy(*args, **kwargs)
        array.flags.writeable = False
        return array

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.clone().__array__(*args, **kwargs)


class Sliced(Live):
    """A parameter. What every step asks of it is here without a detour."""

    def detach(self) -> Tensor:
        """A view of its values. ``nn.Parameter(p)`` takes one too, and cannot make a parameter of it."""
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            raise ValueError(
                f"parameter {self.instep_names[id(self)]!r} is in slices, and another one cannot be made of "
                "it, as weight_norm and other parametrizations do: register them first, then call fully_shard"
            )
        return _detach(self)

    def set_(self, *source: Any, **others: Any) -> Tensor:
        """As ``self.data = source``, which parametrizations mean by it; torch hands it over to no subclass.

        Raises:
            ValueError: it is anything else, for which there is no memory.
        """
        if len(source) != 1 or others or not isinstance(source[0], Tensor):
            raise ValueError(
                "set_() of a parameter in slices: expected one tensor, whose values it is to have; its "
                "memory is that of fully_shard"
            )
        _assign(self, source[0])
        return self

    @property
    def grad(self) -> Tensor | None:
        with without_dispatch():
            found: Tensor | None = _grad.__get__(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with without_dispatch():
            _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with without_dispatch():
            _grad.__delete__(self)

    @property
    def _version(self) -> int:  # type: ignore[override]
        with without_dispatch():
            return int(_version.__get__(self))


def sliced_class(kind: type[Tensor], unit: Unit) -> type[Sliced]:
    """The class of a parameter of ``unit`` that is a ``kind`` by itself."""
    body = {
        "instep_unit": weakref.ref(unit),
        "instep_names": {id(p): name for p, name in zip(unit.parameters, unit.names, strict=True)},
        "instep_class": kind,
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (Sliced, kind), body)


def alias(view: Tensor, unit: Unit) -> Tensor:
    """``view``, of values of ``unit``, as one that is watched."""
    view.__class__ = Alias
    assert isinstance(view, Alias)
    view.instep_unit = weakref.ref(unit)
    return view


@contextmanager
def own_classes(tensors: Sequence[Live]) -> Iterator[None]:
    """Inside, ``tensors`` have the classes that they have by themselves."""
    before = [(x, type(x)) for x in tensors]
    for x, _ in before:
        x.__class__ = x.instep_class  # type: ignore[assignment]
    try:
        yield
    finally:
        for x, kind in before:
            x.__class__ = kind


def _as_it_is(call: Callable[[], Any]) -> Any:
    with without_dispatch():
        return call()


def _read(tensors: Sequence[Live], call: Callable[[], Any]) -> Any:
    """``call()``, with what each of ``tensors`` shows made whole by its own reader."""
    by_reader: dict[int, tuple[UnitReader, list[Live]]] = {}
    for x in tensors:
        reader = _reader(x)
        if reader is not None:
            by_reader.setdefault(id(reader), (reader, []))[1].append(x)
    for reader, own in by_reader.values():
        call = partial(reader.read, own, call)
    with own_classes([x for x in tensors if _reader(x) is None]):
        return call()


def _reader(x: Live) -> UnitReader | None:
    """Of ``x``; None where there is none, and ``x`` is a tensor like any other."""
    unit = x.instep_unit()
    reader = None if unit is None or unit.reader is None else unit.reader()
    if reader is None and isinstance(x, Sliced) and not (unit is not None and unit.shown):
        raise RuntimeError(
            f"parameter {x.instep_names[id(x)]!r} of a sharded module that was closed has no values any "
            "more: take instep.full_state_dict(model) before close()"
        )
    return reader


def _assign(x: Live, value: Tensor) -> None:
    """``x.data = value``: ``x`` has these values from now on."""
    if value is x:
        return
    if (value.shape, value.dtype, value.device) != (x.shape, x.dtype, x.device):
        name = f" {x.instep_names[id(x)]!r}" if isinstance(x, Sliced) else ""
        raise ValueError(
            f"parameter{name} would have other memory than when it was sharded (module.to(), .data = ...), "
            f"{value.dtype} {tuple(value.shape)} on {value.device} in place of {x.dtype} {tuple(x.shape)} on "
            f"{x.device}: convert first, then call fully_shard"
        )
    with torch.no_grad():
        x.copy_(value)


def _copy(x: Live) -> Tensor:
    """The values of ``x`` in new memory, of the class that it has by itself."""
    values = x.detach().clone()
    if not isinstance(x, Sliced):
        return values
    made: Tensor = Tensor._make_subclass(x.instep_class, values, x.requires_grad)
    return made
