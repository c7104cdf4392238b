"""Names in state dicts: a wrapper writes its module's own, and reads those and prefixed ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

PREFIX = "module."


class OwnNames(nn.Module):
    """A wrapper of ``module`` that shows its parameters and buffers under the module's own names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_load_state_dict_pre_hook(accept_own_names)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own, under their own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's own, under their own names."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, without a prefix."""
        return self.module.state_dict(*args, **kwargs)


def accept_own_names(wrapper: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before loading: give the entries of ``state`` the names that ``load_state_dict`` looks for.

    They may have the module's own names, or those with ``module.`` before them, as other wrappers save
    them. Decided for all together, because a module may itself have a part that is called ``module``.
    """
    module = wrapper.get_submodule("module")
    names = list(module.state_dict(keep_vars=True))
    own = [name for name in names if prefix + name in state]
    prefixed = [name for name in names if prefix + PREFIX + name in state]
    if len(own) >= len(prefixed):
        state.update({prefix + PREFIX + name: state.pop(prefix + name) for name in own})
