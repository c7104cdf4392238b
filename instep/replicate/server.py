"""Parameter server: one rank holds the optimizer, is sent every gradient, and sends the weights back.

The form that data parallelism had before all-reduce. Any number of workers can share one optimizer, whose
state is kept once. The price is one link that carries everything: while the server receives, adds, updates
and sends, no rank computes.

    rank 0   |= forward, backward =| receive g1 g2 | aggregate |= update =| send w w |= forward ...
    rank 1   |= forward, backward =|-g1-|.............. idle .............|-w-|       |= forward ...
    rank 2   |= forward, backward =|     -g2-|......... idle .............|     -w-|  |= forward ...
                                    (W-1) S in                             (W-1) S out, on the server's link

Time of a step: compute + aggregate + update + 2 (latency + (W-1) S / bandwidth). An all-reduce uses every
link in both directions at once and needs 2 S (W-1)/W / bandwidth, so a server takes W times as long to move
the same gradients, and a worker's idle time grows with W.

The network is a star, every gradient goes to one rank and every weight comes from there:

        1   2   3            1   2   3          a worker's link: S in, S out
         \\  |  /              ^  ^  ^
          v v v                \\ | /           the server's: (W-1) S in, (W-1) S out
      0: the ordered sum    0: the new weights

No rank but the server adds anything, and no worker hears from another (but for the headers that go before
every bucket, some hundred bytes). A worker whose micro-batches make r roots sends r times its bytes.

S: bytes of all gradients, as many as of all weights. W: ranks.

Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, here with
one server and synchronous steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.errors import Desync
from instep.events import PARAMETER_UPDATE, Recorder, Span
from instep.mesh.mesh import Mesh
from instep.net.agree import all_or_none
from instep.net.process_group import Group
from instep.reduce.add_up import add_up
from instep.reduce.buckets import Bucket
from instep.reduce.collective_transport import CollectiveTransport
from instep.reduce.exchange import OrderedAllReduce
from instep.reduce.scratch import Scratch
from instep.reduce.tree import Sum
from instep.replicate.wrapper import DataParallel
from instep.state.homes import Wrapped
from instep.step.agreement import broadcast_values
from instep.step.micro_batches import DataSource, MicroBatch
from instep.step.reduction import StepPlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SERVER = 0  # rank in the group
UPDATED = "the server's report on its update"
WORD_BYTES = 4096  # at most, of why there is no update


class Declined(Exception):
    """The gradient is not to be used. A hook of the server's optimizer raises it, and then ``step`` does on
    every rank, with the same words: weights and moments are what they were, and no step was made.
    """


class ParameterServer:
    """Trains ``module`` on every rank of a group with one optimizer, that of the group's first rank.

    At construction: the ranks compare their models and take the server's values. In forward: nothing; call
    ``module``. In ``backward``, or at the end of the loop over ``micro_batches``: every rank's gradient goes
    to the server, which adds in the order of the sum tree; ``.grad`` is the mean there, with the bits that
    ``DataParallel`` gives, and None on the workers. In ``step``: the optimizer steps on the server, and all
    ranks get its weights; ``.grad`` is None everywhere.

    Spans on the server: "receive" and "send" with the bytes on its link, "aggregate", "update". On a worker:
    "send", "parameter update" from there to the end of the update, "receive".

    A worker's optimizer never steps, so those that make their state in ``step`` hold none there. Clip between
    ``backward`` and ``step``, on every rank alike: workers have no gradient to clip.

    Args:
        module: on the device where it shall train.
        optimizer: over parameters of ``module``. Only the server's is used; a worker may pass None.
        process_group: as in ``DataParallel``.
        init_sync, find_unused_parameters, broadcast_buffers, seed, timeout_s: as in ``DataParallel``.
        nodes, rounding: as in ``DataParallel``. The weights that the server sends are not rounded.

    Raises:
        ValueError: the ranks hold different models, or the optimizer has parameters that ``module`` has not.
        PeerLost: a rank did not come.

    Example:
        >>> mesh = instep.init()
        >>> server = instep.ParameterServer(model, optimizer)
        >>> server.backward_and_step(loss_function(model(x), y))
        >>> server.is_server, server.step_mode, server.placement
        (True, 'undeclared', {'strategy': 'server'})
        >>> server.close()
    """

    __module__ = "instep"

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        process_group: Mesh | ProcessGroup | None = None,
        *,
        init_sync: bool | str = True,
        find_unused_parameters: bool | None = None,
        broadcast_buffers: bool = True,
        nodes: str = "float32",
        rounding: str = "nearest",
        seed: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        self._model = DataParallel(
            module,
            process_group=process_group,
            strategy="flat",
            init_sync=init_sync,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            nodes=nodes,
            rounding=rounding,
            seed=seed,
            timeout_s=timeout_s,
        )
        self.module = module
        self.optimizer = optimizer
        self._bind()

    def rebind(self, process_group: Mesh | ProcessGroup | None, timeout_s: float | None = None) -> None:
        """Go on over another group, between two steps; for survivors of a lost rank. Collective over it.

        All take the weights of the new server. If the old one was lost, so are its moments: load a
        checkpoint, or begin with new ones.

        Args:
            process_group, timeout_s: as for ``DataParallel``.

        Raises:
            ValueError, PeerLost: as when the model was wrapped.

        Example:
            >>> server.rebind(instep.init())
        """
        self._model._leave()
        self._model._process_group, self._model._timeout_s = process_group, timeout_s
        self._model._bind(lambda: self._model._options)
        self._bind()
        broadcast_values(self.module, self.group)
        self._reducer.watch.settled()

    def _bind(self) -> None:
        self._model.require_backward_grad_sync = (
            False  # a plain backward accumulates: the server is sent what it asks for
        )
        self.group, self.recorder = self._model.group, self._model.recorder
        self._reducer = self._model._reducer
        self._exchange = ServerExchange(self._reducer.parameters, self.group, self.recorder)
        self._exchange.offsets_ns = self._reducer.exchange.offsets_ns
        self._exchange.compare = self._reducer.exchange.compare
        self._reducer.exchange = self._exchange
        self._reducer.ends_steps = False  # it ends when all have the weights
        self._reducer.all_step = False
        self._pending = False  # the server has gradients that no step has used
        try:
            all_or_none(
                self.group,
                "the comparison of optimizers",
                lambda: _require_own(self.optimizer, self.module, self.group),
                errors=(ValueError,),
            )
        except BaseException:
            self.close()
            raise

    def __instep_state__(self) -> Wrapped:
        wrapped = self._model.__instep_state__()

        def leave() -> None:
            self._pending = False
            wrapped.leave()

        def join(mesh: Mesh) -> None:
            wrapped.join(mesh)
            self._bind()

        return replace(wrapped, steppers=(SERVER,), leave=leave, join=join)

    @property
    def is_server(self) -> bool:
        """Whether this rank holds the optimizer."""
        return self.group.rank == SERVER

    @property
    def placement(self) -> dict[str, str]:
        """How gradients travel."""
        return {"strategy": "server"}

    @property
    def step_mode(self) -> str | None:
        """ "declared" or "undeclared", whichever the last step was; None before the first."""
        return self._model.step_mode

    def backward_and_step(self, loss: Tensor) -> None:
        """``backward(loss)``, then ``step()``. Collective.

        Args:
            loss: as for ``backward``.

        Raises:
            ValueError, Desync, PeerLost: as ``backward`` and ``step``.
        """
        self.backward(loss)
        self.step()

    def backward(self, loss: Tensor) -> None:
        """Compute this rank's gradient of ``loss`` and send it to the server. Collective.

        What a plain ``backward()`` has accumulated in ``.grad`` before is part of it.

        Args:
            loss: a scalar, computed with the module.

        Raises:
            ValueError: ``loss`` has no gradient for any parameter of the module, or the last gradient has not
                been used yet.
            Desync: another rank raised in here.
            ReplicasDiffer: the ranks have different weights; on all ranks.
            PeerLost: a rank did not come.

        Example:
            >>> server = instep.ParameterServer(model, optimizer)
            >>> server.backward(loss_function(model(x), y))
            >>> norm = instep.clip_grad_norm_(model.parameters(), 1.0)  # on every rank
            >>> server.step()
        """
        self._require_no_gradient("backward()")
        try:
            loss.backward()
            if all(parameter.grad is None for parameter in self._reducer.parameters):
                raise ValueError(
                    f"backward() on rank {self.group.global_rank} gave no parameter of the module a "
                    "gradient: compute the loss with this module, and leave some parameters unfrozen"
                )
        except BaseException:
            self._leave()
            raise
        self._model.sync_gradients()
        self._has_come()

    def micro_batches(
        self, num_micro_batches: int | DataSource, *, step: int | None = None
    ) -> Iterator[MicroBatch]:
        """Declare a step, as ``DataParallel.micro_batches``; the end of the loop sends this rank's sums.

        In the loop: ``loss.backward()`` of data that ``micro_batch.index`` names. After it: ``step()``.

        Args:
            num_micro_batches: G, the number of micro-batches in the global batch; the bits depend on it.
            step: what the random numbers are keyed by; by default the declared steps so far.

        Yields:
            A ``MicroBatch`` for each that is this rank's.

        Raises:
            ValueError, Desync, ReplicasDiffer, PeerLost: as ``DataParallel.micro_batches``.

        Example:
            >>> server = instep.ParameterServer(model, optimizer)
            >>> for micro_batch in server.micro_batches(8):
            ...     rows = range(micro_batch.index * 4, micro_batch.index * 4 + 4)
            ...     loss_function(model(x[rows]), y[rows]).backward()
            >>> server.step()
        """
        self._require_no_gradient("micro_batches()")
        yield from self._model.micro_batches(num_micro_batches, step=step)
        self._has_come()

    def step(self) -> None:
        """The server's optimizer steps, then every rank has its weights. Collective.

        Where an ``instep.Run`` skips the step, because the gradient is not finite, say, it ends here, with no
        update, on all ranks alike.

        Raises:
            ValueError: there was no ``backward`` or ``micro_batches`` since the last step.
            Desync: on the workers, if the server's optimizer raised; on the server that error itself.
            PeerLost: a rank did not come.
        """
        if not self._pending:
            raise ValueError("step() without a gradient: call backward(loss), or run micro_batches(), first")
        self._pending = False
        failed = self._update() if self.is_server else None
        self._reducer.gradients.drop()
        server = -1 if self.is_server else self.group.ranks[SERVER]
        with self.recorder.span(PARAMETER_UPDATE, lane="host", peer=server):
            self._tell(failed)
        stream, computed = self._reducer.stream, self._reducer.stream.computed()

        def give() -> None:
            with stream.after(computed):
                self._exchange.give(self._reducer.buckets)

        with self.recorder.span(PARAMETER_UPDATE, lane="host"):
            self._reducer.lane.submit("the weights from the server", give).wait()
        if not self.is_server:  # where the optimizer's own hook counts
            self._reducer.stepped()
        self.recorder.stepped()

    def discard(self) -> None:
        """Drop the gradient that the server has, on all ranks, in the place of ``step``.

        Example:
            >>> server = instep.ParameterServer(model, optimizer)
            >>> server.backward(loss_function(model(x), y))
            >>> server.discard()  # it was nan, say
        """
        self._pending = False
        self._reducer.gradients.drop()

    def close(self) -> None:
        """Remove the hooks, end the lane, give back the private group. Also happens when it is collected."""
        self._model.close()

    def _update(self) -> BaseException | None:
        """Step; what it raised is returned, because the workers wait to be told."""
        assert self.optimizer is not None
        try:
            with self.recorder.span("update", lane="compute"):
                self.optimizer.step()
        except BaseException as error:
            return error
        return None

    def _tell(self, failed: BaseException | None) -> None:
        """All ranks raise if the server could not update. Collective."""
        words = b""
        if isinstance(failed, Declined):
            words = (str(failed) or "declined").encode()[:WORD_BYTES]
        has_failed, length = self._from_server([failed is not None, len(words)], torch.int64)
        if 0 < length <= WORD_BYTES:
            words = bytes(self._from_server(words.ljust(length), torch.uint8))
        if failed is not None:
            raise failed
        if words:
            raise Declined(words.decode(errors="replace"))
        if has_failed:
            raise Desync(
                f"rank {self.group.ranks[SERVER]}, the parameter server, could not update the weights: they "
                "are what they were. The cause stands in its own traceback"
            )

    def _from_server(self, numbers: Sequence[int], dtype: torch.dtype) -> list[int]:
        """The server's ``numbers``, where the others pass as many of their own. Collective."""
        told = torch.tensor(list(numbers), dtype=dtype, device="cpu")
        self._reducer.lane.submit(UPDATED, lambda: self.group.broadcast(told, UPDATED, root=SERVER)).wait()
        found: list[int] = told.tolist()
        return found

    def _has_come(self) -> None:
        """The server has the gradient; what a worker's ``.grad`` shows is its own part of it."""
        self._pending = True
        if not self.is_server:
            self._reducer.gradients.drop()

    def _require_no_gradient(self, call: str) -> None:
        if self._pending:
            raise ValueError(
                f"{call} before step(): the server has a gradient that was not used. To accumulate, call "
                "loss.backward() for all but the last loss, and backward(loss) for that"
            )

    def _leave(self) -> None:
        """Let the other ranks know that this one sends no gradient."""
        size = self.group.size
        self._reducer.begin(StepPlan(False, size, [[rank] for rank in range(size)]))
        self._reducer.leave()


class ServerExchange(OrderedAllReduce):
    """Half an all-reduce: the roots go to the server, which adds them. ``give`` brings the weights back."""

    transport: ToServer

    def __init__(self, parameters: Sequence[Tensor], group: Group, recorder: Recorder) -> None:
        super().__init__(
            group,
            recorder,
            ordered=True,
            max_parameters=len(parameters),
            transport=ToServer(group, Scratch(), recorder),
        )
        self.parameters = parameters

    def give(self, buckets: Sequence[Bucket]) -> None:
        """Overwrite the parameters of every rank with the server's. Collective."""
        if self.group.size > 1:
            for bucket in buckets:
                self.transport.give(bucket, self.parameters)


class ToServer(CollectiveTransport):
    """A ``Transport`` that leaves the sums with the server, and brings them no further.

    The server's scratch holds what all workers send, and later what they are sent: (W-1) S bytes.
    """

    def __init__(self, group: Group, scratch: Scratch, recorder: Recorder) -> None:
        super().__init__(group, scratch)
        self.recorder = recorder

    def give(self, bucket: Bucket, parameters: Sequence[Tensor]) -> None:
        """Overwrite those of ``parameters`` that travel in ``bucket`` with the server's."""
        num_workers, nothing = self.group.size - 1, [0] * self.group.size
        pairs = [(slot, parameters[slot.position].detach()) for slot in bucket.slots]
        name, length = f"the weights of bucket {bucket.index}", bucket.num_elements
        if self.group.rank == SERVER:
            message = self.scratch.take(num_workers * length, bucket.dtype, bucket.device)
            for slot, parameter in pairs:
                bucket.view(slot, message).copy_(parameter)
            message.view(num_workers, length)[1:] = message[:length]
            with self._span("send", message, bucket):
                self.group.all_to_all(message[:0], message, nothing, [0] + [length] * num_workers, name)
        else:
            message = self.scratch.take(length, bucket.dtype, bucket.device)
            with self._span("receive", message, bucket):
                self.group.all_to_all(message, message[:0], [length, *nothing[1:]], nothing, name)
            for slot, parameter in pairs:
                parameter.copy_(bucket.view(slot, message))

    def reduce(self, bucket: Bucket, plan: Sum, scale: float, name: str) -> None:
        own_roots, nodes = [buffer for _, buffer in bucket.counter.roots], bucket.nodes
        if self.group.rank != SERVER:
            sent = [nodes.encode(root) for root in own_roots]
            message = sent[0] if len(sent) == 1 else torch.cat([bucket.home[:0].to(nodes.wire_dtype), *sent])
            nothing = [0] * self.group.size
            with self._span("send", message, bucket):
                self.group.all_to_all(message[:0], message, nothing, [message.numel(), *nothing[1:]], name)
            return
        values = [*own_roots, *self._from_workers(bucket, plan.counts[1:], name)]
        with self.recorder.span("aggregate", lane="communication", bucket=bucket.index):
            add_up(values, plan, scale, [bucket.home], nodes)

    def _from_workers(self, bucket: Bucket, counts: Sequence[int], name: str) -> Sequence[Tensor]:
        """The roots of all workers, in their order; ``counts[r - 1]`` come from rank r."""
        if self.group.size == 1:
            return []
        nodes = bucket.nodes
        length = nodes.num_slices * nodes.wire_length
        received = self.scratch.take(sum(counts) * length, nodes.wire_dtype, bucket.device)
        with self._span("receive", received, bucket):
            splits = [0] + [count * length for count in counts]
            self.group.all_to_all(received, received[:0], splits, [0] * self.group.size, name)
        return [nodes.decode(row) for row in received.view(-1, length)]

    def _span(self, name: str, message: Tensor, bucket: Bucket) -> Span:
        return self.recorder.span(name, lane="communication", num_bytes=message.nbytes, bucket=bucket.index)


def _require_own(optimizer: Optimizer | None, module: nn.Module, group: Group) -> None:
    """Raise ``ValueError`` unless this rank may step, or wait, with ``optimizer``."""
    if optimizer is None:
        if group.rank == SERVER:
            raise ValueError("expected an optimizer on the parameter server, got None")
        return
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    own = set(map(id, module.parameters()))
    for i, options in enumerate(optimizer.param_groups):
        for k, parameter in enumerate(options["params"]):
            if id(parameter) not in own:
                raise ValueError(
                    f"parameter {k} of group {i} in the optimizer, shape {tuple(parameter.shape)}, is none "
                    "of the module's: the other ranks would never get it. Make the optimizer from "
                    "module.parameters(), after the module has its final ones"
                )
