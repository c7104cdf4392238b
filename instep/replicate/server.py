"""Parameter server: one rank holds the optimizer, receives every gradient, and sends the weights back.

The form that data parallelism had before all-reduce. The optimizer and its state exist once. The price is one
link that carries everything: while the server receives, adds, updates and sends, no rank computes.

    rank 0   |= forward, backward =| receive g1 g2 | aggregate |= update =| send w w |= forward ...
    rank 1   |= forward, backward =|-g1-|.............. idle .............|-w-|       |= forward ...
    rank 2   |= forward, backward =|     -g2-|......... idle .............|     -w-|  |= forward ...
                                    (W-1) S in                             (W-1) S out, on the server's link

Time of a step: compute + aggregate + update + 2 (latency + (W-1) S / bandwidth). An all-reduce uses every
link in both directions at once and needs 2 S (W-1)/W / bandwidth, so a server takes W times as long to move
the same gradients. A worker whose micro-batches give r partial sums sends r S bytes.
S: bytes of all gradients, as many as of all weights. W: ranks.
Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.errors import Desync
from instep.events import PARAMETER_UPDATE
from instep.mesh.mesh import Mesh
from instep.net.agree import all_or_none, attempt
from instep.reduce.buckets import Bucket
from instep.reduce.transport import CollectiveTransport, add_up, local_roots
from instep.reduce.tree import Sum
from instep.replicate.module_proxy import ModuleProxy
from instep.replicate.reducer import Reducer
from instep.replicate.wrapper import DataParallel
from instep.state.homes import offered
from instep.step.micro_batches import DataSource, MicroBatch
from instep.step.nesting import WrappedOnce

INSTEAD = "use instep.DataParallel, which has the same bits"
UPDATE, WEIGHTS = "the server's report on its update", "the weights from the server"


class ParameterServer(WrappedOnce, ModuleProxy):
    """Trains ``module`` on every rank of a group with the optimizer of its first rank, to compare.

    At construction all ranks take the server's values. In backward, or at the end of a declared step,
    gradients travel to the server, which adds them in the order of the sum tree: ``.grad`` there has the bits
    of ``DataParallel``, and is zero on the workers. ``step`` updates the weights on the server and sends them
    to all ranks; ``.grad`` is None.

    Args:
        module, process_group: as in ``DataParallel``.
        optimizer: any of torch's, over parameters of ``module``; a worker may pass None.

    Raises:
        ValueError: the ranks hold different models; the optimizer has other parameters, or is sharded.

    Example:
        >>> server = instep.ParameterServer(model, optimizer)
        >>> loss_function(server(x), y).backward()
        >>> server.step()
        >>> for micro_batch in server.micro_batches(8):
        ...     rows = range(micro_batch.index * 4, micro_batch.index * 4 + 4)
        ...     loss_function(server(x[rows]), y[rows]).backward()
        >>> server.step()
        >>> server.close()
    """

    __module__ = "instep"
    is_outermost = True
    placement: ClassVar = {"strategy": "server"}

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        process_group: Mesh | dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(module)
        self.optimizer = optimizer
        self.model = DataParallel(module, process_group, "flat", find_unused_parameters=True)
        self.group, self.recorder = self.model.group, self.model.recorder
        self.is_server = self.group.rank == 0
        reducer = self.model._reducer
        reducer.exchange.transport = self._transport = ServerTransport(self.group)
        self._transport.reducer = reducer
        reducer.ends_steps = reducer.all_step = False  # ``step`` ends the step
        try:
            all_or_none(self.group, "the comparison of optimizers", self._check, errors=(ValueError,))
        except BaseException:
            self.close()
            raise
        self._constructed()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def micro_batches(self, num_micro_batches: int | DataSource) -> Iterator[MicroBatch]:
        """Declare a step, as ``DataParallel.micro_batches``.

        Args:
            num_micro_batches: G, the number in the global batch, or an ``instep.Loader``.

        Yields:
            A ``MicroBatch`` for each that is this rank's.
        """
        return self.model.micro_batches(num_micro_batches)

    def step(self) -> None:
        """Update the weights on the server, then send them to every rank. Collective.

        Raises:
            ValueError: no gradient was sent since the last step.
            Desync: on the workers, if the server's optimizer raised; there, that error itself.
            PeerLost: a rank did not come.
        """
        reducer = self._transport.reducer
        if not reducer.exchanges or reducer.given_up:
            raise ValueError("step() without a gradient: call backward(), or run micro_batches(), first")
        updated = attempt(self.optimizer.step if self.optimizer and self.is_server else lambda: None)
        reducer.gradients.drop()
        reducer.exchanges = 0
        tell = partial(all_or_none, self.group, UPDATE, updated, errors=(Desync,))
        peer = -1 if self.is_server else self.group.ranks[0]
        with self.recorder.span(PARAMETER_UPDATE, lane="host", peer=peer):
            reducer.lane.run(UPDATE, tell).wait()
        send = partial(self._transport.send_weights, reducer.stream.computed())
        with self.recorder.span(PARAMETER_UPDATE, lane="host"):
            reducer.lane.submit(WEIGHTS, send).wait()
        if not self.is_server:
            reducer.stepped()  # what the optimizer's hook does on the server
        self.recorder.stepped()

    def close(self) -> None:
        """Remove the hooks, end the lane, give back the private group. Also happens when it is collected."""
        self.model.close()

    def _check(self) -> None:
        """ValueError unless this rank may step, or wait, with its optimizer."""
        if self.optimizer is None and not self.is_server:
            return
        if not isinstance(self.optimizer, Optimizer) or offered(self.optimizer) is not None:
            raise ValueError(f"expected a plain torch optimizer, got {type(self.optimizer).__name__}")
        own = set(map(id, self.module.parameters()))
        if any(id(p) not in own for group in self.optimizer.param_groups for p in group["params"]):
            raise ValueError("the optimizer has a parameter that the module lacks: pass module.parameters()")

    def __instep_state__(self, *ignored: object) -> NoReturn:
        raise ValueError(f"ParameterServer is for comparison, without Run, checkpoints and copies: {INSTEAD}")

    __reduce__ = __instep_state__  # of copies and pickles


class ServerTransport(CollectiveTransport):
    """Leaves the sums with the server, whose scratch holds what the workers send: (W-1) S bytes or more."""

    reducer: Reducer

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        if self.reducer.exchanges and not self.reducer.given_up:  # on all ranks
            raise ValueError("a second gradient before step(): accumulate in micro_batches()")
        roots, length = local_roots(bucket), len(bucket.home)
        if self.group.rank != 0:
            message = torch.cat([bucket.home[:0], *roots])
            self._move("send", message, [len(message)], bucket, name)
            bucket.counter.home.zero_()
            return
        splits = [0, *(count * length for count in plan.counts[1:])]
        received = self.scratch.take(sum(splits), bucket.dtype, bucket.device)
        self._move("receive", received, splits, bucket, name)
        with self.reducer.recorder.span("aggregate", lane="communication", bucket=bucket.index):
            add_up([*roots, *received.view(-1, length)], plan, scale, [bucket.home], bucket.nodes)

    def send_weights(self, computed: Any) -> None:
        """Overwrite the parameters of every rank with the server's."""
        with self.reducer.stream.after(computed):
            for bucket in self.reducer.buckets:
                home, num_workers = bucket.home, self.group.size - 1
                parameters = [self.reducer.parameters[slot.position].detach() for slot in bucket.slots]
                if self.group.rank == 0:
                    torch._foreach_copy_(bucket.views(home), parameters)
                    splits = [0] + [len(home)] * num_workers
                    self._move("send", home.repeat(num_workers), splits, bucket, WEIGHTS)
                else:
                    self._move("receive", home, [len(home)], bucket, WEIGHTS)
                    torch._foreach_copy_(parameters, bucket.views(home))

    def _move(self, what: str, x: Tensor, splits: list[int], bucket: Bucket, name: str) -> None:
        nothing = [0] * self.group.size
        splits += nothing[len(splits) :]
        with self.reducer.recorder.span(what, lane="communication", num_bytes=x.nbytes, bucket=bucket.index):
            if what == "send":
                self.group.all_to_all(x[:0], x, nothing, splits, name)
            else:
                self.group.all_to_all(x, x[:0], splits, nothing, name)
