"""TensorBoard and W&B get the figures of rank 0, and whatever goes wrong there, the run goes on."""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from instep.record import loggers
from instep.record.jsonl import read_object
from instep.record.loggers import Loggers, check

Calls = list[tuple[Any, ...]]
CONFIG = {"seed": 3, "run_dir": Path("runs/a"), "optim": {"lr": 0.5, "betas": (0.9, 0.95)}}
PLAIN = {"seed": 3, "run_dir": "runs/a", "optim": {"lr": 0.5, "betas": [0.9, 0.95]}}
ENVIRONMENT = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ERROR_REPORTING", "NETRC")


@pytest.fixture(autouse=True)
def no_wandb_environment(monkeypatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


def module(monkeypatch, name: str, **members: Any) -> ModuleType:
    """A module of that name that has these members, for as long as the test goes on."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, loader=None)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def tensorboard(monkeypatch) -> Calls:
    """What reaches a SummaryWriter."""
    calls: Calls = []

    class SummaryWriter:
        def __init__(self, **told: Any) -> None:
            calls.append(("open", told))

        def add_text(self, *told: Any) -> None:
            calls.append(("text", *told))

        def add_scalar(self, name: str, figure: float, global_step: int) -> None:
            calls.append(("scalar", name, figure, global_step))

        def flush(self) -> None:
            calls.append(("flush",))

        def close(self) -> None:
            calls.append(("close",))

    module(monkeypatch, "tensorboard")
    module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    return calls


class FakeWandB:
    """Notes what reaches it; ``key`` says whether one is known, ``fails`` what to raise, and where."""

    def __init__(self) -> None:
        self.calls: Calls = []
        self.key = False
        self.fails: dict[str, BaseException] = {}
        self.before_finish: Callable[[], object] = lambda: None
        self.reports: set[str | None] = set()

    def note(self, what: str, *told: Any) -> None:
        self.calls.append((what, *told))
        mode = told[-1]["settings"]["mode"] if what in ("setup", "init") else ""
        for name in (what, f"{what} {mode}"):
            if name in self.fails:
                raise self.fails[name]

    def login(self, **told: Any) -> bool:
        self.reports.add(os.environ.get("WANDB_ERROR_REPORTING"))
        self.note("login", told)
        return self.key

    def setup(self, **told: Any) -> None:
        sys.excepthook = lambda *error: None
        self.note("setup", told)

    def init(self, **told: Any) -> Any:
        self.reports.add(os.environ.get("WANDB_ERROR_REPORTING"))
        self.note("init", told)
        offline = told["settings"]["mode"] == "offline"
        return SimpleNamespace(log=self.log, finish=self.finish, offline=offline, url="https://w.b/run")

    def log(self, figures: dict[str, float], step: int) -> None:
        self.note("log", figures, step)

    def finish(self, exit_code: int) -> None:
        self.before_finish()
        self.note("finish", exit_code)

    def teardown(self) -> None:
        self.note("teardown")

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def modes(self) -> list[str]:
        return [call[1]["settings"]["mode"] for call in self.calls if call[0] == "init"]


@pytest.fixture
def wandb(monkeypatch) -> FakeWandB:
    fake = FakeWandB()
    members = {name: getattr(fake, name) for name in ("login", "setup", "init", "teardown")}
    module(monkeypatch, "wandb", Settings=dict, **members)
    return fake


def test_tensorboard_gets_the_config_every_figure_with_its_step_and_an_end(tensorboard, tmp_path):
    with Loggers(["tensorboard"], tmp_path, {"seed": 3}, written=8) as logs:
        logs.step(1, {"loss": 2.5, "norm": 0.5})
        logs.step(1, {"held_out_loss": 3.0})
    assert tensorboard == [
        ("open", {"log_dir": str(tmp_path / "tensorboard"), "purge_step": 8}),
        ("scalar", "loss", 2.5, 1),
        ("scalar", "norm", 0.5, 1),
        ("flush",),
        ("scalar", "held_out_loss", 3.0, 1),
        ("flush",),
        ("close",),
    ]


def test_wandb_gets_one_row_per_step_and_the_end_and_gives_the_hooks_of_the_interpreter_back(
    wandb, tmp_path, capsys
):
    before, wandb.key = (sys.exit, sys.excepthook), True
    for name in ("a", "a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        logs = Loggers(["wandb"], tmp_path / name, CONFIG, project="mine")
        logs.step(1, {"loss": 2.5})
        assert sys.excepthook is not before[1]
        logs.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert (sys.exit, sys.excepthook) == before
    assert capsys.readouterr().err == "wandb: https://w.b/run\n" * 3
    made = [call[1] for call in wandb.calls if call[0] == "init"]
    first, again, other = [each["id"] for each in made]
    assert first == again == read_object(tmp_path / "a" / "wandb" / "id.json")["id"] != other
    told = {name: made[0][name] for name in ("project", "dir", "name", "resume", "config")}
    assert told == {
        "project": "mine", "dir": str(tmp_path / "a"), "name": "a", "resume": "allow", "config": PLAIN,
    }  # fmt: skip
    assert wandb.calls[3:6] == [("log", {"loss": 2.5}, 1), ("finish", 1), ("teardown",)]
    assert wandb.reports == {"false"}  # nothing of wandb itself
    came: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        made[0]["settings"]["stop_fn"]()  # its stop button
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert came == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("asked", "key", "mode", "asks"),
    [
        (None, True, "online", True),
        (None, False, "offline", True),
        ("online", False, "offline", True),
        ("shared", True, "shared", False),
        ("offline", True, "offline", False),
        ("disabled", False, "disabled", False),
    ],
)
def test_wandb_is_online_only_where_it_need_not_ask_for_a_key(
    wandb, tmp_path, monkeypatch, asked, key, mode, asks
):
    if asked is not None:
        monkeypatch.setenv("WANDB_MODE", asked)
    wandb.key = key
    Loggers(["wandb"], tmp_path, CONFIG, say=lambda text: None).close()
    assert wandb.modes() == [mode]
    assert ("login" in wandb.names()) == asks


def test_a_server_that_does_not_answer_makes_wandb_work_offline(wandb, tmp_path, capsys):
    wandb.key, wandb.fails = True, {"init online": OSError("no\nanswer")}
    with Loggers(["wandb"], tmp_path, CONFIG) as logs:
        logs.step(1, {"loss": 2.5})
    assert wandb.modes() == ["online", "offline"]
    assert wandb.names()[3:5] == ["teardown", "setup"]
    assert ("log", {"loss": 2.5}, 1) in wandb.calls
    said = capsys.readouterr().err
    assert said == "wandb does not reach its server, and works offline: OSError: no answer\n"


@pytest.mark.parametrize("where", ["login", "setup", "init", "init offline", "teardown"])
def test_a_logger_that_does_not_start_or_end_is_named_once_and_leaves_no_service(
    wandb, tmp_path, capsys, where
):
    wandb.fails = {where: RuntimeError("broken")}
    with Loggers(["wandb"], tmp_path, CONFIG) as logs:
        logs.step(1, {"loss": 2.5})
    logs.close()
    said = capsys.readouterr().err
    assert said == "wandb failed, and the run continues without it: RuntimeError: broken\n"
    assert ("log" in wandb.names()) == (where == "teardown")
    assert wandb.names()[-1] == ("login" if where == "login" else "teardown")


def test_a_logger_that_fails_in_a_step_is_named_once_and_left_alone_and_the_other_goes_on(
    wandb, tensorboard, tmp_path, capsys
):
    wandb.fails = dict.fromkeys(["log", "finish"], OSError("disk full"))
    wandb.fails["teardown"] = SystemExit(1)
    with Loggers(["wandb", "tensorboard"], tmp_path, CONFIG) as logs:
        for step in (1, 2, 3):
            logs.step(step, {"loss": 2.5})
    said = capsys.readouterr().err
    assert said == "wandb failed, and the run continues without it: OSError: disk full\n"
    assert wandb.names() == ["login", "setup", "init", "log", "finish", "teardown"]
    assert [call[3] for call in tensorboard if call[0] == "scalar"] == [1, 2, 3]
    assert tensorboard[-1] == ("close",)


def test_a_service_that_does_not_end_is_left_behind_at_the_deadline(wandb, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loggers, "SERVICE_S", 0.05)
    released = threading.Event()
    wandb.before_finish = released.wait
    logs = Loggers(["wandb"], tmp_path, CONFIG, timeout_s=0.05)
    try:
        logs.close()
        said = capsys.readouterr().err
        assert said.endswith("TimeoutError: its service has not ended within 0.1 s\n")
        assert "finish" not in wandb.names()
    finally:
        released.set()
        for thread in threading.enumerate():
            if thread.name == "wandb-close":
                thread.join()


def test_other_ranks_import_and_write_nothing(wandb, tensorboard, tmp_path):
    with Loggers(["wandb", "tensorboard", "no such logger"], tmp_path, CONFIG, rank=1) as logs:
        logs.step(1, {"loss": 2.5})
        logs.step(1, {"held_out_loss": 3.0})
    assert wandb.calls == tensorboard == list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", loggers.EXTRAS)
def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch, tmp_path, name):
    monkeypatch.setattr(loggers, "find_spec", lambda package: None)
    message = rf"^{name} is not installed: pip install 'instep\[{name}\]', or turn record.{name} off$"
    with pytest.raises(ValueError, match=message):
        check([name])
    with pytest.raises(ValueError, match=message):
        Loggers([name], tmp_path, CONFIG)
    with pytest.raises(ValueError, match="'mlflow' does not exist: expected one of tensorboard, wandb"):
        check(["mlflow"])


def test_a_package_that_is_there_and_cannot_be_imported_is_left_alone(
    monkeypatch, tensorboard, tmp_path, capsys
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    Loggers(["tensorboard"], tmp_path, CONFIG).close()
    assert capsys.readouterr().err.startswith("tensorboard failed, and the run continues without it")


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_the_real_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    for written, steps, shift in ((-1, range(6), 0.0), (3, range(3, 5), 100.0)):
        with Loggers(["tensorboard"], tmp_path, CONFIG, written=written) as logs:
            for step in steps:
                logs.step(step, {"loss": step + shift})
    name = "tensorboard.backend.event_processing.event_accumulator"
    events = importlib.import_module(name).EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 103.0), (4, 104.0)]


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_the_real_wandb_works_offline_and_leaves_no_process(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # where a key might be
    for step in (1, 2):
        with Loggers(["wandb"], tmp_path / "run", CONFIG) as logs:
            logs.step(step, {"loss": 0.5})
    said = capsys.readouterr()
    assert said.out == said.err == ""
    identity = read_object(tmp_path / "run" / "wandb" / "id.json")["id"]
    parts = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(parts) == 2
    assert all(b"loss" in part.read_bytes() for part in parts)
