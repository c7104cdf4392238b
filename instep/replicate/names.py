"""Names in state dicts: a wrapper writes its module's own, and reads those and prefixed ones."""

from __future__ import annotations

from typing import Any

from torch import nn

PREFIX = "module."


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
