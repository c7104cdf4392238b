"""The shards of a state, listed once for as long as they describe the same tensors.

A step asks two or three times which shards there are: its sample of the ledger, its snapshot, a comparison.
To list them takes several microseconds for a tensor, and a model has hundreds; the list is another only when
a tensor is:

    the first step makes the moments               other keys in the optimizer's state
    load_state_dict, model.x = buffer, p.data = y  another tensor, or the same one over other memory
    an optimizer's state is cleared                fewer

So the tensors are looked at in each call, and the list is made anew when one is not what it was: other
memory, offset, shape, strides or dtype. What is trained or frozen is no part of a shard. Parameters,
optimizers, groups of parameters and wrappers stay the same for as long as there is a state at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from instep.state.homes import DividedOptimizer, Home
from instep.state.shards import Shard

Key = tuple[object, ...]


class Listed:
    """The shards of ``parameters``, which may live in ``homes``, of the buffers of ``module`` and of the
    moments of ``steps``.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[Tensor],
        homes: Sequence[Home],
        steps: DividedOptimizer | None,
    ) -> None:
        self._module, self._parameters, self._homes, self._steps = module, parameters, homes, steps
        self._keys: list[Key] = []
        self._tensors: list[Tensor] = []  # without a graph, over the memory of when the list was made
        self._shards: list[Shard] | None = None

    def get(self, make: Callable[[], list[Shard]]) -> list[Shard]:
        """What ``make`` has returned, if nothing is another since; it is not to be changed."""
        keys, tensors = self._look()
        if self._shards is None or keys != self._keys or not same_memory(tensors, self._tensors):
            self._shards = None  # or a list that cannot be made would leave an old one
            made = make()
            self._keys, self._tensors, self._shards = keys, [x.detach() for x in tensors], made
        return self._shards

    def _look(self) -> tuple[list[Key], list[Tensor]]:
        """What the list follows from: keys, and live tensors."""
        away = [there for there in self._homes if not there.resident]
        not_here = {id(p) for there in away for p in there.parameters}  # to touch them would gather them
        tensors = [p for p in self._parameters if id(p) not in not_here]
        tensors += [x.tensor for there in away for x in there.held]
        keys: list[Key] = [(there.resident,) for there in self._homes]
        for module in modules(self._module):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    keys.append((id(module), name, name in module._non_persistent_buffers_set))
                    tensors.append(buffer)
        for local in self._steps.locals if self._steps else ():
            for parameter, state in local.state.items():
                if isinstance(state, dict):
                    moments = [(key, x) for key, x in state.items() if isinstance(x, Tensor)]
                    keys.append((id(parameter), *[key for key, _ in moments]))
                    tensors += [x for _, x in moments]
        return keys, tensors


def modules(root: nn.Module) -> Iterator[nn.Module]:
    """As ``root.modules()``, in the same order, in a third of the time."""
    left, seen = [root], set[int]()
    while left:
        module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            left += [child for child in reversed(module._modules.values()) if child is not None]


def same_memory(now: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Whether each of ``now`` lies where that of ``before`` does, in the same form."""
    if len(now) != len(before):
        return False
    try:
        return all(x.dtype is y.dtype and x.is_set_to(y) for x, y in zip(now, before, strict=True))
    except (NotImplementedError, RuntimeError):  # a tensor without memory, as on the meta device
        return False
