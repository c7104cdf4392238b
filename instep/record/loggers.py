"""TensorBoard and Weights & Biases: rank 0 gives them the figures of every step, where a run asks for it.

Both are extras, and neither may end a run, ask a question or keep it waiting: ``steps.jsonl`` has the same
figures, so a logger that fails is named once and left alone.

    RUN/tensorboard/    events; when the run continues, those of steps that are made again are hidden
    RUN/wandb/          what W&B keeps; ``id`` is the run's name there, kept for every resume

W&B works offline without an API key, and where its server does not answer; ``wandb sync`` sends the figures
later. Of a step that is made again its server keeps the figures that came first.
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
from typing import Any

from instep.record.jsonl import read_object, replace_text, to_json

EXTRAS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # by name, the module
SERVICE_S = 5.0  # for W&B's service to end, after the time that it may wait for the network


def check(names: Sequence[str]) -> None:
    """Raise ``ValueError`` for a logger that does not exist or is not installed, before any rank starts."""
    for name in names:
        if name not in EXTRAS:
            raise ValueError(f"logger {name!r} does not exist: expected one of {', '.join(EXTRAS)}")
        if find_spec(name) is None:
            raise ValueError(
                f"{name} is not installed: pip install 'instep[{name}]', or turn record.{name} off"
            )


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Loggers:
    """The loggers called ``names``; on every rank but 0, none. As a context manager it tells W&B whether the
    run has failed."""

    def __init__(
        self,
        names: Sequence[str],
        path: Path,
        config: Mapping[str, Any],
        *,
        rank: int = 0,
        written: int = 0,
        project: str = "instep",
        timeout_s: float = 30.0,
        say: Callable[[str], None] = _to_stderr,
    ) -> None:
        """``path`` is the run directory; ``written`` the number of steps in it that count: later ones are
        made again. ``timeout_s`` bounds each wait for the network; ``say`` is given lines for the user."""
        self._say = say
        self._open: dict[str, _TensorBoard | _WandB] = {}
        self._failed: set[str] = set()
        if rank != 0:
            return
        check(names)
        plain = json.loads(json.dumps(config, default=str))
        for name in names:
            with self._or_without(name):
                package = importlib.import_module(EXTRAS[name])
                if name == "tensorboard":
                    self._open[name] = _TensorBoard(package, path, plain, max(written, 0))
                else:
                    self._open[name] = _WandB(package, path, plain, project, timeout_s, say)

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """``figures`` are those of ``step``."""
        for name in self._open.keys() - self._failed:
            with self._or_without(name):
                self._open[name].log(step, figures)

    def close(self, *, failed: bool = False) -> None:
        """Write what is left and end what was started, also of a logger that has failed; a second time,
        nothing."""
        while self._open:
            name, logger = self._open.popitem()
            with self._or_without(name):
                logger.close(failed)

    def __enter__(self) -> Loggers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    @contextmanager
    def _or_without(self, name: str) -> Iterator[None]:
        """If the block fails, the run continues without the logger, which is said once."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if name not in self._failed:
                self._failed.add(name)
                self._say(f"{name} failed, and the run continues without it: {_in_a_line(error)}")


class _TensorBoard:
    """Events in ``RUN/tensorboard``, flushed after each step, so that a kill loses none."""

    def __init__(self, package: ModuleType, path: Path, config: Mapping[str, Any], written: int) -> None:
        self._writer = package.SummaryWriter(log_dir=str(path / "tensorboard"), purge_step=written)
        if not written:
            indented = json.dumps(config, indent=1).replace("\n", "\n    ")
            self._writer.add_text("config", f"    {indented}")  # as code in Markdown

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
        self._hooks = sys.exit, sys.excepthook  # W&B puts its own there and leaves them
        # Its reports about itself would be waited for when the process ends, for as long as they like.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        kept = path / "wandb" / "id.json"  # another run may have the same path
        kept.parent.mkdir(parents=True, exist_ok=True)
        known = read_object(kept).get("id") or secrets.token_hex(4)
        replace_text(kept, to_json({"id": known}) + "\n")
        run = {"project": project, "dir": str(path), "id": known, "name": path.resolve().name}
        run |= {"resume": "allow", "config": config}
        modes = [os.environ.get("WANDB_MODE") or "online"]
        if modes == ["online"]:  # not where it would ask for a key, which shows before the service starts
            has_key = package.login(prompt=False, verify=False)
            modes = ["online", "offline"] if has_key else ["offline"]
        for mode in modes:
            try:
                self._run = self._init(mode, run)
                break
            except BaseException as error:
                self._end_service()
                if mode == modes[-1] or not isinstance(error, Exception):
                    raise
                say(f"wandb does not reach its server, and works offline: {_in_a_line(error)}")
        if not self._run.offline and self._run.url:
            say(f"wandb: {self._run.url}")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        # Figures of one step become one row, which is complete when a later step comes.
        self._run.log(dict(figures), step=step)

    def close(self, failed: bool) -> None:
        """W&B bounds its waits for its server, but not those for its own service."""
        errors: list[BaseException] = []

        def end() -> None:
            try:
                try:
                    self._run.finish(exit_code=int(failed))
                finally:
                    self._end_service()
            except BaseException as error:
                errors.append(error)

        ending = threading.Thread(target=end, name="wandb-close", daemon=True)
        ending.start()
        ending.join(self._timeout_s + SERVICE_S)
        if ending.is_alive():
            raise TimeoutError(f"its service has not ended within {self._timeout_s + SERVICE_S:g} s")
        if errors:
            raise errors[0]

    def _init(self, mode: str, run: Mapping[str, Any]) -> Any:
        settings = self._package.Settings(
            mode=mode,
            silent=True,
            console="off",  # our output is not theirs to copy
            init_timeout=self._timeout_s,
            finish_timeout=self._timeout_s,
            stop_fn=_stop_politely,
        )
        self._package.setup(settings=settings)
        return self._package.init(**run, settings=settings)

    def _end_service(self) -> None:
        try:
            with suppress(SystemExit):  # raised where the service has died
                self._package.teardown()
        finally:
            sys.exit, sys.excepthook = self._hooks


def _stop_politely() -> None:
    """The stop button of W&B: the run saves a checkpoint and ends, as at a time limit."""
    os.kill(os.getpid(), signal.SIGTERM)


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
