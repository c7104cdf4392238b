"""TensorBoard and Weights & Biases: rank 0 hands them the figures of every step, where a run asks for it.

Both are extras, and neither may end a run, ask a question or keep it waiting: ``metrics.jsonl`` has the same
figures, so a logger that fails is named once and left alone.

    RUN/tensorboard/    events; those of steps that are done again are hidden when the run goes on
    RUN/wandb/          what W&B keeps; ``id`` is the run's name there, made once and kept for every resume

W&B works offline where it knows no API key, and where its server does not answer; ``wandb sync`` sends the
figures later. Of a step that is done again its server keeps the figures that came first.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol

from instep.regular_files import open_regular
from instep.run.jsonl import replace_text

# Names that a run may give; each is its package and its extra, too.
NAMES = ("tensorboard", "wandb")
ID_BYTES = 4
REPORTS = "WANDB_ERROR_REPORTING"
SERVICE_S = 5.0  # for its service to end, after what it may wait for the network
ONLINE = ("online", "run", "shared")


def check(names: Sequence[str]) -> None:
    """Raise ``ValueError`` for a logger that does not exist or is not installed, before any rank starts."""
    for name in names:
        if name not in NAMES:
            raise ValueError(f"logger {name!r} does not exist: expected one of {', '.join(NAMES)}")
        if find_spec(name) is None:
            raise _missing(name, "it is not installed")


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Loggers:
    """What was asked for, by name; on every rank but 0, nothing.

    At construction the packages are imported and their files opened; a ``ValueError`` then names what is to
    be installed. After each step they are given its figures. ``close`` waits at most ``timeout_s`` for the
    network, and some seconds for W&B's service. As a context manager it tells W&B whether the run has failed.
    """

    def __init__(
        self,
        names: Sequence[str],
        path: Path,
        config: Mapping[str, Any],
        *,
        rank: int = 0,
        written: int = -1,
        project: str = "instep",
        timeout_s: float = 30.0,
        say: Callable[[str], None] = _to_stderr,
    ) -> None:
        """``path`` is the run directory; ``written`` the last step that counts in it, -1 for none: later ones
        are done again. ``say`` is given lines for the user."""
        self._say = say
        self._open: dict[str, _Logger] = {}
        self._failed: set[str] = set()
        if rank != 0:
            return
        check(names)
        packages = {name: _load(name) for name in names}
        plain = json.loads(json.dumps(config, default=str))
        for name, package in packages.items():
            try:
                if name == "tensorboard":
                    self._open[name] = _TensorBoard(package, path, plain, written)
                else:
                    self._open[name] = _WandB(package, path, plain, project, timeout_s, say)
            except (Exception, SystemExit) as error:
                self._give_up(name, error)

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """``step`` steps are done; ``figures`` are of the last one."""
        for name, logger in self._open.items():
            if name not in self._failed:
                try:
                    logger.log(step, figures)
                except (Exception, SystemExit) as error:
                    self._give_up(name, error)

    def close(self, *, failed: bool = False) -> None:
        """Write what is left and end what was started; a second time, nothing."""
        while self._open:
            name, logger = self._open.popitem()
            try:
                logger.close(failed)
            except (Exception, SystemExit) as error:
                self._give_up(name, error)

    def __enter__(self) -> Loggers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def _give_up(self, name: str, error: BaseException) -> None:
        """The run goes on without the logger; what it has started is still ended by ``close``."""
        if name not in self._failed:
            self._failed.add(name)
            self._say(f"{name} has failed, and the run goes on without it: {_in_a_line(error)}")


class _Logger(Protocol):
    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class _TensorBoard:
    """Events in ``RUN/tensorboard``, flushed after each step, so that a kill loses none."""

    def __init__(self, package: ModuleType, path: Path, config: Mapping[str, Any], written: int) -> None:
        purge = None if written < 0 else written + 1
        self._writer = package.SummaryWriter(log_dir=str(path / "tensorboard"), purge_step=purge)
        if purge is None:
            indented = json.dumps(config, indent=1).replace("\n", "\n    ")
            self._writer.add_text("config", f"    {indented}")  # Markdown for: as it stands

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, figure in figures.items():
            self._writer.add_scalar(name, figure, global_step=step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class _WandB:
    """One run of W&B, with its service process, which ends with ``close``."""

    def __init__(
        self,
        package: ModuleType,
        path: Path,
        config: Mapping[str, Any],
        project: str,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._package, self._timeout_s = package, timeout_s
        # W&B puts its own there and does not take them away.
        self._hooks = sys.exit, sys.excepthook
        told = {
            "project": project,
            "dir": str(path),  # in which it makes wandb/
            "id": _identity(path),
            "name": path.resolve().name,
            "resume": "allow",
            "config": config,
        }
        with _without_reports():
            try:
                self._run = self._begin(told, say)
            except BaseException:
                self._end_service()
                raise
        if not self._run.offline and self._run.url:
            say(f"wandb: {self._run.url}")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        # Figures of one step become one row, which is complete when a later step comes.
        self._run.log(dict(figures), step=step)

    def close(self, failed: bool) -> None:
        """W&B bounds what it waits for its server, but not what it waits for its own service."""
        errors: list[BaseException] = []

        def end() -> None:
            for act in (lambda: self._run.finish(exit_code=int(failed)), self._end_service):
                try:
                    act()
                except BaseException as error:
                    errors.append(error)

        ending = threading.Thread(target=end, name="wandb-close", daemon=True)
        ending.start()
        ending.join(self._timeout_s + SERVICE_S)
        if ending.is_alive():
            raise TimeoutError(f"its service has not ended within {self._timeout_s + SERVICE_S:g} s")
        if errors:
            raise errors[0]

    def _begin(self, told: Mapping[str, Any], say: Callable[[str], None]) -> Any:
        mode = self._mode()
        try:
            return self._init(mode, told)
        except Exception as error:
            if mode not in ONLINE:
                raise
            say(f"wandb does not reach its server, and works offline: {_in_a_line(error)}")
        self._end_service()
        return self._init("offline", told)

    def _mode(self) -> str:
        """What the environment asks for; offline where the answer to that would be a prompt.

        Asked before the service starts, which otherwise meets the server even if the run is offline.
        """
        mode = os.environ.get("WANDB_MODE") or "online"
        if mode in ONLINE and not self._package.login(prompt=False, verify=False):
            return "offline"
        return mode

    def _init(self, mode: str, told: Mapping[str, Any]) -> Any:
        settings = self._package.Settings(
            mode=mode,
            silent=True,
            console="off",  # our output is not theirs to copy
            init_timeout=self._timeout_s,
            finish_timeout=self._timeout_s,
            stop_fn=_stop_politely,
        )
        self._package.setup(settings=settings)
        return self._package.init(**told, settings=settings)

    def _end_service(self) -> None:
        try:
            with suppress(SystemExit):  # its answer to a service that has died
                self._package.teardown()
        finally:
            sys.exit, sys.excepthook = self._hooks


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError as error:
        raise _missing(name, str(error)) from error


def _missing(name: str, why: str) -> ValueError:
    return ValueError(f"{name} cannot be used, {why}: pip install 'instep[{name}]', or turn logs.{name} off")


def _identity(path: Path) -> str:
    """The run's id at W&B: kept in the run directory, because another one may have the same path."""
    kept = path / "wandb" / "id"
    try:
        with open(kept, encoding="utf-8", opener=open_regular) as file:
            if known := file.read().strip():
                return known
    except FileNotFoundError:
        kept.parent.mkdir(parents=True, exist_ok=True)
    made = secrets.token_hex(ID_BYTES)
    replace_text(kept, made + "\n")
    return made


@contextmanager
def _without_reports() -> Iterator[None]:
    """What W&B reports about itself would be waited for when the process ends, with a deadline of its own."""
    before = os.environ.get(REPORTS)
    os.environ[REPORTS] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[REPORTS]
        else:
            os.environ[REPORTS] = before


def _stop_politely() -> None:
    """What the stop button of W&B does: the run saves a checkpoint and ends, as at a time limit."""
    os.kill(os.getpid(), signal.SIGTERM)


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
