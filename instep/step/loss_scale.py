"""Warns when the loss of a micro-batch is divided by the number of micro-batches, which the step does itself.

Loops that accumulate gradients divide each loss by the number of accumulated micro-batches. A declared step
takes the mean over its micro-batches, so a division that is left in the loop makes gradients G times too
small, and no result shows it: AdamW trains nearly the same, only clipping and weight decay act otherwise.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

CALLER = 3  # frames above __torch_function__
NUM_NODES = 2  # from the loss on: a GradScaler's multiplication may come last


class LossScale(TorchFunctionMode):
    """Watches the backward of one micro-batch of ``num_micro_batches``."""

    def __init__(self, num_micro_batches: int) -> None:
        super().__init__()
        self.num_micro_batches = num_micro_batches
        self._backwards: list[tuple[bool, str, int]] = []  # is the loss divided; file and line of the call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            caller = sys._getframe(CALLER)
            divided = is_divided(args[0], self.num_micro_batches)
            self._backwards.append((divided, caller.f_code.co_filename, caller.f_lineno))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        # A loop that was left by an error may be collected inside another mode, such as torch.device, or in
        # another thread.
        stack = _get_current_function_mode_stack()
        if self in stack:
            above = [_pop_mode() for _ in stack[stack.index(self) :]][:-1]
            for mode in reversed(above):
                _push_mode(mode)
        if len(self._backwards) == 1 and self._backwards[0][0]:  # several may be parts of the micro-batch
            num, (_, file, line) = self.num_micro_batches, self._backwards[0]
            warnings.warn_explicit(
                f"the loss was divided by {num}, and the step has {num} micro-batches: micro_batches() takes "
                "the mean over them already. Delete the division if it is for gradient accumulation; ignore "
                f"this if 1/{num} is a weight of the loss",
                UserWarning,
                file,
                line,
            )


def is_divided(loss: Tensor, by: int) -> bool:
    """Whether ``loss`` is a mean divided by ``by``, or multiplied by the inverse; a sum may be divided."""
    node = loss.grad_fn
    for _ in range(NUM_NODES):
        if node is None or not node.name().startswith(("Div", "Mul")):
            return False
        following = next((each for each, _ in node.next_functions if each is not None), None)
        factor = getattr(node, "_saved_other", None)
        if factor is not None and factor.numel() == 1:
            share = factor.item() * (by if node.name().startswith("Mul") else 1 / by)
            if abs(share - 1) < 1e-6:
                return not is_sum(following)
        node = following
    return False


def is_sum(node: Any) -> bool:
    """Whether ``node`` adds up, or is a loss with ``reduction="sum"``."""
    adds = node is not None and node.name().startswith(("Sum", "Add", "Sub", "Dot"))
    return adds or getattr(node, "_saved_reduction", 1) == 2


def is_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether torch.compile would compile one of ``modules`` again for a step that is watched."""
    return any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in modules)
