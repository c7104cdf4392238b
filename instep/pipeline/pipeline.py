"""``Pipeline``: a model whose layers are on several ranks, which work on different micro-batches at a time.

    rank 0   layers 0 1 2   | 0F0 0F1         0B0 0F2 0B1 ...      forward, backward; stage, kind, micro-batch
                            v          ^
    rank 1   layers 3 4 5       | 1F0 1B0 1F1 1B1 ...

In which order, is a schedule, which is data (``actions.py``, ``schedules.py``): ``runtime.py`` executes it.
Each stage's gradients are reduced over the ranks that have the same stage, along the other axes of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from instep.mesh.mesh import Mesh, UnrankedMesh, registered_mesh
from instep.net.agree import all_or_none
from instep.net.process_group import Group
from instep.pipeline import schedules
from instep.pipeline.actions import Action, Schedule
from instep.pipeline.channel import StageChannel
from instep.pipeline.check import check
from instep.pipeline.communication import programs
from instep.pipeline.cuts import LAYERS, edges_of
from instep.pipeline.first_values import FirstOfLayers
from instep.pipeline.home import NO_VALUES, PipelineHome, guard, is_absent
from instep.pipeline.layers import Layer, Layers, layers_of, numbered_blocks
from instep.pipeline.one_process import PipelineTrial
from instep.pipeline.runtime import (
    Executor,
    Inputs,
    Loss,
    StepEnd,
    StepTask,
    evaluate,
    first_of_data,
    read_in_order,
)
from instep.pipeline.stage import Stage
from instep.pipeline.stage_gradients import StageGradients
from instep.pipeline.tied import TiedParameters, ties_of
from instep.reduce.node_format import NodeFormat
from instep.replicate.module_proxy import ModuleProxy
from instep.replicate.strategies import find
from instep.shard.materialise import Init
from instep.state import homes
from instep.state.boxes import BoxHome
from instep.state.homes import Wrapped
from instep.step.agreement import agree_on_structure, broadcast_values
from instep.step.micro_batches import DataSource, count_and_source
from instep.step.nesting import WrappedOnce, require_supported
from instep.step.reduction import ReductionOptions, StepPlan
from instep.verify.gradient_report import Report

Closed = TypeVar("Closed", Group, Stage)


class Pipeline(WrappedOnce, ModuleProxy):
    """Trains a model in stages: each rank along the mesh's axis ``pp`` has some of the layers.

    A step is one call, in which every rank does its part of a schedule. It is a declared step: gradients, and
    weights after the optimizer's step, have the same bits for every schedule and cut, and for any number of
    ranks along ``pp`` and ``dp``, one included. Dropout is keyed by micro-batch and layer. ``DataParallel``
    gives the same bits, but for the dropout of layers that are no blocks (``rng_block = True``).

    At construction ranks compare their models and take those of the first one; then each gives back the
    memory of the layers that others have. Their parameters stay there by name, without elements: of shape
    (0, 16) instead of (64, 16). After a step ``.grad`` of this rank's parameters is the mean over all
    micro-batches, and of the others None, so that ``optimizer.step()`` steps this stage.
    ``instep.clip_grad_norm_`` clips by the norm over all stages.

    Args:
        layers: an ``nn.Sequential``, a list of modules, or a module with a method ``pipeline_layers()``,
            which returns (path, callable) of each layer in the order in which forward calls them. A layer
            that returns a tuple gives the next one several arguments. Between stages there are tensors, of
            any shapes, and None.
        mesh: of ``instep.init(pp=...)``; by default the registered one.
        schedule: "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2" or "zb-v"; or the text of one of
            your own, a row of actions per rank, as ``str`` of a schedule prints it.
        micro_batches: G of each step, unless ``step`` is given data; the bits depend on it.
        chunks: stages per rank, of "interleaved", by default 2; any other schedule says that itself.
        cuts: "layers", about as many in each stage; "cost", about as many parameters; or a list with the
            first layer of each stage but the first.
        strategy, bucket_cap_mb, nodes, rounding, find_unused_parameters, seed: as for ``DataParallel``.

    Raises:
        TypeError: ``layers`` does not say which layers there are.
        ValueError: on all ranks; models differ, layers are too few, a parameter is in none, a bad schedule.
        PeerLost: a rank did not come.

    Example:
        >>> mesh = instep.init()  # pp=4, say, on four ranks
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
        >>> model = instep.Pipeline(net, mesh, schedule="zb-h1")
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> rows = lambda micro_batch: slice(micro_batch.index * 4, micro_batch.index * 4 + 4)
        >>> losses = model.step(
        ...     lambda output, micro_batch: loss_function(output, y[rows(micro_batch)]),
        ...     inputs=lambda micro_batch: x[rows(micro_batch)],
        ...     data=8,
        ... )
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> len(losses), model.step_mode, model.placement["schedule"], model.placement["cut_by"]
        (8, 'declared', 'zb-h1', 'layers')
    """

    __module__ = "instep"
    is_outermost = True

    def __init__(
        self,
        layers: nn.Module | Sequence[nn.Module],
        mesh: Mesh | None = None,
        schedule: str = "1f1b",
        micro_batches: int | None = None,
        *,
        chunks: int | None = None,
        cuts: str | Sequence[int] = LAYERS,
        strategy: str = "bucketed",
        bucket_cap_mb: float | str = 25,
        nodes: str = "float32",
        rounding: str = "nearest",
        find_unused_parameters: bool | None = None,
        seed: int = 0,
    ) -> None:
        if rounding == "stochastic":
            raise ValueError(
                "rounding='stochastic' in a pipeline: its random bits are keyed by a parameter's number in "
                "its stage, so that gradients would depend on the cuts: leave rounding='nearest'"
            )
        super().__init__(layers if isinstance(layers, nn.Module) else nn.ModuleList(layers))
        self.schedule, self._num_micro_batches, self.next_step = schedule, micro_batches, 0
        self._chunks, self._seed = chunks, seed
        self._cuts = cuts if isinstance(cuts, str) else list(cuts)
        self._options = ReductionOptions(
            find(strategy),
            bucket_cap_mb,
            unused=find_unused_parameters,
            nodes=NodeFormat(nodes, rounding, seed),
        )
        self._strategy = strategy
        self.home: PipelineHome | None = None
        self._first_values: FirstOfLayers | None = None  # of parameters from the meta device
        self._is_unfilled = any(p.is_meta for p in self.module.parameters())
        self._bind(_mesh_with_stages(mesh))
        self._constructed()

    def _bind(self, mesh: Mesh) -> None:
        """Take part in ``mesh``. Collective. Where it fails, parameters have the values that they had."""
        self.mesh, self.recorder, self._is_closed = mesh, mesh.recorder, True
        if self.home is None:  # layers may be cut over ranks too
            found = homes.homes(self.module.parameters())
            self._boxes = next((there for there in found if isinstance(there, BoxHome)), None)
        elif self._boxes is not None:
            self._boxes.bind(mesh)
        with ExitStack() as stack:
            self.group = _closed_by(stack, mesh.world.duplicate())
            self._pp_group = _closed_by(stack, mesh.along["pp"].duplicate())
            self._layers, schedule, self._edges = all_or_none(
                self.group, "the preparation of pipelines", self._prepare, errors=(ValueError, TypeError)
            )
            if self.home is None:
                agree_on_structure(self.module, self._described(), self.group)
                for group in [self.group] if self._boxes is None else [self._pp_group, mesh.data.group]:
                    broadcast_values(self.module, group)  # ranks along tp and ep have other boxes
            self._parts = [Layers(self._layers[a:b]) for a, b in pairwise(self._edges)]
            self._stage_ranks = ranks = schedule.stage_ranks
            # By NCCL, messages of each direction have a group of their own (``connections.py``).
            num_ways = 2 * (self._pp_group.backend == "nccl" and mesh.device.type == "cuda")
            ways = [_closed_by(stack, mesh.along["pp"].duplicate()) for _ in range(num_ways)]
            self._channel = StageChannel(self._pp_group, mesh.device, ways)
            self._programs: dict[int, Sequence[Action]] = {}  # by the number of micro-batches: this rank's
            named = dict(self.module.named_parameters())
            used = ties_of(named, self._parts)
            owners = [ranks[stages[0]] for _, stages in used]
            home = PipelineHome(self._pp_group, self.group, mesh, named, owners, self.home, self._boxes)
            homes.settle(home)
            stack.callback(homes.leave, home)
            if not home.has_values and not isinstance(mesh, UnrankedMesh):
                home.make_room()
            self._tied = TiedParameters(used, ranks, self._pp_group.rank, home, self._channel)
            if self._tied.ties:  # of which it is the model that knows
                tied = partial(check, replace(schedule, ties=self._tied.ties))
                all_or_none(self.group, "the schedule of pipelines", tied, errors=(ValueError,))
            self._gradients = StageGradients(home, self.recorder)
            self._guards = guard(self.module, home)
            for handle in self._guards:
                stack.callback(handle.remove)
            self._stages = self._make_stages(stack)
            self._end = StepEnd(self._channel, self.recorder, self.module, self._parts, ranks)
            stack.pop_all()
        home.release()
        self.home, self._is_closed = home, False

    def _prepare(self) -> tuple[list[Layer], Schedule, list[int]]:
        """The layers, a schedule with the stages, and the cut; what this rank may refuse."""
        require_supported(self.module)
        for name, p in self.module.named_parameters():
            if (there := homes.home(p)) is not None and there.replicas is None:
                raise ValueError(
                    f"parameter {name!r} is divided among ranks already: make the pipeline of a module that "
                    "fully_shard has not divided, and divide its optimizer's state with "
                    "instep.ShardedOptimizer"
                )
            if self.home is None and (is_absent(p) or not (there is None or there.has_values)):
                raise ValueError(
                    f"parameter {name!r} has no values here, as another pipeline had it on another rank: "
                    "make the model anew, and load its values"
                )
        from_meta = {p.is_meta for p in self.module.parameters()}
        if len(from_meta) > 1:
            raise ValueError(
                "some parameters are on the meta device, and others are not: make the whole model there, and "
                "fill it with materialise(), or give all of them values before the pipeline is made"
            )
        layers, schedule = layers_of(self.module), self._schedule_of(None)
        if self.home is None:
            self._sizes = [sum(p.numel() for p in layer.module.parameters()) for layer in layers]
        # One stage, until there are ranks.
        cuts = LAYERS if isinstance(self.mesh, UnrankedMesh) else self._cuts
        return layers, schedule, edges_of(cuts, self._sizes, schedule.num_stages)

    def _schedule_of(self, num_micro_batches: int | None) -> Schedule:
        """That of a step with so many micro-batches in this pipeline."""
        size = self._pp_group.size
        found = schedules.own(self.schedule, self._chunks)
        if found is None:
            count = self._usual_count() if num_micro_batches is None else num_micro_batches
            return schedules.generate(self.schedule, size, count, self._chunks)
        if isinstance(self.mesh, UnrankedMesh):  # all stages are here, until there are ranks
            return schedules.generate("naive", 1, 1)
        if found.num_ranks != size or num_micro_batches not in (None, found.num_micro_batches):
            given = "any number of" if num_micro_batches is None else num_micro_batches
            raise ValueError(
                f"the schedule is of {found.num_ranks} ranks and {found.num_micro_batches} micro-batches, "
                f"not of {size} and {given}: write one, or change micro_batches (--batch.global-size)"
            )
        return found

    def _usual_count(self) -> int:
        """Of micro-batches in this pipeline, as far as it is known where it is made."""
        count = self._num_micro_batches
        return -(-count // self.mesh.data.size) if count else 2 * self._pp_group.size

    def _make_stages(self, stack: ExitStack) -> dict[int, Stage]:
        """Those of this rank, which ``stack`` closes."""
        blocks = numbered_blocks(self.module, self._layers)
        stages = {}
        is_later = isinstance(self.mesh, UnrankedMesh) and self._is_unfilled  # when there are ranks
        for number, part in enumerate([] if is_later else self._parts):
            if self._stage_ranks[number] == self._pp_group.rank:
                stages[number] = Stage(
                    number,
                    part,
                    _closed_by(stack, self.mesh.data.duplicate()),
                    self.recorder,
                    self._options,
                    seed=self._seed,
                    blocks=blocks,
                    tied=self._tied,
                    refusal=self._gradients.refusal,
                )
                _closed_by(stack, stages[number])
        return stages

    def _described(self) -> dict[str, object]:
        """What has to be the same on all ranks."""
        return {
            "schedule": self.schedule,
            "micro_batches": self._num_micro_batches,
            "chunks": self._chunks,
            "cuts": self._cuts,
            "strategy": self._strategy,
            "nodes": str(self._options.nodes),
            "seed": self._seed,
        }

    def step(
        self,
        loss: Loss,
        inputs: Inputs = first_of_data,
        data: int | DataSource | None = None,
        *,
        step: int | None = None,
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches; then every ``.grad`` is the mean over them. Collective.

        The data of a micro-batch is a function of ``step`` and ``micro_batch.index``, never of the rank.

        Args:
            loss: ``loss(output, micro_batch)`` of what the last layer gives: a scalar mean, or a sum over
                ``micro_batch.weight`` items, if it sets that. Called on the rank of the last stage.
            inputs: ``inputs(micro_batch)`` is what the first layer is called with; a tuple is several
                arguments. By default the first of what a loader has read. Called on that of the first stage.
            data: an ``instep.Loader``, or G; by default ``micro_batches``, of when it was made.
            step: what the random numbers are keyed by; by default the steps so far.

        Returns:
            The losses of this pipeline's micro-batches, in order, on all its ranks: () each.

        Raises:
            ValueError: a rule of declared steps is broken.
            RuntimeError: the pipeline is closed.
            Desync: another rank has left the step, or is in another one.
            PeerLost: a rank did not come.

        Example:
            >>> inputs = lambda micro_batch: x[rows(micro_batch)]
            >>> losses = model.step(lambda output, micro_batch: output.square().mean(), inputs, data=2)
        """
        self._require_usable()
        count, source = count_and_source(self._count(data))
        step = self.next_step if step is None else step
        plan, task = self._planned(count, source, step, inputs, loss)
        losses = self._execute(task, plan)
        if source is not None:
            source.advance()
        self.next_step = step + 1
        self._gradients.changed()
        return losses

    def micro_batches(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the loop of ``DataParallel`` is inside of ``step``, which knows the schedule.

        Raises:
            TypeError: always.

        Example:
            >>> model.micro_batches(8)
            Traceback (most recent call last):
            TypeError: micro_batches() of a pipeline: ...
        """
        raise TypeError(
            "micro_batches() of a pipeline: its schedule goes over them: call model.step() instead"
        )

    def _planned(
        self, count: int, source: DataSource | None, step: int, inputs: Inputs, loss: Loss
    ) -> tuple[StepPlan, StepTask]:
        """Step ``step`` of ``count`` micro-batches, and what of it is this pipeline's."""
        first = next(iter(self._stages.values()))
        plan = first.declared.plan(count, source, step)
        own = plan.leaves[first.group.rank]
        read = read_in_order(own, count, source if self._reads else None)
        return plan, StepTask(step, own, read, inputs, loss)

    def verify(
        self,
        loss: Loss,
        inputs: Inputs = first_of_data,
        data: int | DataSource | None = None,
        *,
        rtol: float | None = None,
    ) -> Report:
        """Compare the gradients of all stages with those of one process, parameter by parameter. Collective.

        All ranks make the next step, without an update; then each of them computes all micro-batches again,
        with all layers, so it needs memory for the whole model. ``inputs`` and ``loss`` are called for each
        one. Weights, buffers, gradients, random generators and the count of steps are as before when
        it returns or raises.

        Args:
            loss, inputs, data: as for ``step``; a loader stays where it is.
            rtol: allowed error, relative to the norm of each gradient; by default as for ``DataParallel``.

        Returns:
            The same report on every rank: which gradients differ, on which rank, and what is probably wrong.

        Raises:
            ValueError, TypeError, InstepError: a rank raised in its part; all do.
            PeerLost: a rank did not come.

        Example:
            >>> first = lambda micro_batch: x[rows(micro_batch)]
            >>> report = model.verify(lambda output, micro_batch: output.square().mean(), first, data=2)
            >>> report.ok, report.strategy
            (True, 'bucketed, pipelines of 1 (zb-h1)')
        """
        self._require_usable()
        assert self.home is not None
        count, source = count_and_source(self._count(data))
        plan, task = self._planned(count, source, self.next_step, inputs, loss)
        trial = PipelineTrial(
            self.module,
            self._layers,
            self._stages,
            self.home,
            self.group,
            copy=self.mesh.data.rank,
            seed=self._seed,
            rtol=rtol,
            floor=self._options.nodes.tolerance,
        )
        every = task._replace(own=range(count), read=read_in_order(range(count), count, source))
        placed = self.placement
        strategy = f"{placed['strategy']}, pipelines of {placed['pp']} ({placed['schedule']})"
        return trial.run(lambda: self._execute(task, plan), every, strategy)

    def _execute(self, task: StepTask, plan: StepPlan) -> list[Tensor]:
        """Make ``task``, with the other ranks, until gradients are reduced; the losses of this pipeline."""
        self.recorder.ensure_step()
        executor = Executor(self._stages, self._stage_ranks, self._channel, self._tied, task, self.recorder)
        return self._end.together(
            partial(executor.execute, plan, partial(self._program, len(task.own))), self._stages
        )

    def _program(self, num_micro_batches: int) -> Sequence[Action]:
        """What this rank does in a step of so many."""
        if num_micro_batches not in self._programs:
            schedule = replace(self._schedule_of(num_micro_batches), ties=self._tied.ties)
            if schedule.ties:
                check(schedule)
            self._programs[num_micro_batches] = programs(schedule)[self._pp_group.rank]
        return self._programs[num_micro_batches]

    def materialise(self, init: Init | None = None, *, seed: int = 0) -> None:
        """Give values to a model from the meta device: each rank to its own layers. Collective.

        They have the bits that one process would give them. In a script under ``instep run`` it is done where
        the loop over ``run.steps`` begins, and only if the run has no state yet. ``instep.load`` gives
        values, too.

        Args:
            init: ``init(name, tensor)`` fills one whole parameter in place. By default the model's own
                ``init_parameter`` does, as for ``instep.initialize``; else ``reset_parameters`` of its
                submodules.
            seed: with the name of a parameter it keys the random numbers of its values.

        Raises:
            ValueError: nothing fills a parameter, or a buffer is on the meta device.
            PeerLost: a rank did not come.

        Example:
            >>> with torch.device("meta"):
            ...     net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
            >>> large = instep.Pipeline(net, schedule="gpipe")
            >>> large.materialise(seed=1)
        """
        assert self.home is not None
        self._first_values = FirstOfLayers(self.module, init, seed)
        if isinstance(self.mesh, UnrankedMesh):
            self._first_values.prepare(self._layers, self.home)
        else:
            self._fill()

    def _fill(self) -> None:
        """As ``Wrapped`` says of ``fill``."""
        assert self.home is not None
        if not self._is_unfilled or self.home.has_values:
            return
        if self._first_values is None:
            raise ValueError(NO_VALUES)
        self._first_values.fill(self._layers, self.home, self.mesh.data.group)

    def __call__(self, *values: Any) -> Any:
        """What the model gives for ``values``, which are the same on all ranks of a pipeline, on all of them.

        Without gradients: for evaluation. Collective.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a pipeline's backward needs its schedule: train by model.step(loss, inputs, data), and call "
                "the model under torch.no_grad() to evaluate it"
            )
        self._require_usable()
        found = evaluate(self._stages, self._stage_ranks, self._channel, self._tied, values)
        return found[0] if len(found) == 1 else found

    @property
    def placement(self) -> dict[str, Any]:
        """How ranks share a step: "strategy", "pp" (ranks of a pipeline), "schedule", "cut_by" (the argument
        ``cuts``) and "cuts" (where that cuts it)."""
        name = self.schedule if self.schedule in schedules.NAMES else "own"
        cuts = self._edges[1:-1]
        placed = {"strategy": self._strategy, "pp": self._pp_group.size, "schedule": name}
        return {**placed, "cut_by": self._cuts, "cuts": cuts}

    @property
    def step_mode(self) -> str | None:
        """ "declared"; None before the first step."""
        return "declared" if self.next_step else None

    def close(self) -> None:
        """Give back the groups and end the threads; parameters of other ranks stay without values.

        Example:
            >>> model.close()
        """
        self._is_closed = True
        for stage in self._stages.values():
            stage.close()
        for handle in self._guards:
            handle.remove()
        if self.home is not None and not self.home.has_values:
            self.home.vacate()
        for group in (*self._channel.directions, self._pp_group, self.group):
            group.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a pipeline can be neither copied nor pickled, as a rank has some of its layers: copy the model "
            "before it is made, or use instep.save"
        )

    def __instep_state__(self) -> Wrapped:
        reducers = [stage.reducer for stage in self._stages.values()]
        return Wrapped(
            module=self.module,
            group=self.group,
            gradients=lambda: [bucket.home for reducer in reducers for bucket in reducer.buckets],
            scratch=lambda: [
                *(x for reducer in reducers for bucket in reducer.buckets for x in bucket.counter.spares),
                *(x for reducer in reducers for x in reducer.exchange.scratch),
                *self._tied.memory,
            ],
            counter=self,
            nodes=str(self._options.nodes),
            leave=self._leave,
            join=self._bind,
            settled=self._settled,
            fill=self._fill,
            micro_batch=lambda: next((r.micro_batch for r in reducers if r.micro_batch is not None), None),
            reductions={f"stage {number}": stage.reducer for number, stage in self._stages.items()},
        )

    def _settled(self) -> None:
        for stage in self._stages.values():
            stage.reducer.watch.settled()

    def _require_usable(self) -> None:
        if self._is_closed:
            raise RuntimeError("this pipeline is closed: make another one of a model that has all its values")
        if self.home is None or not self.home.has_values:
            raise ValueError(NO_VALUES)

    def _leave(self) -> None:
        assert self.home is not None
        if isinstance(self.mesh, UnrankedMesh):  # what it was given there is the script's to bring
            self._is_unfilled = not self.home.has_values
        for stage in self._stages.values():
            stage.abandon()
        self.module.zero_grad()  # those of other ranks, too, which only the optimizer's step would discard
        self.close()
        self.home.vacate()

    def _count(self, data: int | DataSource | None) -> int | DataSource:
        found = self._num_micro_batches if data is None else data
        if found is None:
            raise ValueError(
                "step(): expected the number of micro-batches, or an instep.Loader, as data=; or give "
                "micro_batches= where the pipeline is made"
            )
        return found

    @property
    def _reads(self) -> bool:
        """Whether this rank needs data: inputs in the first stage, targets in the last one."""
        return 0 in self._stages or len(self._stage_ranks) - 1 in self._stages


def _mesh_with_stages(mesh: Mesh | None) -> Mesh:
    found = registered_mesh() if mesh is None else mesh
    if not isinstance(found, Mesh) or found.is_view:
        raise ValueError(
            f"expected the mesh of instep.init(pp=...), got {found!r}: stages are along its axis pp, and "
            "their replicas along the others"
        )
    return found


def _closed_by(stack: ExitStack, x: Closed) -> Closed:
    """``x``, which ``stack`` closes."""
    stack.callback(x.close)
    return x
