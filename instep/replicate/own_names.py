"""``OwnNames``: a wrapper whose parameters, buffers and parts have the names that they have in its module.

torch's wrappers put ``module.`` before every name: in state dicts, in lists of parameters. Here a checkpoint
has the names of the model, wrapped or not. All that takes a name has to know both, then: a program may have
it from ``named_parameters()`` of this wrapper, or have been written for torch's.

    named_parameters, named_buffers, state_dict     give the module's own names
    named_modules                                   too; the wrapper and its module are both called ""
    get_parameter, get_buffer, get_submodule        take own names, and those with ``module.``
    load_state_dict, torch.func.functional_call     too

The two ways to name clash where the module has a part that is called ``module`` itself: ``module.weight`` is
then that part's, by its own name, and with the prefix the module's. ``functional_call`` goes by attributes
and finds the latter; where own names say something else, its call is refused (``require_clear_names``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

T = TypeVar("T")
PREFIX = "module."  # what torch's wrappers write before every name in a state dict


class OwnNames(nn.Module):
    """A wrapper of ``module`` that shows its parameters, buffers and parts under the module's own names.

    ``functional_call`` finds its way by attributes, and sets those that it does not find. So parts and
    tensors of the module are attributes of the wrapper, too. What else a module has for others (``config``,
    ``generate``, ``save_pretrained``) can be read and called there; what is set there is the wrapper's.

    Example:
        >>> model = instep.DataParallel(torch.nn.Sequential(torch.nn.BatchNorm1d(8)))
        >>> [name for name, _ in model.named_parameters()], list(model.state_dict())[-1]
        (['0.weight', '0.bias'], '0.num_batches_tracked')
        >>> model.get_parameter("0.weight") is model.get_parameter("module.0.weight")
        True
        >>> model.get_buffer("0.running_mean") is dict(model.named_buffers())["0.running_mean"]
        True
        >>> model.get_submodule("0") is dict(model.named_modules())["0"]
        True
    """

    rng_block = False  # the module may be a block of random numbers, what wraps it is none

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_load_state_dict_pre_hook(accept_own_names)
        self._clashes = _clashes(module)
        if self._clashes:
            self.register_forward_pre_hook(require_clear_names)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own, under their own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's own, under their own names."""
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper, then the module and its parts under their own names."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """The part called ``target``: its own name, or with ``module.`` before it; "" is the wrapper."""
        return _either(self.module.get_submodule, target) if target else self

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter called ``target``, in either way."""
        return _either(self.module.get_parameter, target)

    def get_buffer(self, target: str) -> Tensor:
        """The buffer called ``target``, in either way."""
        return _either(self.module.get_buffer, target)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            kind = self._registered(name)
            if kind is not None:
                return kind[name]
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("_"):
                raise
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = self._registered(name) if isinstance(value, Tensor) else None
        if kind is None:
            super().__setattr__(name, value)
        else:
            kind[name] = value

    def _registered(self, name: str) -> dict[str, Any] | None:
        """Where the module, and not this wrapper, has registered ``name``."""
        own = self.__dict__
        module = own.get("_modules", {}).get("module")
        if module is None or name == "module" or name in own or hasattr(type(self), name):
            return None
        kinds = (module._parameters, module._buffers, module._modules)
        return next((kind for kind in kinds if name in kind), None)


def _either(get: Callable[[str], T], target: str) -> T:
    """What ``get`` finds under ``target``, or else without the prefix that torch's wrappers put before it."""
    try:
        return get(target)
    except AttributeError:
        if not f"{target}.".startswith(PREFIX):
            raise
        return get(target[len(PREFIX) :])


def accept_own_names(wrapper: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before loading: give the entries of ``state`` the names that ``load_state_dict`` looks for.

    They may have the module's own names, or those with ``module.`` before them, as other wrappers save
    them. Decided for all together, because a module may itself have a part that is called ``module``.
    """
    module = wrapper._modules["module"]
    assert module is not None
    names = list(module.state_dict(keep_vars=True))
    own = [name for name in names if prefix + name in state]
    prefixed = [name for name in names if prefix + PREFIX + name in state]
    if len(own) >= len(prefixed):
        state.update({prefix + PREFIX + name: state.pop(prefix + name) for name in own})


class Clash(NamedTuple):
    """A tensor of the module's part ``module``, and the place that its name is, read with the prefix.

    ``before`` is what was there when the module was wrapped, if something was.
    """

    name: str
    host: nn.Module
    before: Tensor | None
    part: nn.Module
    tensor: Tensor


def _clashes(module: nn.Module) -> list[Clash]:
    """Of the tensors in a part of ``module`` that is called ``module``, those whose names say two things."""
    found = []
    for name, tensor in _tensors(module).items():
        path, _, leaf = name.removeprefix(PREFIX).rpartition(".")
        if name.startswith(PREFIX) and (host := _part(module, path)) is not None:
            before = _own_tensor(host, leaf)
            found.append(Clash(name, host, before, module.get_submodule(name.rpartition(".")[0]), tensor))
    return found


def require_clear_names(wrapper: nn.Module, args: Any) -> None:
    """Raise ``ValueError`` if ``functional_call`` has put a tensor where its name, as an own one, is not.

    A forward pre-hook of the wrapper: what is put there stays until the call returns.
    """
    for name, host, before, part, tensor in wrapper._clashes:  # type: ignore[union-attr]
        leaf = name.rpartition(".")[2]
        if _own_tensor(host, leaf) is not before and _own_tensor(part, leaf) is tensor:
            raise ValueError(
                f"functional_call: {name!r} is a tensor of this model, and read with the prefix that torch's "
                f"wrappers put before names it is {name.removeprefix(PREFIX)!r}, which was replaced: call "
                "functional_call on model.module, where names have one meaning"
            )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    # Not buffers: a forward may put another one in the place of its own, too.
    return dict(module.named_parameters(remove_duplicate=False))


def _part(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _own_tensor(module: nn.Module, name: str) -> Tensor | None:
    """What ``module`` has under ``name`` itself: a parameter, a buffer, or a plain attribute."""
    kinds = (module._parameters, module._buffers, module.__dict__)
    return next((kind[name] for kind in kinds if name in kind), None)
