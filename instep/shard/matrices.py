"""Parameters that ``fully_shard`` has cut, each stepped whole by one rank: for optimizers of matrices.

    between steps   rank 0 | a0 b0 |   rank 1 | a1 b1 |    shards of weights and of gradients
    gather          rank 0 | a0 a1 |   rank 1 | b0 b1 |    both of a to its owner, rank 0, and of b to rank 1
    update          each owner steps its own; what the optimizer keeps for a parameter stays with the owner
    share           rank 0 | a0 b0 |   rank 1 | a1 b1 |    the new weights go back to where they came from

Muon makes a whole matrix orthogonal, so no rank can step a part of one. Products that are split over ranks
would be rounded by the number of ranks; an owner computes them as a single process does.

Bytes that a rank sends in a step, for S bytes of parameters on W ranks that own equally many: 2 S (W-1)/W^2
to owners and S (W-1)/W^2 back. During the update it has memory for weights and gradients of all it owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, groupby

import torch
from torch import Tensor

from instep.memory import as_bytes
from instep.net.process_group import Group
from instep.shard.layout import Cost, owners
from instep.shard.transfer import all_to_all
from instep.shard.unit import Unit
from instep.state.homes import Home, ParameterShard

ROUND_BYTES = 64 << 20  # of parameters that travel together: bounds what waits to be sent


class OwnedParameters(Home):
    """Parameters of one dtype and device, shards of units over ``group``. ``held`` are those that this rank
    owns, whole; they have memory from ``gather`` to ``share``. Owners are balanced by ``cost``.

    At construction, collective: owners get the weights, which an optimizer may look at before ``release``.
    """

    resident = False

    def __init__(self, members: Sequence[tuple[Tensor, Unit]], cost: Cost, group: Group) -> None:
        self.parameters, self.names = [p for p, _ in members], [""] * len(members)
        self.group = self.everyone = group
        numbers = [(unit.layout, unit.number_of(p)) for p, unit in members]
        self._parts = [[layout.part(i, rank) for rank in range(group.size)] for layout, i in numbers]
        shapes = [unit.shape_of(p) for p, unit in members]
        self._nbytes = [shape.numel() * p.itemsize for shape, p in zip(shapes, self.parameters, strict=True)]
        self._owners = owners(list(map(cost, shapes)), group.size)
        self._whole = {
            i: torch.empty(shapes[i], dtype=p.dtype, device=p.device)
            for i, p in enumerate(self.parameters)
            if self._owners[i] == group.rank
        }
        self.held = [
            ParameterShard(self.parameters[i], 0, x.numel(), x, x.shape) for i, x in self._whole.items()
        ]
        weights = {i: p.detach() for i, p in enumerate(self.parameters)}
        self._to_owners(weights, self._whole, "the first values of an optimizer")

    def slices_with(self, parameter: Tensor) -> list[int]:
        return [self._owners[next(i for i, p in enumerate(self.parameters) if p is parameter)]]

    @property
    def bytes_to_share(self) -> int:
        """That ``share`` sends, if each rank has as much of every parameter."""
        return sum(x.nbytes for x in self._whole.values()) * (self.group.size - 1) // self.group.size

    def gather(self, operation: str) -> None:
        """Owners get weights and gradients of all that has a gradient, the same on all ranks. Collective."""
        gradients = {i: p.grad.detach() for i, p in enumerate(self.parameters) if p.grad is not None}
        for i, x in self._whole.items():
            x.untyped_storage().resize_(x.nbytes)
            x.grad = torch.empty_like(x) if i in gradients else None
        whole = {i: x.grad for i, x in self._whole.items() if x.grad is not None}
        self._to_owners(self._stepped(), self._whole, operation)
        self._to_owners(gradients, whole, operation)

    def share(self, operation: str) -> None:
        """The new weights go back to all ranks. Collective."""
        self._to_owners(self._stepped(), self._whole, operation, back=True)
        self.release()

    def release(self) -> None:
        """The whole parameters give their memory back: nothing may read them until the next ``gather``."""
        for x in self._whole.values():
            x.untyped_storage().resize_(0)

    def _stepped(self) -> dict[int, Tensor]:
        """This rank's shards of the parameters with a gradient."""
        return {i: p.detach() for i, p in enumerate(self.parameters) if p.grad is not None}

    def _to_owners(
        self, shards: Mapping[int, Tensor], whole: Mapping[int, Tensor], operation: str, *, back: bool = False
    ) -> None:
        """``shards`` go to their owners, into ``whole``; or ``back``. Collective."""
        ranks = range(self.group.size)
        for numbers in self._rounds(shards):
            mine = [[shards[i].reshape(-1) for i in numbers if self._owners[i] == owner] for owner in ranks]
            own = [i for i in numbers if i in whole]
            owned = [[whole[i].view(-1)[slice(*self._parts[i][rank])] for i in own] for rank in ranks]
            sources, targets = (owned, mine) if back else (mine, owned)
            message = torch.cat([*chain(*sources), self.parameters[0].detach().new_empty(0)])
            values = list(chain(*targets))
            received = message.new_empty(sum(x.numel() for x in values))
            out_splits, in_splits = ([sum(x.nbytes for x in y) for y in way] for way in (targets, sources))
            all_to_all(self.group, as_bytes(received), as_bytes(message), out_splits, in_splits, operation)
            for x, value in zip(values, received.split([x.numel() for x in values]), strict=True):
                x.copy_(value)

    def _rounds(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        ends = zip(accumulate(self._nbytes[i] for i in numbers), numbers, strict=True)
        return ([i for _, i in each] for _, each in groupby(ends, lambda x: x[0] // ROUND_BYTES))
