"""The loop of a run, turned inside out: the script has it, and what happens between two steps happens here.

__next__    ranks meet and take the state; what follows the step before; the next step
__enter__   the step begins                                                                step.py
__exit__    it is made; or a rank was lost in it, and the others part, to meet again in __next__
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from instep.checkpoint.manifest import Scalar
from instep.checkpoint.registered import Registered
from instep.elastic.faults import FaultInjector, parse_all
from instep.elastic.heartbeat import Heartbeat
from instep.elastic.rendezvous import ControlChannel
from instep.launch.launch_environment import detect
from instep.launch.output import outlive_output
from instep.launch.rank_process import exit_now
from instep.launch.signals import listen_for_preemption
from instep.mesh.mesh import Mesh
from instep.net.agree import on_first_rank
from instep.run.folder import Claimed, claim_together, how_to_go_on, say
from instep.run.generation import EXIT_CODES, Ending, Generation
from instep.run.membership import Membership, require_contract
from instep.run.placement import axes_for, introduction, layout_of
from instep.run.recovery import Checkpoints, Snapshots
from instep.run.replay import StepReplay
from instep.run.script import script_fields, script_path
from instep.run.script_training import ScriptTraining
from instep.run.step import StepWork

if TYPE_CHECKING:
    from instep.run.run import Run

TOO = "too: torchrun ... -m instep run --resume SCRIPT"
FORGOTTEN = (
    "step {} was not entered: write `with step:` around all that it does, so that all ranks can retry it"
)


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

    _steps: RunLoop

    def __new__(cls, number: int, steps: RunLoop) -> RunStep:
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

    def span(self, name: str) -> AbstractContextManager[object]:
        """Name what the script does in the block, for the timeline and the report.

        Args:
            name: "augment", "metrics": none that instep has for spans of its own.

        Returns:
            A context manager.

        Raises:
            ValueError: instep has a span of this name.
            RuntimeError: it is not inside of ``with step:``.

        Example:
            >>> run = instep.Run()
            >>> for step in run.steps(1, model=model, optimizer=optimizer):
            ...     with step:
            ...         with step.span("augment"):
            ...             batch = x + 0.1 * torch.randn_like(x)
            ...         loss_function(model(batch), y).backward()
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            run ...
        """
        return self._steps.work.span(name)

    def log(self, **figures: Any) -> None:
        """Record figures of this step: in ``steps.jsonl``, on the terminal, in summary, report and loggers.

        Those of rank 0 count: take ``instep.mean`` where ranks have different ones. Of a step that is made
        again, the last ones count.

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


class RunLoop(Iterator[RunStep]):
    """The loop of a run, turned inside out: ``__next__`` is what happens between two steps."""

    def __init__(self, run: Run, num_steps: int) -> None:
        if num_steps < 1:
            raise ValueError(f"run.steps({num_steps}): expected 1 or more")
        self.run, self.num_steps = run, num_steps
        self.asked: list[str] = []
        self.finishes = False
        self.code: int | None = None  # with which the loop has ended the script
        self.path: Path | None = None
        self._generation: Generation | None = None
        self._step: RunStep | None = None
        self._entered = self._made = self._is_over = False
        self._why: dict[str, Any] = {}
        self._member: Membership | None = None
        self._memory: Snapshots | None = None
        self._claimed: list[Claimed] = []
        self._listen_no_longer: Callable[[], None] = lambda: None
        self._begin()

    def _begin(self) -> None:
        run, launch = self.run, self.run._started
        if launch is not None and launch.channel is not None and launch.loops:
            raise RuntimeError(
                "run.steps: under `instep run` a script has one loop, and this one has had its loop: write "
                "a script for each run"
            )
        registered = Registered(run._objects)
        if not registered.models:
            raise ValueError(
                "run.steps: no model is registered: run.register(model=model, optimizer=optimizer)"
            )
        registered.count_updates()
        spike, num_optimizers = run._settings.checks.spike, len(registered.optimizers)
        if spike and num_optimizers > 1:
            raise ValueError(
                f"spike={spike:g}: expected one optimizer, got {num_optimizers}, whose gradients come one "
                "after the other: leave it at 0"
            )
        settings = layout_of(registered, replace(run._settings, steps=self.num_steps))
        channel = launch.channel if launch else None
        heartbeat = channel.heartbeat if channel else Heartbeat()
        fields = _in_contract(run._contract, seed=settings.seed, steps=settings.steps)
        self.training = training = ScriptTraining(
            settings,
            registered,
            heartbeat,
            script_config=run._config,
            contract_of=lambda: {**fields, **script_fields(script_path())},
            held_out_loss=None if run._held_out_loss is None else self._held_out_loss,
            command="instep run" if launch is None or launch.call.main is None else "instep train",
        )
        self._injector = FaultInjector(parse_all(settings.fault), heartbeat.page, training.entries)
        self._injector.rank = -1 if channel else run.mesh.rank
        heartbeat.on_enter = self._injector.on_enter
        self.work = StepWork(training, self._injector, recovers=channel is not None)
        self.replay = StepReplay(self.work, settings.checks.replay_every)
        if launch is not None:
            launch.loops.append(self)
        if channel is not None:
            self._member = Membership(channel, training)
            self._memory = memory = Snapshots(channel)
            self.work.wishes = {
                "stop": lambda: bool(channel.page.stop or self.asked),
                "finish": lambda: self.finishes,
                "regroup": lambda: channel.regroup,
                "copy": lambda: memory.due(training),
            }
            self._park(channel)
        else:
            outlive_output()
            self._listen_no_longer = listen_for_preemption(self.asked.append)
            self.work.wishes = {"stop": lambda: bool(self.asked), "finish": lambda: self.finishes}

    def _park(self, channel: ControlChannel) -> None:
        """All that can be done without a rank, while no rank waits for this process."""
        training = self.training
        number = channel.page.contract
        path = training.config.run_dir or Path()
        require_contract(training.contract, training.contract_number, number, path)
        training.keep()
        for loader in training.registered.loaders.values():
            loader.start()
        training.heartbeat.enter("built")

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
            except BaseException as error:
                self._give_up(error)
                raise
            if ending is None:
                break
            if ending is Ending.REGROUP:
                self._part(None)
            else:
                self._finish(ending)
        self._step, self._entered, self._made = RunStep(self.training.steps_done, self), False, False
        self.work.phases.own()
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
        self.work.phases.follow(run.mesh.recorder)
        checkpoints = Checkpoints(self.path, training.config.timeout_s, training.heartbeat, self._memory)
        parts = self._memory, self._member, self._introduction
        self._generation = generation = Generation(training, self.path, checkpoints, *parts)
        ending = generation.begin()
        if self._member is not None and training.steps_done == 0:  # what is built can be built only once
            self._keep_beginning(checkpoints)
        return ending

    def _keep_beginning(self, checkpoints: Checkpoints) -> None:
        """Have the state of before the first step in memory, and on disk for when that is not trusted."""
        assert self._memory is not None
        if self.training.owns:
            self._memory.write(self.training)
        # One rank looks: of a divided state all have to come to the save, or none.
        if on_first_rank(self.run.mesh.world.group, "looking for a checkpoint", checkpoints.newest) < 0:
            checkpoints.save(self.training)

    def _await_assignment(self, member: Membership) -> None:
        settings, training = self.training.config, self.training
        path = None if settings.run_dir is None else str(settings.run_dir)
        training.heartbeat.enter("built" if not self._why else "lost")
        assignment = member.channel.next_assignment(run_dir=path, resume=settings.resume, **self._why)
        if assignment is None:  # this process is not needed any more
            exit_now(0)
        self._injector.rank = assignment.rank  # before the first phase in which it has one
        member.take(assignment)
        self.path = Path(assignment.told)
        assert self._memory is not None
        self._memory.take_over(assignment.memory)

    def _meet(self, member: Membership) -> Mesh:
        run, settings = self.run, self.training.config
        arranged = run._settings.parallel
        return member.meet(
            backend=arranged.named_backend,
            device=arranged.named_device,
            timeout_s=settings.timeout_s,
            threads=arranged.threads,
            **axes_for(member.world_size, arranged),
        )

    def _claim(self) -> Path:
        """The folder, claimed by all ranks together, which another launcher has started."""
        settings, place = self.training.config, detect(os.environ)
        group = self.run.mesh.world.group
        asked = settings.run_dir, settings.resume
        try:
            path, resume = claim_together(*asked, place, group, self._claimed.append)
        except ValueError as error:
            if self.run.mesh.rank or self.training.command != "instep run":
                raise
            raise ValueError(f"{error}. These are words of `instep run`, under torchrun {TOO}") from None
        self.training.config = replace(settings, run_dir=path, resume=resume)
        return path

    def _held_out_loss(self) -> float:
        """The script's, in which a rank that waits for others is told from one that is stuck."""
        assert self.run._held_out_loss is not None
        self.work.phases.begin("evaluate")
        try:
            told = self.run._held_out_loss()
        finally:
            self.work.phases.end()
        try:
            return float(told)
        except (TypeError, ValueError, RuntimeError):  # the last: a tensor of several numbers
            kind = type(told).__name__
            raise TypeError(f"run.evaluate_with: expected a number of the function, got {kind}") from None

    def _introduction(self, is_first: bool) -> list[str]:
        assert self.path is not None
        asked = self.run._settings.parallel
        return introduction(self.training, self.path, asked, is_first=is_first)

    def _part(self, error: RuntimeError | None) -> None:
        """Leave the group, for ``error``, or because another one is to be formed."""
        if self._member is None:
            assert error is not None
            self.close()
            raise error
        self._why = self._member.where if error is None else self._member.parted(error)
        self.replay.give_up()
        self.asked.clear()  # run.stop() is said again when the step is made again
        self.finishes = False
        if error is not None:
            self.work.recover()
        self.training.heartbeat.enter("lost")
        if self._generation is not None:
            self._generation.checkpoints.give_up()
            self._generation.close()
        self._generation, self._made = None, False
        self.training.leave()

    @property
    def left(self) -> str:
        """Where the script has left the loop before its end; "" if it has not. A recorded step counts."""
        if self._is_over or self._generation is None or self._member is None:
            return ""
        return f"after {self.training.steps_done - self._made} of {self.num_steps} steps"

    @property
    def rank(self) -> int:
        """Of this process in the group that it is in, or was in; 0 before."""
        return 0 if self._member is None else self._member.rank

    def _finish(self, ending: Ending) -> NoReturn:
        self.close()
        self.work.phases.own()
        if ending is Ending.STOPPED:
            self.code = EXIT_CODES[ending]
            raise SystemExit(self.code)
        raise StopIteration

    def close(self) -> None:
        """Give the files back; the mesh stays, for what a script does after its last step."""
        self._is_over = True
        self._listen_no_longer()
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
        try:
            self._generation.checkpoints.watch()
            self.work.begin(self.replay.begin())
        except BaseException as error:  # a block that was not entered is not left either
            self.work.close_step()
            self._give_up(error)
            raise

    def leave(self, error: BaseException | None) -> bool:
        """It ends, or has raised ``error``; whether that is taken care of."""
        raised = error
        if raised is None:
            try:
                self._end_step()
                return True
            except BaseException as late:
                raised = late
        self.work.close_step()
        if isinstance(raised, RuntimeError) and self._member is not None:
            try:
                self._part(raised)
                return True
            except RuntimeError as again:
                if again is not raised:
                    raise
        else:
            self._give_up(raised)
        if error is None:
            raise raised
        return False

    def _end_step(self) -> None:
        """Collective; a step that is to be made again is not counted."""
        assert self._generation is not None
        self.work.close_step()
        self.training.rank_state.holds = self.work.held
        if self.replay.end():
            return
        self._generation.after.made(self.work.end())
        self._made = True
        self.training.agreed()
        self.work.phases.own()

    def _give_up(self, error: BaseException) -> None:
        """The loop is left by an error; in a notebook another one may follow."""
        self.replay.give_up()
        if self._member is not None:
            return
        self.close()
        if isinstance(error, KeyboardInterrupt) and self.path is not None and self.run._started is None:
            resume = f"instep.Run({str(self.path)!r}, resume=True)"
            end_with_a_line(error, f"interrupted {how_to_go_on(self.path, resume)}")


def _in_contract(scripts: Mapping[str, Scalar], **own: Scalar) -> dict[str, Scalar]:
    """The run's ``own`` fields and the ``scripts``', of which one that says something else by the name of an
    own one is called otherwise: neither may hide a change of the other."""
    clashing = {name for name, value in own.items() if scripts.get(name, value) != value}
    named = {f"config.{name}" if name in clashing else name: value for name, value in scripts.items()}
    return named | own


def end_with_a_line(interrupt: KeyboardInterrupt, line: str) -> None:
    """Where ``interrupt`` ends the program, ``line`` stands in the place of its traceback."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is interrupt:
            say(line)
        else:
            before(kind, error, trace)

    sys.excepthook = told
