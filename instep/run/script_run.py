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
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from instep.checkpoint.registered import Registered
from instep.elastic.faults import FaultInjector, parse_all
from instep.elastic.heartbeat import Heartbeat
from instep.mesh.join import await_rank, init
from instep.mesh.launch_environment import detect
from instep.mesh.mesh import Mesh
from instep.mesh.rank_process import exit_now
from instep.mesh.signals import listen_for_preemption
from instep.run import folder
from instep.run.claim import Wanted, claim_together
from instep.run.generation import EXIT_CODES, Ending, Generation
from instep.run.membership import Membership, require_contract
from instep.run.recovery import Checkpoints, Snapshots
from instep.run.script import Started, script_fields, script_path, started
from instep.run.script_step import StepWork
from instep.run.script_training import ScriptTraining, layout_of
from instep.run.settings import (
    CheckpointConfig,
    ChecksConfig,
    LedgerConfig,
    LogsConfig,
    ScriptSettings,
    TraceConfig,
)
from instep.run.twice import Twice

FORGOTTEN = (
    "step {} was not entered: write `with step:` around all that it does; the loss of a rank in there is "
    "what the run survives"
)


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
        seed: of what steps draw.
        resume: go on with the run that is in ``run_dir``; a launcher's restart does so without being told.
        accept_contract: go on although script, arguments, libraries or processor are not what they were.
        checkpoint_every: steps between two checkpoints; 0 saves at the end only.
        keep: newest checkpoints to keep, at least 2.
        replicas_every: steps between two comparisons of what ranks hold alike; 0: never.
        check_every: steps from one that is made twice, on other ranks each time, and compared, to the next:
            see ``run/twice.py``; 0: none.
        ledger_every: steps between two hashes of the whole state; 0: at the end only.
        ledger_leaves: write down the hash of every micro-batch's gradient, for ``instep compare``.
        max_skipped: steps in a row that may be skipped because a gradient is not finite, or a spike.
        spike: skip a step whose gradient norm is above the median of the last ones by so many median absolute
            deviations; 0: never. With one optimizer.
        trace_events: how many events each rank keeps; 0: none on disk.
        tensorboard, wandb: log there too.
        shard: ranks of a shard group, among which ``fully_shard`` divides; -1: all.
        backend, timeout_s, threads: as for ``instep.init``.

    Attributes:
        mesh: of the present generation; inside of ``steps`` it has this process's rank.

    Raises:
        ValueError, PeerLost: as ``instep.init``.

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

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        seed: int = 0,
        resume: bool = False,
        accept_contract: bool = False,
        checkpoint_every: int = 100,
        keep: int = 3,
        replicas_every: int = 50,
        check_every: int = 0,
        ledger_every: int = 50,
        ledger_leaves: bool = False,
        max_skipped: int = 5,
        spike: float = 0.0,
        trace_events: int = 1 << 17,
        tensorboard: bool = False,
        wandb: bool = False,
        shard: int = 1,
        backend: str | None = None,
        timeout_s: float = 300.0,
        threads: int = 1,
    ) -> None:
        self._started = started.get()
        call = self._started.call if self._started is not None else None
        path = script_path()
        self._shard, self._backend = shard, backend
        self._settings = ScriptSettings(
            script="" if path is None else str(path),
            arguments=tuple(sys.argv[1:]) if path is not None else (),
            stop_after=call.stop_after if call else 0,
            seed=seed,
            timeout_s=timeout_s,
            run_dir=(call.run_dir if call else None) or (None if run_dir is None else Path(run_dir)),
            resume=resume or (call is not None and call.resume),
            accept_contract=accept_contract or (call is not None and call.accept_contract),
            checkpoint=CheckpointConfig(every=checkpoint_every, keep=keep),
            checks=ChecksConfig(
                max_skipped=max_skipped,
                spike=spike,
                replicas_every=replicas_every,
                leaves_every=(call.check_every if call else 0) or check_every,
            ),
            ledger=LedgerConfig(
                every=(call.ledger_every if call else 0) or ledger_every,
                leaves=ledger_leaves or (call is not None and call.leaves),
            ),
            trace=TraceConfig(events=trace_events),
            logs=LogsConfig(tensorboard=tensorboard, wandb=wandb),
        )
        self._threads = threads
        self._objects: dict[str, Any] = {}
        self._steps: _Steps | None = None
        if self._started is not None:
            place = self._started.channel.heartbeat.worker
            self.mesh: Mesh = await_rank(backend=backend, timeout_s=timeout_s, threads=threads, place=place)
        else:
            self.mesh = init(shard=shard, backend=backend, timeout_s=timeout_s, threads=threads)

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
            >>> for step in run.steps(1):
            ...     with step:
            ...         loss_function(model(x), y).backward()
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        if self._steps is not None:
            raise RuntimeError("run.steps: a run has one loop, and this one has had it: make another Run")
        self.register(**objects)
        self._steps = _Steps(self, num_steps)
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
            >>> run.stop()  # before the first step it is too early, and does nothing
        """
        if self._steps is None:
            raise RuntimeError(
                "run.stop: the steps have not begun: call it inside of the loop over run.steps"
            )
        self._steps.asked.append("run.stop()")


class RunStep(int):
    """A step of a run, to be entered: ``with step:``. It is the number of steps done before it.

    Attributes:
        number: that number, as a plain int.
        is_last: whether the run ends with it.

    Example:
        >>> run = instep.Run()
        >>> for step in run.steps(1, model=model, optimizer=optimizer):
        ...     with step:
        ...         loss_function(model(x), y).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     print(step, step.number, step.is_last)
        0 0 True
        run ...
    """

    _steps: _Steps

    def __new__(cls, number: int, steps: _Steps) -> RunStep:
        made = super().__new__(cls, number)
        made._steps = steps
        return made

    @property
    def number(self) -> int:
        """The number of steps done before it."""
        return int(self)

    @property
    def is_last(self) -> bool:
        """Whether the run ends with it."""
        return int(self) + 1 == self._steps.num_steps

    def log(self, **figures: Any) -> None:
        """Write down figures of this step: in ``metrics.jsonl``, on the terminal, where it was asked for.

        Those of rank 0 count: take ``instep.mean`` where ranks have different ones. "loss" stands in the
        ledger too, and in the line that is shown. Of a step that is made again, the last ones count.

        Args:
            figures: numbers, or tensors and arrays of one element.

        Raises:
            ValueError: one is no number, or has the name of a figure that the run writes itself.
            RuntimeError: the step is not entered, or is over.

        Example:
            >>> run = instep.Run()
            >>> for step in run.steps(1, model=model, optimizer=optimizer):
            ...     with step:
            ...         loss = loss_function(model(x), y)
            ...         loss.backward()
            ...         optimizer.step()
            ...         step.log(loss=loss)
            run ...
        """
        self._steps.work.log(figures)

    def __enter__(self) -> RunStep:
        self._steps.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._steps.leave(error)


class _Steps(Iterator[RunStep]):
    """The loop of a run, turned inside out: ``__next__`` is what happens between two steps."""

    def __init__(self, run: Run, num_steps: int) -> None:
        if num_steps < 1:
            raise ValueError(f"run.steps({num_steps}): expected 1 or more")
        self.run, self.num_steps = run, num_steps
        self.asked: list[str] = []
        self.path: Path | None = None
        self._generation: Generation | None = None
        self._step: RunStep | None = None
        self._entered = self._made = self._is_over = False
        self._why: dict[str, Any] = {}
        self._member: Membership | None = None
        self._memory: Snapshots | None = None
        self._claimed: list[folder.Claimed] = []
        self._listen_no_longer: Callable[[], None] = lambda: None
        self._begin()

    def _begin(self) -> None:
        run, launch = self.run, self.run._started
        registered = Registered(run._objects)
        if not registered.models:
            raise ValueError(
                "run.steps: no model is registered: run.register(model=model, optimizer=optimizer)"
            )
        spike, num_optimizers = run._settings.checks.spike, len(registered.optimizers)
        if spike and num_optimizers > 1:
            raise ValueError(
                f"spike={spike:g}: expected one optimizer, got {num_optimizers}, whose gradients come one "
                "after the other: leave it at 0"
            )
        settings = layout_of(registered, replace(run._settings, steps=self.num_steps), run._backend or "auto")
        heartbeat = launch.channel.heartbeat if launch else Heartbeat()
        self.training = training = ScriptTraining(settings, registered, heartbeat)
        fields = {"seed": settings.seed, "steps": settings.steps}
        training.describe_by(lambda: {**fields, **script_fields(settings.arguments)})
        faults = parse_all(launch.call.fault) if launch else []
        self._injector = FaultInjector(faults, heartbeat.page, training.entries)
        self._injector.rank = -1 if launch else run.mesh.rank
        heartbeat.on_enter = self._injector.reach
        self.work = StepWork(training, self.asked)
        self.twice = Twice(self.work, settings.checks.leaves_every)
        if launch is not None:
            self._member = Membership(launch.channel, training)
            self._memory = Snapshots(launch.channel)
            self.work.wishes = {
                "stop": lambda: bool(launch.channel.page.stop or self.asked),
                "regroup": lambda: launch.channel.regroup,
                "copy": lambda: self._memory is not None and self._memory.due(training),
            }
            self._park(launch)
        else:
            self._listen_no_longer = listen_for_preemption(self.asked.append)
            self.work.wishes = {"stop": lambda: bool(self.asked)}

    def _park(self, launch: Started) -> None:
        """All that can be done without a rank, while no rank waits for this process."""
        training = self.training
        number = launch.channel.page.contract
        require_contract(training.contract, training.contract_number, number, self._wanted() or Path())
        if not number:
            training.keep()
        training.heartbeat.enter("built")

    def _wanted(self) -> Path | None:
        return self.training.config.run_dir

    # Between two steps.

    def __next__(self) -> RunStep:
        if self._is_over:
            raise StopIteration
        if self._step is not None and not self._entered:
            raise RuntimeError(FORGOTTEN.format(int(self._step)))
        while True:
            try:
                ending = self._go_on()
                if ending in EXIT_CODES and self._generation is not None:
                    self._generation.end(ending)
            except RuntimeError as error:
                self._part(error)
                continue
            if ending is None:
                break
            if ending is Ending.REGROUP:
                self._part(None)
            else:
                self._finish(ending)
        self._step, self._entered, self._made = RunStep(self.training.steps_done, self), False, False
        return self._step

    def _go_on(self) -> Ending | None:
        if self._generation is None:
            return self._take_part()
        if self._made:
            return self._generation.after.follow_up()
        return None

    def _take_part(self) -> Ending | None:
        """Join the ranks of the next generation, and take the state; an ending, if nothing is left to do."""
        training, run = self.training, self.run
        if self._member is not None:
            self._await_assignment(self._member)
            run.mesh = self._meet(self._member)
            training.join(run.mesh, wrappers=True)
            self._member.joined()
        else:
            self.path = self._claim()
            training.join(run.mesh, wrappers=False)
        assert self.path is not None
        run.mesh.recorder.watch = self.work.phases.watch
        checkpoints = Checkpoints(self.path, training.config.timeout_s, training.heartbeat)
        self._generation = generation = Generation(
            training, self.path, checkpoints, self._memory, self._introduction
        )
        if self._member is not None:
            generation.stepped, generation.agreed = self._member.stepped, self._agreed
        ending = generation.begin()
        if self._memory is not None and training.steps_done == 0 and training.owns:
            self._memory.write(training)  # what the script has built can be built only once
        training.agreed()
        return ending

    def _await_assignment(self, member: Membership) -> None:
        settings, training = self.training.config, self.training
        path = None if settings.run_dir is None else str(settings.run_dir)
        training.heartbeat.enter("built" if not self._why else "lost")
        assignment = member.channel.next_assignment(run_dir=path, resume=settings.resume, **self._why)
        if assignment is None:  # this process is not needed any more
            exit_now(0)
        member.take(assignment)
        self.path = Path(assignment.told)
        self._injector.rank = assignment.rank
        assert self._memory is not None
        self._memory.take_over(assignment.memory)

    def _meet(self, member: Membership) -> Mesh:
        run, settings = self.run, self.training.config
        shard = member.world_size if run._shard == -1 else run._shard
        place = member.channel.heartbeat.worker
        return member.meet(
            backend=run._backend,
            timeout_s=settings.timeout_s,
            threads=run._threads,
            local_rank=place,
            shard=shard if member.world_size % shard == 0 else 1,
        )

    def _agreed(self, source: str) -> None:
        assert self._member is not None
        self._member.agreed(source, self.training.contract_number)

    def _claim(self) -> Path:
        """The folder, claimed by all ranks together, which another launcher has started."""
        settings, place = self.training.config, detect(os.environ)
        group = self.run.mesh.world.group
        path, resume = claim_together(
            Wanted(settings.run_dir, settings.resume), place, group, self._claimed.append
        )
        self.training.config = replace(settings, run_dir=path, resume=resume)
        return path

    def _introduction(self, is_first: bool) -> list[str]:
        training, mesh = self.training, self.run.mesh
        size = sum(p.numel() for p in training.module.parameters())
        ranks = f"{mesh.world_size} rank{'s' * (mesh.world_size != 1)} of {mesh.device.type}"
        if not is_first:
            return [f"going on with {ranks}"]
        names = ", ".join(self.run._objects)
        return [
            f"{size / 1e6:.2f} M parameters on {ranks}, {self.run._threads} thread(s) each; registered: "
            f"{names}; deadline {training.config.timeout_s:g} s",
            f"run directory {self.path}",
        ]

    def _part(self, error: RuntimeError | None) -> None:
        """Leave the group, for ``error``, or because another one is to be formed."""
        if self._member is None:
            assert error is not None
            self.close()
            raise error
        self._why = self._member.where if error is None else self._member.parted(error)
        self.twice.give_up()
        if error is not None:
            self.work.recover()
        self.training.heartbeat.enter("lost")
        if self._generation is not None:
            self._generation.checkpoints.give_up()
            self._generation.close()
        self._generation, self._made = None, False
        self.training.leave()

    def _finish(self, ending: Ending) -> NoReturn:
        self._is_over = True
        self.close()
        if ending is Ending.STOPPED:
            raise SystemExit(EXIT_CODES[ending])
        raise StopIteration

    def close(self) -> None:
        """Give the files back; the mesh stays, for what a script does after its last step."""
        self._is_over = True
        self._listen_no_longer()
        self.work.close()
        if self._generation is not None:
            self._generation.close()
        while self._claimed:
            self._claimed.pop().release()

    # In a step.

    def enter(self) -> None:
        """A step begins."""
        if self._entered:
            raise RuntimeError(f"step {self.training.steps_done} was entered before: each is entered once")
        self._entered = True
        assert self._generation is not None
        self._generation.checkpoints.watch()
        self.work.begin(watched=self.twice.begin())

    def leave(self, error: BaseException | None) -> bool:
        """It ends, or has raised ``error``; whether that is taken care of."""
        skipped = self.work.skipped_by(error)
        if error is not None and skipped is None:
            self.work.abandon()
            if not isinstance(error, RuntimeError) or self._member is None:
                return False
            try:
                self._part(error)
            except RuntimeError as raised:
                if raised is not error:
                    raise
                return False
            return True
        assert self._generation is not None
        try:
            if self.work.closed(self.twice.end):
                return True
            self._generation.after.made(self.work.end(skipped))
        except RuntimeError as lost:
            self.work.abandon()
            self._part(lost)
            return True
        self._made = True
        return True
