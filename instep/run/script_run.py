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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from instep.checkpoint.manifest import Scalar
from instep.launch.launch_environment import detect
from instep.mesh.deterministic import enable as enable_deterministic
from instep.mesh.join import await_rank, init
from instep.mesh.mesh import Mesh
from instep.net.device import resolve
from instep.run.script import ScriptCall, script_command, started
from instep.run.script_layout import shard_axis
from instep.run.script_loop import RunStep, ScriptLoop
from instep.run.settings import (
    CheckpointConfig,
    ChecksConfig,
    LedgerConfig,
    LogsConfig,
    ScriptCommand,
    ScriptEvaluation,
    ScriptSettings,
    TraceConfig,
)
from instep.run.toml import scalar, scalars


class Run:
    """A training loop of one's own, with all that ``instep train`` has: a folder, recovery, ledger, report.

    At construction: who has started this process is found, and ``mesh`` is there to wrap models with. In
    ``steps``: ranks meet, every registered object takes the newest state, and step follows step. What a lost
    rank breaks inside of ``with step:`` is made again by all, from the state before it, with the same bits.

    Under ``instep run`` a process has no rank before ``steps`` (``mesh.rank`` raises): any may have to take
    another's place. At the beginning of each step the generators of torch, Python and numpy are seeded by
    (``seed``, step, rank), so that a step which is made again draws the same; micro-batches of declared steps
    have keys of their own.

    Args:
        run_dir: the folder that the run is recorded in; None makes one in ``runs/``. ``instep run --run-dir``
            comes before it.
        config: the script's settings, for ``config.toml``: a dataclass of numbers, words and dataclasses.
        contract: what of them the bits depend on, by name: a run does not go on with others unless it is told
            to. By default all of ``config``, and without that the script's arguments. ``seed`` and the number
            of steps are part of it anyway.
        seed: of what steps draw.
        items, items_per_step: what the throughput counts, and how many of them a step has: "tokens" and 2048
            give ``tokens_per_s``. By default samples, where a loader is registered, or steps.
        loss_unit: of "loss": "nats per byte".
        resume: go on with the run that is in ``run_dir``; a launcher's restart does so without being told.
        accept_contract: go on although script, arguments, libraries or processor are not what they were.
        checkpoint_every: steps between two checkpoints; 0 saves at the end only.
        keep: newest checkpoints to keep, at least 2.
        replicas_every: steps between two comparisons of what ranks hold alike; 0: never.
        check_every: steps from one that is made twice, on other ranks each time, and compared, to the next;
            a rank that computes otherwise than two others is named: see ``run/twice.py``; 0: none.
        ledger_every: steps between two hashes of the whole state; 0: at the end only.
        ledger_leaves: write down the hash of every micro-batch's gradient, for ``instep compare``.
        max_skipped: steps in a row that may be skipped because a gradient is not finite, or a spike.
        skip_steps: steps, counted from 0, that read their samples and leave weights and moments alone.
        spike: skip a step whose gradient norm is above the median of the last ones by so many median absolute
            deviations; 0: never. With one optimizer.
        trace_events: how many events each rank keeps; 0: none on disk.
        tensorboard, wandb: log there too; ``wandb`` may be the name of a project.
        pp: ranks of a ``Pipeline``; where a run goes on with a number of ranks that it does not divide, a
            pipeline has as many more as it needs to.
        shard: ranks of a shard group, among which ``fully_shard`` divides; -1: all. Where a run goes on with
            another number of ranks, which cannot be cut like that, the next larger number that divides them.
        backend, device, timeout_s, threads: as for ``instep.init``. Under ``instep run`` a rank that replaces
            a lost one takes its GPU; a spare waits for that where the script first reads ``net.device``.
        deterministic: on a GPU, set what the same bits need before CUDA starts: deterministic algorithms,
            ``CUBLAS_WORKSPACE_CONFIG``, and no fill of uninitialised memory. CPU kernels need none of it.

    Attributes:
        mesh: of the present generation; inside of ``steps`` it has this process's rank.

    Raises:
        ValueError, PeerLost: as ``instep.init``.
        ValueError: ``deterministic`` after CUDA has started without ``CUBLAS_WORKSPACE_CONFIG``.
        ValueError: one of ``items`` and ``items_per_step`` without the other, or out of range; or ``config``
            has what TOML has no word for.
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
        steps  2 on 1 rank(s), bucketed
        ...
        >>> run.rank, run.world_size
        (0, 1)
    """

    __module__ = "instep"

    _held_out_loss: Callable[[], float] | None = None
    _steps: ScriptLoop | None = None

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        config: Any = None,
        contract: Mapping[str, Scalar] | None = None,
        seed: int = 0,
        items: str = "",
        items_per_step: int = 0,
        loss_unit: str = "",
        resume: bool = False,
        accept_contract: bool = False,
        checkpoint_every: int = 100,
        keep: int = 3,
        replicas_every: int = 50,
        check_every: int = 0,
        ledger_every: int = 50,
        ledger_leaves: bool = False,
        max_skipped: int = 5,
        skip_steps: Sequence[int] = (),
        spike: float = 0.0,
        trace_events: int = 1 << 17,
        tensorboard: bool = False,
        wandb: bool | str = False,
        shard: int = 1,
        pp: int = 1,
        backend: str | None = None,
        device: str | None = None,
        deterministic: bool = False,
        timeout_s: float = 300.0,
        threads: int = 1,
    ) -> None:
        self._shard, self._pp, self._config = shard, pp, _checked_config(config)
        self._backend, self._device, self._started = backend, device, started()
        if deterministic and resolve(device, backend, 1).type == "cuda":
            enable_deterministic()
        self._contract = _contract(contract, config)
        settings = ScriptSettings(
            **asdict(script_command()),
            seed=seed,
            items=items,
            items_per_step=_checked_number(items, items_per_step),
            loss_unit=loss_unit,
            timeout_s=timeout_s,
            run_dir=None if run_dir is None else Path(run_dir),
            resume=resume,
            accept_contract=accept_contract,
            checkpoint=CheckpointConfig(every=checkpoint_every, keep=keep),
            checks=ChecksConfig(
                max_skipped=max_skipped,
                skip_steps=tuple(skip_steps),
                spike=spike,
                replicas_every=replicas_every,
                leaves_every=check_every,
            ),
            ledger=LedgerConfig(every=ledger_every, leaves=ledger_leaves),
            trace=TraceConfig(events=trace_events),
            logs=_logs(tensorboard, wandb),
        )
        call = ScriptCall(Path()) if self._started is None else self._started.call
        self._settings, self._threads = call.over(settings), call.threads or threads
        self._objects: dict[str, Any] = {}
        self.mesh: Mesh = self._first_mesh()

    def _first_mesh(self) -> Mesh:
        """That of the launcher's ranks, or one to build with until there are ranks."""
        channel = self._started.channel if self._started is not None else None
        options: dict[str, Any] = {"backend": self._backend, "device": self._device}
        options |= {"timeout_s": self._settings.timeout_s, "threads": self._threads}
        if channel is not None:
            return await_rank(channel.place, channel.num_places, **options)
        launched, shard, pp = detect(os.environ), self._shard, self._pp
        if launched.restart_count:  # with fewer ranks, perhaps
            shard, pp = shard_axis(launched.world_size, shard), shard_axis(launched.world_size, pp)
        return init(**options, shard=shard, pp=pp)

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
        self._steps = ScriptLoop(self, num_steps)
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

    def stop(self) -> None:
        """End the run after this step, on all ranks, with a checkpoint: as SIGTERM does.

        Raises:
            RuntimeError: the steps have not begun.

        Example:
            >>> run = instep.Run()
            >>> for step in run.steps(1, model=model, optimizer=optimizer):
            ...     with step:
            ...         run.stop()  # it is the last in any case
            run ...
        """
        if self._steps is None:
            raise RuntimeError(
                "run.stop: the steps have not begun: call it inside of the loop over run.steps"
            )
        self._steps.asked.append("run.stop()")


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


def _logs(tensorboard: bool, wandb: bool | str) -> LogsConfig:
    project = wandb if isinstance(wandb, str) and wandb else LogsConfig.wandb_project
    return LogsConfig(tensorboard=tensorboard, wandb=bool(wandb), wandb_project=project)


def _checked_number(items: str, items_per_step: int) -> int:
    """``items_per_step``, if the two go together."""
    if not items and not items_per_step:
        return 0
    if not items.isidentifier():
        raise ValueError(
            f"items={items!r} with items_per_step={items_per_step!r}: expected a word for what a step has so "
            'many of, such as items="tokens"'
        )
    if type(items_per_step) is not int or items_per_step < 1:
        raise ValueError(f"items_per_step={items_per_step!r}: expected the number of {items} in a step")
    return items_per_step
