"""``instep.Run``: a user's own loop as a run, which survives the loss of a rank.

    run = instep.Run("runs/mine")            who has started this process, and a mesh to wrap models with
    run.register(model=..., optimizer=...)   what is carried from step to step
    for step in run.steps(1000):             here ranks meet, and take the newest state that there is
        with step:                           a lost rank ends it, on all ranks; then the loop goes on with
            ...                              the step that all have the state for, perhaps this one again

Under ``instep run`` every process runs the script from its top and is parked where the loop begins, the first
ones and those that come later. What happens there, in what order:

    supervisor    an assignment: rank, world size, the snapshots that it holds
    wrappers      leave the mesh that they have, join the new one, in place
    state         from a rank that has everything, a snapshot, a checkpoint, or as the scripts have built it
    step          ... until PeerLost leaves the block, or what follows a step; then an assignment again

Started otherwise, by torchrun, Slurm or as one process, ranks meet in ``Run`` and stay together: the loss of
one ends the others, and the launcher's restart goes on from the newest checkpoint.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from instep.checkpoint.manifest import Scalar
from instep.launch.launch_environment import detect
from instep.mesh.deterministic import enable as enable_deterministic
from instep.mesh.join import await_rank, init
from instep.mesh.mesh import Mesh
from instep.net.device import resolve
from instep.run.best import Best
from instep.run.loop import RunLoop, RunStep
from instep.run.placement import axes_for
from instep.run.script import script_command, started
from instep.run.settings import (
    CheckpointConfig,
    ChecksConfig,
    MeshConfig,
    RecordConfig,
    ScriptCommand,
    ScriptConfig,
    ScriptEvaluation,
    ScriptRecord,
)
from instep.run.toml import check, merge, scalar, scalars

Topic = Mapping[str, Any] | MeshConfig | CheckpointConfig | ChecksConfig | RecordConfig
NOTHING: Mapping[str, Any] = {}


class Run:
    """A training loop of your own with all that ``instep train`` has: a folder, recovery, a record, a report.

    At construction: who has started this process is found, and ``mesh`` is there to wrap models with. In
    ``steps``: ranks meet, every registered object takes the newest state, and step follows step. What a lost
    rank breaks inside of ``with step:`` is made again by all, from the state before it, with the same bits.

    Under ``instep run`` a process has no rank before ``steps`` (``mesh.rank`` raises): any may have to take
    another's place. At the beginning of each step the generators of torch, Python and numpy are seeded by
    (``seed``, step, rank), so that a step which is made again draws the same; micro-batches of declared steps
    have keys of their own.

    Each of ``mesh``, ``checkpoint``, ``checks`` and ``record`` is a dict of settings, or the dataclass of
    ``instep/run/settings.py`` that documents them. ``instep run`` has a flag for each, which wins.

    Args:
        run_dir: the directory of the run; None makes one in ``runs/``.
        seed: of what steps draw.
        mesh: how ranks are arranged: ``shard``, ``pp``, ``tp``, ``ep``, ``backend``, ``device``, ``threads``
            as for ``instep.init``; ``deterministic`` sets what the same bits need on a GPU before CUDA
            starts. Where a run goes on with a number of ranks that ``pp`` or ``shard`` does not divide,
            pipelines and shard groups are larger, the next number that does; of ``tp`` and ``ep`` the
            largest part that does.
        checkpoint: ``every`` so many steps (100; 0: at the end only), and how many to ``keep`` (3); ``best``,
            the figure by which the best one is kept, too: "val_loss", "max:val_acc".
        checks: ``max_skipped``, ``spike``, ``skip_steps``, ``replicas_every``, ``replay_every``.
        record: ``hash_every`` so many steps, ``leaves``, ``events``, ``tensorboard``, ``wandb="project"``;
            ``items`` and ``items_per_step``, which the throughput counts ("tokens" and 2048 give
            ``tokens_per_s``; by default samples, where a loader is registered, or steps); ``loss_unit``.
        timeout_s: the longest that a rank may keep the others waiting, in the script's own code too.
        config: the script's settings, for ``config.toml``: a dataclass of numbers, words and dataclasses.
        contract: those of them that the bits depend on, by name: a run does not go on with others unless it
            is told to. By default all of ``config``, and without that the script's arguments. ``seed`` and
            the number of steps are part of it anyway.
        resume: resume the run in ``run_dir``; a launcher's restart does so without being told.
        accept_contract: resume although libraries or processor have changed, and the bits may differ.

    Attributes:
        mesh: of the present generation; inside of ``steps`` it has this process's rank.

    Raises:
        ValueError, PeerLost: as ``instep.init``.
        ValueError: ``deterministic`` after CUDA has started without ``CUBLAS_WORKSPACE_CONFIG``.
        ValueError: a setting that does not exist, with the nearest that does, or is out of range; ``items``
            without ``items_per_step``; or ``config`` has what TOML has no word for.
        TypeError: ``config`` is no dataclass.

    Example:
        >>> run = instep.Run("runs/mine")
        >>> model = instep.DataParallel(model, run.mesh)
        >>> run.register(model=model, optimizer=optimizer)
        >>> for step in run.steps(2):
        ...     with step:
        ...         for micro_batch in model.micro_batches(8):
        ...             first = 4 * micro_batch.index
        ...             loss = loss_function(model(x[first : first + 4]), y[first : first + 4])
        ...             loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         step.log(loss=loss)
        run    runs/mine
        steps  2 on 1 rank, bucketed
        ...
        >>> run.rank, run.world_size
        (0, 1)
    """

    __module__ = "instep"

    _held_out_loss: Callable[[], float] | None = None
    _steps: RunLoop | None = None

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        seed: int = 0,
        mesh: Topic = NOTHING,
        checkpoint: Topic = NOTHING,
        checks: Topic = NOTHING,
        record: Topic = NOTHING,
        timeout_s: float = 300.0,
        config: Any = None,
        contract: Mapping[str, Scalar] | None = None,
        resume: bool = False,
        accept_contract: bool = False,
    ) -> None:
        self._config, self._started = _checked_config(config), started()
        told = {
            "seed": seed,
            "timeout_s": timeout_s,
            "resume": resume,
            "accept_contract": accept_contract,
            "parallel": _table("mesh", mesh, MeshConfig),
            "checkpoint": _table("checkpoint", checkpoint, CheckpointConfig),
            "checks": _table("checks", checks, ChecksConfig),
            "record": _table("record", record, ScriptRecord),
            **({} if run_dir is None else {"run_dir": os.fspath(run_dir)}),
        }
        settings = merge(ScriptConfig(**asdict(script_command())), told, "instep.Run")
        given = {} if self._started is None else self._started.call.given
        self._settings = settings = merge(settings, given, "instep run")
        check(settings)
        _check_items(settings.record)
        Best.of(settings.checkpoint.best)
        layout = settings.parallel
        on_gpu = resolve(layout.named_device, layout.named_backend, 1).type == "cuda"
        if layout.deterministic and on_gpu:
            enable_deterministic()
        self._contract = _contract(contract, config)
        self._objects: dict[str, Any] = {}
        self.mesh: Mesh = self._first_mesh()

    def _first_mesh(self) -> Mesh:
        """That of the launcher's ranks, or one to build with until there are ranks."""
        channel = self._started.channel if self._started is not None else None
        parallel, timeout_s = self._settings.parallel, self._settings.timeout_s
        options: dict[str, Any] = {"backend": parallel.named_backend, "device": parallel.named_device}
        options |= {"timeout_s": timeout_s, "threads": parallel.threads}
        if channel is not None:
            channel.say("deadline", seconds=timeout_s)
            return await_rank(channel.place, channel.num_places, **options)
        launched = detect(os.environ)
        axes = {name: getattr(parallel, name) for name in ("shard", "pp", "tp", "ep")}
        if launched.restart_count:  # with fewer ranks, perhaps
            axes = axes_for(launched.world_size, parallel)
        return init(**options, **axes)

    @property
    def rank(self) -> int:
        """The global rank of this process, inside of ``steps``.

        Raises:
            ValueError: it has none yet.
        """
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """The number of ranks, inside of ``steps``.

        Raises:
            ValueError: it is not known yet.
        """
        return self.mesh.world_size

    def register(self, **objects: Any) -> None:
        """Say what is carried from step to step, by names of your own, before ``steps``.

        Models, wrapped or not; optimizers; and what else has ``state_dict`` and ``load_state_dict``: a
        schedule, a loader, a scaler. Their state is restored exactly when a step is made again: tensors as
        they are, the rest as JSON. What a script keeps beside them stays as it is.

        Raises:
            ValueError: a name is taken, an object cannot be carried, or an optimizer has parameters of a
                model that is not registered.
            RuntimeError: the steps have begun.

        Example:
            >>> run = instep.Run()
            >>> run.register(model=model, optimizer=optimizer)
        """
        if self._steps is not None:
            raise RuntimeError("run.register: the steps have begun: register before run.steps")
        for name, x in objects.items():
            if self._objects.get(name, x) is not x:
                raise ValueError(f"run.register: {name!r} is registered already: take another name")
            self._objects[name] = x

    def evaluate_with(self, held_out_loss: Callable[[], float], *, every: int = 0) -> None:
        """Have ``held_out_loss()`` told before the first step, after one in ``every``, and after the last.

        It is called on all ranks together, between two steps, and again where a rank was lost meanwhile. What
        it returns on rank 0 is shown, and is ``held_out_loss`` in ``steps.jsonl`` and ``summary.json``.

        Args:
            held_out_loss: the loss on what is not trained on; may communicate.
            every: steps from one evaluation to the next; 0: only before the first step and after the last.

        Raises:
            ValueError: ``every`` is below 0.
            RuntimeError: the steps have begun.

        Example:
            >>> run = instep.Run()
            >>> run.evaluate_with(lambda: loss_function(model(x), y).item(), every=100)
        """
        if self._steps is not None:
            raise RuntimeError("run.evaluate_with: the steps have begun: call it before run.steps")
        if every < 0:
            raise ValueError(f"run.evaluate_with: every={every}: expected 0 or more")
        self._held_out_loss = held_out_loss
        self._settings = replace(self._settings, eval=ScriptEvaluation(every=every))

    def steps(self, num_steps: int, **objects: Any) -> Iterator[RunStep]:
        """The steps up to ``num_steps``, from the newest state that there is: 0 in a new run.

        A step that was broken comes again, and after a restart of everything those after the newest
        checkpoint. ``objects`` are registered first. At the end the run is summed up.

        Args:
            num_steps: of the whole run, not of this call.
            objects: as for ``register``.

        Yields:
            A step, an int that counts from 0: write ``with step:`` around all that it does.

        Raises:
            ValueError: no model is registered, or what cannot be; the folder holds another run.
            ContractBroken: script, arguments, libraries or processor are not those that the run began with.
            CheckpointRejected: no checkpoint of the run can be trusted.
            SystemExit: 75: the run was asked to end, and has saved a checkpoint.
            RuntimeError: the run has had its loop.

        Example:
            >>> run = instep.Run()
            >>> for step in run.steps(1, model=model, optimizer=optimizer):
            ...     with step:
            ...         loss_function(model(x), y).backward()
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            run ...
        """
        if self._steps is not None:
            raise RuntimeError("run.steps: a run has one loop, and this one has had it: make another Run")
        self.register(**objects)
        self._steps = RunLoop(self, num_steps)
        return self._steps

    def close(self) -> None:
        """Give back what the run holds, and the ranks' groups: at the end of a script it is done anyway.

        Example:
            >>> run = instep.Run()
            >>> run.close()
        """
        if self._steps is not None:
            self._steps.close()
        self.mesh.close()

    def finish(self) -> None:
        """Make this step the last, on all ranks, as early stopping does: with a checkpoint and a summary.

        What follows the loop runs, and the exit code is 0. It is enough if one rank calls it.

        Raises:
            RuntimeError: the steps have not begun.

        Example:
            >>> run = instep.Run()
            >>> for step in run.steps(1000, model=model, optimizer=optimizer):
            ...     with step:
            ...         run.finish()
            run ...
        """
        self._loop("finish").finishes = True

    def stop(self) -> None:
        """Interrupt the run after this step, on all ranks, to be resumed: with a checkpoint, as SIGTERM does.

        Raises:
            RuntimeError: the steps have not begun.

        Example:
            >>> run = instep.Run()
            >>> for step in run.steps(1, model=model, optimizer=optimizer):
            ...     with step:
            ...         run.stop()  # it is the last in any case
            run ...
        """
        self._loop("stop").asked.append("run.stop()")

    def _loop(self, call: str) -> RunLoop:
        if self._steps is None:
            raise RuntimeError(
                f"run.{call}: the steps have not begun: call it inside of the loop over run.steps"
            )
        return self._steps


def _table(name: str, topic: Topic, kind: type[Any]) -> Mapping[str, Any]:
    """The settings in ``topic`` that ``kind`` has."""
    if is_dataclass(topic):
        topic = {x.name: getattr(topic, x.name) for x in fields(topic) if x.name in kind.__dataclass_fields__}
    if not isinstance(topic, Mapping):
        raise TypeError(f"instep.Run: {name}: expected a dict of settings, got {topic!r}")
    merge(kind(), topic, f"instep.Run: {name}")
    return topic


def _checked_config(config: Any) -> Any:
    """``config``, if ``config.toml`` can have it beside the command that started the run."""
    if config is None:
        return None
    if not is_dataclass(config) or isinstance(config, type):
        kind = config.__name__ if isinstance(config, type) else type(config).__name__
        raise TypeError(f"config: expected an instance of a dataclass, got {kind}: write the settings as one")
    taken = sorted({field.name for field in fields(config)} & ScriptCommand.__dataclass_fields__.keys())
    if taken:
        raise ValueError(
            f"config: a field is called {taken[0]!r}, by which config.toml says how the run was started: "
            "take another name"
        )
    return config


def _contract(given: Mapping[str, Scalar] | None, config: Any) -> dict[str, Scalar]:
    """What of the script's settings the bits depend on; all of them can be written down."""
    own: dict[str, Scalar] = {"script.arguments": shlex.join(script_command().arguments)}
    if config is not None:
        own = scalars(config)
    return own if given is None else {name: scalar(f"contract: {name}", x) for name, x in given.items()}


def _check_items(record: ScriptRecord) -> None:
    """ValueError unless ``items`` and ``items_per_step`` go together."""
    items, number = record.items, record.items_per_step
    if bool(items) != bool(number) or (items and not items.isidentifier()):
        raise ValueError(
            f"record.items {items!r} with record.items_per_step {number}: expected a word, and how many of "
            "these a step has: tokens and 2048"
        )
