"""``ModuleProxy``: a wrapper whose every name is its module's, but for those that it defines itself.

torch's wrappers hold the module as a child. So every name in a state dict begins with ``module.``, and an
attribute that is set on the wrapper never reaches the forward that reads it. A proxy has no names to
translate: it holds no parameters, buffers or children of its own.

    model.micro_batches           the wrapper's: defined by its class, or set while it is constructed
    model.state_dict, model.fc    everything else is read from the module, set there and deleted there
    model.module                  the module itself
    model.train()                 a method of the module that returns the module returns the wrapper
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from types import MethodType
from typing import Any, NoReturn

from torch import nn
from torch.compiler import is_dynamo_compiling

from instep.hook import untraced


class ModuleProxy(nn.Module):
    """A wrapper of ``module``. A subclass calls ``_constructed`` at the end of its ``__init__``.

    Example:
        >>> model = instep.DataParallel(torch.nn.Sequential(torch.nn.Linear(2, 1)))
        >>> list(model.state_dict())
        ['0.weight', '0.bias']
        >>> model.temperature = 3.0
        >>> model.module.temperature
        3.0
    """

    rng_block = False  # the module may be a block of random numbers, the wrapper is none
    _defined: frozenset[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        classes = cls.__mro__[: cls.__mro__.index(nn.Module)]
        cls._defined = frozenset(name for each in classes for name in vars(each))

    def __init__(self, module: nn.Module) -> None:
        # Without nn.Module.__init__: parameters, hooks, training mode are all the module's.
        object.__setattr__(self, "module", module)

    def _constructed(self) -> None:
        object.__setattr__(self, "_is_constructed", True)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in own or name[:2] == "__" or name in type(self)._defined or "module" not in own:
            return object.__getattribute__(self, name)
        module = own["module"]
        value = getattr(module, name)
        if isinstance(value, MethodType) and value.__self__ is module:
            return _returning(self, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            raise AttributeError("a wrapper keeps its module: close() it, and wrap the other module")
        if self._is_own(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)

    def _is_own(self, name: str) -> bool:
        own = self.__dict__
        return name in own or name in type(self)._defined or "_is_constructed" not in own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call_untraced(self, args, kwargs) if is_dynamo_compiling() else self.module(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper, by the name of the module, then the module and its parts."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} takes part in a process group, and can be neither copied nor pickled: "
            "copy or pickle model.module"
        )


def _call(wrapper: Any, args: Any, kwargs: Any) -> Any:
    return wrapper.module(*args, **kwargs)


_call_untraced = untraced(_call, recursive=False)


def _returning(wrapper: nn.Module, method: MethodType) -> MethodType:
    """``method``, which returns ``wrapper`` in the place of its module: ``model = model.to(device)``."""

    @wraps(method.__func__)
    def call(wrapper: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return wrapper if result is method.__self__ else result

    return MethodType(call, wrapper)
