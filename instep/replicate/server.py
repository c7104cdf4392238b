"""Parameter server: one rank holds the optimizer, is sent every gradient, and sends the weights back.

The form that data parallelism had before all-reduce. Any number of workers can share one optimizer, whose
state is kept once. The price is one link that carries everything: while the server receives, adds, updates
and sends, nobody computes.

    rank 0   |= forward, backward =| receive g1 g2 | aggregate |= update =| send w w |= forward ...
    rank 1   |= forward, backward =|-g1-|.............. idle .............|-w-|       |= forward ...
    rank 2   |= forward, backward =|     -g2-|......... idle .............|     -w-|  |= forward ...
                                    (W-1) S in                             (W-1) S out, on the server's link

Time of a step: compute + aggregate + update + 2 (latency + (W-1) S / bandwidth). An all-reduce uses every
link in both directions at once and needs 2 S (W-1)/W / bandwidth, so a server takes W times as long to move
the same gradients, and a worker's idle time grows with W.

S: bytes of all gradients, as many as of all weights. W: ranks.

Source: M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, here with
one server and synchronous steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.errors import Desync
from instep.events import PARAMETER_UPDATE
from instep.mesh.group import Group
from instep.mesh.mesh import Mesh
from instep.replicate.star import SERVER, Star
from instep.replicate.wrapper import DataParallel
from instep.step.leaves import Leaf
from instep.step.manifest import broadcast_values
from instep.step.reducer import Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

VERDICT = "the server's word on its update"


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

    Raises:
        ValueError: the ranks hold different models, or the optimizer has parameters that ``module`` has not.
        PeerLost: a rank did not come.
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
        """
        self._model.rebind(process_group, timeout_s)
        self._bind()
        broadcast_values(self.module, self.group)

    def _bind(self) -> None:
        self._model.disable_grad_sync()  # a plain backward accumulates: the server is sent what it asks for
        self.group, self.recorder = self._model.group, self._model.recorder
        self._reducer = self._model._reducer
        self._star = Star(self._reducer.parameters, self.group, self.recorder)
        self._star.offsets_ns = self._reducer.exchange.offsets_ns
        self._reducer.exchange = self._star
        self._reducer.ends_steps = False  # it ends when all have the weights
        self._pending = False  # the server has gradients that no step has used
        try:
            _agree_on_optimizers(self.module, self.optimizer, self.group)
        except BaseException:
            self.close()
            raise

    @property
    def is_server(self) -> bool:
        """Whether this rank holds the optimizer."""
        return self.group.rank == SERVER

    @property
    def placement(self) -> dict[str, str]:
        """How gradients travel."""
        return {"strategy": "server"}

    @property
    def contract(self) -> str | None:
        """ "declared" or "undeclared", whichever the last step was; None before the first."""
        return self._model.contract

    def backward_and_step(self, loss: Tensor) -> None:
        """``backward(loss)``, then ``step()``. Collective."""
        self.backward(loss)
        self.step()

    def backward(self, loss: Tensor) -> None:
        """Compute this rank's gradient of ``loss`` and send it to the server. Collective.

        What a plain ``backward()`` has accumulated in ``.grad`` before is part of it.

        Raises:
            ValueError: ``loss`` has no gradient for any parameter of the module; the other ranks then raise
                ``Desync``, as after any other error in here.
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

    def micro_batches(self, num_leaves: int, *, step: int | None = None) -> Iterator[Leaf]:
        """Declare a step, as ``DataParallel.micro_batches``; the end of the loop sends this rank's sums.

        In the loop: ``loss.backward()``. After it: ``step()``.
        """
        self._require_no_gradient("micro_batches()")
        yield from self._model.micro_batches(num_leaves, step=step)
        self._has_come()

    def step(self) -> None:
        """The server's optimizer steps, then every rank has its weights. Collective.

        Raises:
            ValueError: there was no ``backward`` or ``micro_batches`` since the last step.
            Desync: on the workers, if the server's optimizer raised.
        """
        if not self._pending:
            raise ValueError("step() without a gradient: call backward(loss), or run micro_batches(), first")
        self._pending = False
        failed = self._update() if self.is_server else None
        self._reducer.gradients.drop()
        server = -1 if self.is_server else self.group.ranks[SERVER]
        with self.recorder.span(PARAMETER_UPDATE, lane="host", peer=server):
            self._tell(failed)
        with self.recorder.span(PARAMETER_UPDATE, lane="host"):
            work = self._reducer.lane.submit(
                "the weights from the server", lambda: self._star.give(self._reducer.buckets)
            )
            work.wait()
        if not self.is_server:  # where the optimizer's own hook counts
            self._reducer.stepped()
        self.recorder.stepped()

    def discard(self) -> None:
        """Drop the gradient that the server has, on all ranks, in the place of ``step``."""
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
        word = torch.tensor([failed is not None], dtype=torch.int64, device="cpu")
        self._reducer.lane.submit(VERDICT, lambda: self.group.broadcast(word, VERDICT, root=SERVER)).wait()
        if failed is not None:
            raise failed
        if word.item():
            raise Desync(
                f"rank {self.group.ranks[SERVER]}, the parameter server, could not update the weights: they "
                "are what they were. The cause stands in its own traceback"
            )

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
        self._reducer.begin(Plan(False, size, [[rank] for rank in range(size)]), lambda: 1)
        self._reducer.leave()


def _agree_on_optimizers(module: nn.Module, optimizer: Optimizer | None, group: Group) -> None:
    """Raise ``ValueError`` on all ranks unless the server has an optimizer, over the module's. Collective."""
    problems = group.all_gather_bytes(_problem(module, optimizer, group).encode(), "the look at optimizers")
    for problem in filter(None, problems):
        raise ValueError(problem.decode())


def _problem(module: nn.Module, optimizer: Optimizer | None, group: Group) -> str:
    where = f"rank {group.global_rank}"
    if optimizer is None:
        return f"{where} is the parameter server: expected an optimizer, got None" if group.rank == 0 else ""
    if not isinstance(optimizer, Optimizer):
        return f"{where}: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
    own = set(map(id, module.parameters()))
    for i, options in enumerate(optimizer.param_groups):
        for k, parameter in enumerate(options["params"]):
            if id(parameter) not in own:
                return (
                    f"{where}: parameter {k} of group {i} in the optimizer, shape {tuple(parameter.shape)}, "
                    "is none of the module's: the other ranks would never get it. Make the optimizer from "
                    "module.parameters(), after the module has its final ones"
                )
    return ""
