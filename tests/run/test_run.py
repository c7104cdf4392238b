"""A loop of one's own as a run, on one rank: its steps, its files, how it goes on, and what is refused."""

from __future__ import annotations

import math
import random
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import instep
from instep.errors import CheckpointRejected, ContractBroken
from instep.record.compare import compare
from instep.record.directory import CHECKPOINTS, CONFIG
from instep.record.report_data import report_data
from instep.record.step_lines import read_run
from instep.run.settings import ScriptCommand
from tests.run.loops import Loop, recorded, summary

Begin = Callable[..., Loop]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Makes a loop, of a run in a folder of the test's: "run" if it names none."""
    runs: list[instep.Run] = []

    def make(
        name: str = "run", *, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **words: Any
    ) -> Loop:
        for run in runs:
            run.close()
        runs.append(instep.Run(tmp_path / name, **words))
        return Loop(runs[-1], kind)

    yield make
    for run in runs:
        run.close()


def test_a_step_is_an_int_that_counts(begin: Begin) -> None:
    seen = []
    loop = begin()
    loop.train(after=lambda step: seen.append((step + 0, step.number, type(step.number), step.is_last)))
    assert seen == [(0, 0, int, False), (1, 1, int, False), (2, 2, int, True)]
    assert list(loop.run._steps or "none") == []


def test_what_is_logged_is_in_the_line_of_its_step(begin: Begin, tmp_path: Path) -> None:
    def log(step: instep.Step) -> None:
        step.log(temperature=step * 2, entropy=torch.tensor([[0.5]], requires_grad=True))
        step.log(temperature=np.float32(step + 0.25), worst=math.inf, none=math.nan)

    loop = begin()
    losses: list[float] = []
    loop.train(2, before=log, loss=lambda y: losses.append(y.square().mean().item()) or y.square().mean())
    lines = recorded(tmp_path / "run")
    assert [line["temperature"] for line in lines] == [0.25, 1.25]
    assert [line["entropy"] for line in lines] == [0.5, 0.5]
    assert lines[0]["worst"] == math.inf and math.isnan(lines[0]["none"])
    means = [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2]
    assert [line["loss"] for line in lines] == pytest.approx(means)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"figure": "high"}, "figure: expected a number, got str"),
        ({"figure": torch.zeros(2)}, "figure: expected a number, got Tensor"),
        ({"figure": True}, "figure: expected a number, got bool"),
        *(({name: 1.0}, f"{name}: ") for name in ("step", "norm", "rate", "step_ms")),  # the run's own
    ],
)
def test_what_is_no_number_or_has_a_name_of_the_run_s_own_is_not_logged(
    figures: dict[str, Any], words: str, begin: Begin
) -> None:
    with pytest.raises(ValueError, match=f"step.log: {words}"):
        begin().train(1, before=lambda step: step.log(**figures))


def test_the_throughput_counts_what_the_script_says_and_the_loss_has_its_unit(
    begin: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(record={"items": "tokens", "items_per_step": 2048, "loss_unit": "nats per byte"}).train(
        3, after=lambda step: step.log(dreams_per_s=1e9)
    )
    found, lines = summary(tmp_path / "run"), recorded(tmp_path / "run")
    assert found["tokens_per_s"] == pytest.approx(2048 / found["step_ms_median"] * 1e3)
    assert all("tokens_per_s" in line and "steps_per_s" not in line for line in lines)
    assert "dreams_per_s" not in found
    (row,) = found["memory"]["ranks"]
    assert row["rank"] == 0 and row["resident_peak"] > 1 << 20
    said = capsys.readouterr()
    assert " tokens/s" in said.err and "memory at most " in said.out
    assert f"loss   {lines[-1]['loss']:.3f} nats per byte in the last step\n" in said.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"items": "tokens"}, "record.items 'tokens' with record.items_per_step 0: expected a word, and how"),
        ({"items_per_step": 8}, "record.items '' with record.items_per_step 8: expected a word"),
        ({"items": "to kens", "items_per_step": 8}, "record.items 'to kens' with"),
        (
            {"items": "tokens", "items_per_step": 0.5},
            "instep.Run: record: items_per_step: expected int, got float 0.5",
        ),
    ],
)
def test_items_and_how_many_they_are_go_together(words: dict[str, Any], said: str, begin: Begin) -> None:
    with pytest.raises(ValueError, match=said):
        begin(record=words)


def test_logging_beside_the_block_is_refused(begin: Begin) -> None:
    loop = begin()
    for step in loop.run.steps(2, model=loop.model, optimizer=loop.optimizer):
        with pytest.raises(RuntimeError, match="inside of `with step:`"):
            step.log(loss=1.0)
        with step:
            pass
        with pytest.raises(RuntimeError, match="inside of `with step:`"):
            step.log(loss=1.0)


def test_a_step_that_is_not_entered_is_refused(begin: Begin) -> None:
    loop = begin()
    steps = loop.run.steps(2, model=loop.model, optimizer=loop.optimizer)
    with pytest.raises(RuntimeError, match="step 0 was not entered: write `with step:`"):
        list(steps)


def test_a_step_that_is_entered_twice_is_refused(begin: Begin) -> None:
    loop = begin()
    step = next(loop.run.steps(2, model=loop.model, optimizer=loop.optimizer))
    with step:
        pass
    with pytest.raises(RuntimeError, match="step 1 was entered before: each is entered once"), step:
        pass


def test_names_are_taken_once_and_before_the_steps(begin: Begin) -> None:
    loop = begin()
    loop.run.register(model=loop.model)
    loop.run.register(model=loop.model, optimizer=loop.optimizer)
    with pytest.raises(ValueError, match="'model' is registered already: take another name"):
        loop.run.register(model=nn.Linear(1, 1))
    loop.train(1)
    with pytest.raises(RuntimeError, match="the steps have begun: register before"):
        loop.run.register(other=nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="a run has one loop, and this one has had it"):
        loop.run.steps(2)


def test_nothing_registered_and_no_step_are_refused(begin: Begin) -> None:
    with pytest.raises(ValueError, match="no model is registered"):
        begin().run.steps(2)
    loop = begin("other")
    with pytest.raises(ValueError, match=r"run.steps\(0\): expected 1 or more"):
        loop.run.steps(0, model=loop.model)


def test_an_optimizer_of_a_registered_model_is_registered_too(begin: Begin) -> None:
    loop = begin()
    other = torch.optim.SGD(loop.model.parameters(), lr=1e-3)
    with pytest.raises(
        ValueError, match=r"SGD steps '0.weight' of a registered model, and is not registered"
    ):
        loop.train(before=lambda step: other.step())


def test_an_optimizer_of_another_model_is_refused_when_it_steps_again(begin: Begin) -> None:
    loop, other = begin(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-3)
    with pytest.raises(
        ValueError, match=r"SGD steps 2 parameters, the first of shape \[2, 2\], and neither it"
    ):
        loop.train(before=lambda step: optimizer.step())


def test_an_optimizer_that_a_step_makes_for_itself_is_its_own(begin: Begin) -> None:
    """That of a search within a step, say: it is made again with the step."""

    def search(step: instep.Step) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.square().sum().backward()
        torch.optim.SGD([weight], lr=0.1).step()

    assert begin().train(before=search) == [0, 1, 2]


# Going on.


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """A data set that knows the hash of its samples."""

    def __init__(self, sha256: str) -> None:
        self.sha256 = sha256

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((4,), float(number))


def test_a_run_does_not_go_on_with_other_samples_unnoticed(begin: Begin) -> None:
    def train(loop: Loop, sha256: str, stop: int = -1, **more: Any) -> list[int]:
        data = instep.Loader(Rows(sha256), batch_size=4, micro_batch_size=2)
        return loop.train(3, after=stopping(loop, stop), data=data, **more)

    with pytest.raises(SystemExit):
        train(begin(), "abc", stop=0)
    with pytest.raises(ContractBroken, match=r'data\.sha256: "abc" in the checkpoint, "abd" now'):
        train(begin(resume=True), "abd")
    assert train(begin(resume=True), "abc") == [1, 2]


def stopping(loop: Loop, at: int) -> Callable[[instep.Step], None]:
    return lambda step: loop.run.stop() if step == at else None


def test_a_stopped_run_goes_on_to_the_same_bits(begin: Begin, tmp_path: Path) -> None:
    def train(loop: Loop, stop: int = -1) -> list[int]:
        plan = OneCycleLR(loop.optimizer, max_lr=0.2, total_steps=6)  # moves momentum, too: a pair of betas

        def after(step: instep.Step) -> None:
            plan.step()
            stopping(loop, stop)(step)

        return loop.train(6, after=after, plan=plan)

    assert train(begin("whole")) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(SystemExit) as end:
        train(begin("parts"), stop=2)
    assert end.value.code == 75
    assert [path.name for path in (tmp_path / "parts" / CHECKPOINTS).iterdir()] == ["step-00000003"]
    assert train(begin("parts", resume=True)) == [3, 4, 5]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert summary(parts)["state_sha256"] == summary(whole)["state_sha256"]
    assert [line["loss"] for line in recorded(parts)] == [line["loss"] for line in recorded(whole)]
    assert [line["rate"] for line in recorded(parts)] == [line["rate"] for line in recorded(whole)]


def test_a_run_that_is_finished_early_has_its_checkpoint_its_summary_and_no_more_steps(
    begin: Begin, tmp_path: Path
) -> None:
    loop = begin("early")
    made = loop.train(9, after=lambda step: loop.run.finish() if step == 2 else None)
    assert made == [0, 1, 2]
    assert [path.name for path in (tmp_path / "early" / CHECKPOINTS).iterdir()] == ["step-00000003"]
    begin("whole").train(3)
    assert summary(tmp_path / "early")["steps"] == 3
    told = report_data(tmp_path / "early")[0]["run"]
    assert told["state"] == "finished"
    assert "run.finish() ended the run after 3 of 9 steps" in told["notes"]
    assert summary(tmp_path / "early")["state_sha256"] == summary(tmp_path / "whole")["state_sha256"]
    assert begin("early", resume=True).train(9) == [3, 4, 5, 6, 7, 8]  # to train on, resume it


def test_what_a_script_logs_is_on_the_terminal_in_the_summary_in_the_report_and_in_compare(
    begin: Begin, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, by in (("a", 0.25), ("b", 0.5)):
        begin(name).train(4, after=lambda step, by=by: step.log(acc=by * step) if step in (1, 3) else None)
    shown = capfd.readouterr()
    assert [" acc " in line for line in shown.err.splitlines() if line.startswith("step ")] == 2 * [
        *[False],
        *[True] * 3,  # the newest, until there is another
    ]
    assert "logged acc 0.75 at the end, 0.25 to 0.75" in shown.out
    assert summary(tmp_path / "a")["logged"] == {"acc": {"last": 0.75, "min": 0.25, "max": 0.75}}
    figures = report_data(tmp_path / "b")[0]["curves"]["figures"]
    assert figures["acc"] == [[1, 0.5], [3, 1.5]]
    assert (
        [step for step, _ in figures["Gradient norm"]]
        == [0, 1, 2, 3]
        == [step for step, _ in figures["Learning rate"]]
    )
    found = compare(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert found.same and found.logged == ["acc: 0.75 in A, 1.5 in B"]


def test_a_span_of_the_scripts_own_code_is_in_the_report_by_its_name(begin: Begin, tmp_path: Path) -> None:
    def before(step: instep.Step) -> None:
        with step.span("augment"):
            torch.ones(400, 400) @ torch.ones(400, 400)
        with pytest.raises(ValueError, match="'forward' is a span of instep's own: take another name"):
            step.span("forward")

    loop, steps = begin(), []
    loop.train(6, before=before, after=steps.append)
    (rank,) = report_data(tmp_path / "run")[0]["breakdown"]["ranks"]
    assert rank["hosts"]["augment"] > 0
    with pytest.raises(RuntimeError, match="expected to be called inside of `with step:`"):
        steps[0].span("augment")


FIGURES = [0.5, 0.4, 0.3, 0.6, math.nan, 0.35, 0.9, 0.8]


@pytest.mark.parametrize(("best", "step"), [("val_loss", 3), ("max:val_loss", 7)])
def test_the_best_checkpoint_is_kept_beside_the_newest(
    best: str, step: int, begin: Begin, tmp_path: Path
) -> None:
    weights = {}

    def after(now: instep.Step) -> None:
        now.log(val_loss=FIGURES[now])

    def before(now: instep.Step) -> None:
        weights[int(now)] = [p.clone() for p in loop.model.parameters()]

    def stops(now: instep.Step) -> None:
        after(now)
        stopping(loop, 3)(now)

    loop = begin(checkpoint={"every": 1, "keep": 2, "best": best})
    with pytest.raises(SystemExit):
        loop.train(8, before=before, after=stops)
    loop = begin(checkpoint={"every": 1, "keep": 2, "best": best}, resume=True)  # the best so far is carried
    assert loop.train(8, before=before, after=after) == [4, 5, 6, 7]
    kept = sorted(path.name for path in (tmp_path / "run" / CHECKPOINTS).iterdir())
    assert kept == [f"step-{number:08d}" for number in sorted({step, 7, 8})]
    other = Loop(instep.Run(tmp_path / "other"))
    assert instep.load(tmp_path / "run" / CHECKPOINTS, which="best", model=other.model).step == step
    assert all(map(torch.equal, other.model.parameters(), weights[step]))


def test_which_is_the_best_has_to_be_said(begin: Begin, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="'val_acc': expected to be told which is better: max:val_acc or min"
    ):
        begin(checkpoint={"best": "val_acc"})
    loop = begin()
    loop.train(1)
    with pytest.raises(CheckpointRejected, match="a run has kept as its best, got none"):
        instep.load(tmp_path / "run" / CHECKPOINTS, which="best", model=loop.model)
    with pytest.raises(ValueError, match="which='last': expected 'newest' or 'best'"):
        instep.load(tmp_path / "run" / CHECKPOINTS, which="last", model=loop.model)  # type: ignore[arg-type]


def test_another_seed_is_another_run_and_more_steps_are_not(begin: Begin) -> None:
    loop = begin()
    with pytest.raises(SystemExit):
        loop.train(3, after=stopping(loop, 0))
    with pytest.raises(ContractBroken, match="seed: 0 in the checkpoint, 1 now"):
        begin(resume=True, seed=1, accept_contract=True).train(3)
    assert begin(resume=True).train(4) == [1, 2, 3]


def test_other_arguments_are_another_run(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=tmp_path / "none.py"))
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.1"])
    loop = begin()
    with pytest.raises(SystemExit):
        loop.train(3, after=stopping(loop, 0))
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.2"])
    with pytest.raises(
        ContractBroken, match=r'script.arguments: "--lr 0.1" in the checkpoint, "--lr 0.2" now'
    ):
        begin(resume=True).train(3)


@dataclass(frozen=True)
class Layers:
    width: int = 3


@dataclass(frozen=True)
class Settings:
    layers: Layers = Layers()
    steps: int = 1  # of something else than the run
    lr: float = 0.1


def test_settings_of_a_script_are_written_and_are_its_contract(begin: Begin, tmp_path: Path) -> None:
    loop = begin(config=Settings())
    with pytest.raises(SystemExit):
        loop.train(3, after=stopping(loop, 0))
    written = tomllib.loads((tmp_path / "run" / CONFIG).read_text())
    assert {name: written[name] for name in ("layers", "steps", "lr")} == asdict(Settings())
    report, _, _ = report_data(tmp_path / "run")
    assert (report["run"]["state"], report["contract"]["steps"]) == ("ended early", 3)
    with pytest.raises(ContractBroken, match=r"config\.steps: 1 in the checkpoint, 2 now"):
        begin(resume=True, config=Settings(steps=2)).train(3)
    with pytest.raises(ContractBroken, match=r"layers\.width: 3 in the checkpoint, 4 now"):
        begin(resume=True, config=Settings(Layers(4))).train(3)


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ({"lr": 0.1}, TypeError, "expected an instance of a dataclass, got dict"),
        (Settings, TypeError, "expected an instance of a dataclass, got Settings"),
        (ScriptCommand(), ValueError, "a field is called 'arguments', by which config.toml"),
    ],
)
def test_settings_that_cannot_be_written_are_refused(
    config: Any, error: type[Exception], said: str, begin: Begin
) -> None:
    with pytest.raises(error, match=said):
        begin(config=config)


def test_a_finished_run_is_shown_again(
    begin: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin().train(2)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    first = capsys.readouterr().out
    assert begin(resume=True).train(2) == []
    assert summary(tmp_path / "run")["state_sha256"] in capsys.readouterr().out
    assert summary(tmp_path / "run")["state_sha256"] in first
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("links", [False, True])
def test_a_record_without_its_checkpoints_is_not_replaced(begin: Begin, tmp_path: Path, links: bool) -> None:
    """A run whose checkpoints were moved to another disk began again, without a word, over its own record."""
    begin(checkpoint={"every": 1}).train(3)
    path = tmp_path / "run" / CHECKPOINTS
    path.rename(tmp_path / "cold")
    path.mkdir()
    for saved in (tmp_path / "cold").iterdir() if links else ():
        (path / saved.name).symlink_to(saved)
    before = recorded(tmp_path / "run")
    with pytest.raises(CheckpointRejected, match=r"no checkpoint of the 3 recorded steps: put"):
        begin(checkpoint={"every": 1}, resume=True).train(4)
    assert recorded(tmp_path / "run") == before


def test_a_run_that_had_no_checkpoint_yet_begins_again_and_says_so(
    begin: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError):
        begin().train(3, after=lambda step: 1 // (2 - step))
    begin(resume=True).train(3)
    assert "no checkpoint of the 2 recorded steps: beginning again with step 0\n" in capsys.readouterr().err
    assert [line["step"] for line in recorded(tmp_path / "run")] == [0, 1, 2]


def test_stop_before_the_steps_says_that_there_are_none(begin: Begin) -> None:
    for end in (begin().run.stop, begin().run.finish):
        with pytest.raises(RuntimeError, match="the steps have not begun"):
            end()


# Health.


def poisoned(loop: Loop, *steps: int) -> Callable[[instep.Step], None]:
    """Makes a gradient nan in these steps."""

    def poison(step: instep.Step) -> None:
        if step in steps:
            loop.model.module[2].weight.grad[0, 0] = torch.nan

    return poison


def test_a_skipped_step_has_one_number_everywhere(
    begin: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal said "step 4 was skipped" of what the loop and ``skip_steps`` call 3."""
    begin(checks={"skip_steps": (3,)}).train(5)
    assert "step 3 was skipped: step 3 is in skip_steps\n" in capsys.readouterr().err
    (line,) = (line for line in recorded(tmp_path / "run") if "skipped" in line)
    assert line["step"] == 3


def careful(loop: Loop) -> None:
    """Optimizer steps that raise are survived, as some scripts have it."""
    step = loop.optimizer.step

    def survive() -> None:
        with suppress(Exception):
            step()

    loop.optimizer.step = survive  # type: ignore[method-assign]


def test_what_a_script_catches_around_its_optimizer_hides_no_skipped_step(
    begin: Begin, tmp_path: Path
) -> None:
    """The step was said to be skipped by an exception, which went down with others: it was logged as made."""
    loop = begin(checks={"max_skipped": 1})
    careful(loop)
    with pytest.raises(instep.errors.Diverged):
        loop.train(5, before=poisoned(loop, 1, 2, 3))
    assert [bool(line.get("skipped")) for line in recorded(tmp_path / "run")] == [False, True]


def test_the_schedule_and_what_else_follows_the_update_go_on_in_a_skipped_step(
    begin: Begin, tmp_path: Path
) -> None:
    """A skipped step left the block, and so jumped over ``schedule.step()``."""
    rates = {}
    for name, steps in (("skipped", (1,)), ("made", ())):
        loop = begin(name, checks={"skip_steps": steps})
        schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.5)
        loop.train(3, after=lambda step, it=schedule: it.step(), schedule=schedule)
        rates[name] = [line["rate"] for line in recorded(tmp_path / name)]
        assert all("loss" in line for line in recorded(tmp_path / name))
    assert rates["skipped"] == rates["made"] == pytest.approx([0.05, 0.025, 0.0125])


class Decays(torch.optim.SGD):
    """Shrinks weights, with a gradient or without."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(0.99)


def test_an_optimizer_that_needs_no_gradient_to_change_weights_is_refused_in_a_skipped_step(
    begin: Begin,
) -> None:
    with pytest.raises(RuntimeError, match=r"step 1 is skipped .* Decays.step\(\) changed parameters"):
        Loop(begin(checks={"skip_steps": (1,)}).run, Decays).train(3)


def test_a_gradient_that_is_spoiled_after_it_was_clipped_is_seen(begin: Begin, tmp_path: Path) -> None:
    loop = begin()
    weight = next(loop.model.parameters())

    def clip_and_go_on(step: instep.Step) -> None:
        instep.clip_grad_norm_(loop.model.parameters(), 0.01)
        if step == 1:
            weight.grad.add_(math.nan)

    loop.train(3, before=clip_and_go_on)
    assert [math.isnan(line["norm"]) for line in recorded(tmp_path / "run")] == [False, True, False]
    assert recorded(tmp_path / "run")[0]["norm"] > 0.01  # of before clipping
    assert torch.isfinite(weight).all()


def test_spikes_of_several_optimizers_are_refused(begin: Begin) -> None:
    loop, other = begin(checks={"spike": 5.0}), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="spike"):
        loop.train(other=other, another=torch.optim.SGD(other.parameters(), lr=0.1))


# What steps draw.


def test_what_a_step_draws_is_keyed_by_seed_and_step(begin: Begin) -> None:
    def drawn(name: str, **words: Any) -> list[tuple[float, float, float]]:
        found = []
        loop = begin(name, **words)
        torch.manual_seed(len(name))
        random.seed(len(name))
        loop.train(
            2, after=lambda step: found.append((torch.rand(1).item(), random.random(), np.random.rand()))
        )
        return found

    first, again, other = drawn("a"), drawn("aa"), drawn("aaa", seed=1)
    assert first == again
    assert not set(np.ravel(first)) & set(np.ravel(other))
    assert len(set(np.ravel(first))) == 6


# Two models.


# What is given back.


def test_an_error_where_a_step_begins_or_ends_gives_everything_back(begin: Begin) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before, loop = dict(hooks), begin("begins", record={"leaves": True})
    schedule = CosineAnnealingLR(loop.optimizer, 10)

    def moving() -> None:
        for step in loop.run.steps(2, model=loop.model, optimizer=loop.optimizer):
            with step:
                assert step == 0
                loop.optimizer.step()
            schedule.step()

    def accumulating() -> None:
        for step in loop.run.steps(1, model=loop.model, optimizer=loop.optimizer):
            with step:
                loop.model(torch.ones(1, 4)).sum().backward()

    with pytest.raises(ValueError, match="is not registered"):
        moving()
    assert (dict(hooks), loop.model._reducer.observer) == (before, None)
    loop = begin("ends")
    with pytest.raises(ValueError, match="no optimizer has stepped"):
        accumulating()
    assert dict(hooks) == before


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        (0, r"interrupted before its first checkpoint: instep\.Run\('{0}', resume=True\) starts over\n"),
        (4, r"interrupted with a checkpoint of step \d: resume with instep\.Run\('{0}', resume=True\)\n"),
    ],
)
def test_ctrl_c_ends_a_script_with_a_line_that_says_how_to_resume(
    stop: int, says: str, begin: Begin, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *error: print("traceback", file=sys.stderr))

    def interrupt(step: instep.Step) -> None:
        if step == stop:
            raise KeyboardInterrupt

    loop = begin(checkpoint={"every": 1})
    with pytest.raises(KeyboardInterrupt) as raised:
        loop.train(5, before=interrupt)
    capsys.readouterr()
    sys.excepthook(KeyboardInterrupt, raised.value, None)  # as Python does at the end
    assert re.fullmatch(says.format(loop.run._steps.path), capsys.readouterr().err)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "traceback\n"
