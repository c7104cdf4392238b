"""``instep.save`` and ``instep.load`` in loops of one's own: the run goes on as if it had not stopped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from instep.checkpoint.shorthand import Resumed, load, save
from instep.errors import CheckpointRejected
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.checkpoint.nets import OPTIMIZERS, Net, made, train, whole_hash
from tests.checkpoint.states import all_bits, bits


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path: Path, name: str) -> None:
    model, optimizer = made(0, OPTIMIZERS[name])
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] / 2  # as a scheduler would
    save(tmp_path, step=3, model=model, optimizer=optimizer)
    train(model, optimizer, range(3, 6))
    other, fresh = made(1, OPTIMIZERS[name])
    resumed = load(tmp_path, model=other, optimizer=fresh)
    assert resumed == Resumed(3, tmp_path / "step-00000003")
    train(other, fresh, range(resumed.step, 6))
    assert whole_hash(other, fresh) == whole_hash(model, optimizer)
    assert all_bits(other.state_dict()) == all_bits(model.state_dict())


def test_without_a_checkpoint_nothing_is_touched(tmp_path: Path) -> None:
    model, optimizer = made(0)
    before = whole_hash(model, optimizer)
    assert load(tmp_path / "absent", model=model, optimizer=optimizer) == Resumed()
    assert whole_hash(model, optimizer) == before


def test_state_follows_the_name_when_parameters_change_their_order(tmp_path: Path) -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(2))
    save(tmp_path, step=2, model=model, optimizer=optimizer)
    other, _ = made(1)
    reordered = AdamW(reversed(list(other.parameters())))
    load(tmp_path, model=other, optimizer=reordered)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            assert bits(reordered.state[other.get_parameter(name)][key]) == bits(value)


def test_groups_keep_their_own_options(tmp_path: Path) -> None:
    def groups(model: Net, lr: float) -> Optimizer:
        norm = list(model.norm.parameters())
        rest = [p for p in model.parameters() if all(p is not q for q in norm)]
        return AdamW([{"params": rest, "lr": lr}, {"params": norm, "weight_decay": 0.0}])

    model, other = Net(), Net()
    save(tmp_path, step=1, model=model, optimizer=groups(model, 0.25))
    optimizer = groups(other, 0.5)
    load(tmp_path, model=other, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.001]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_state_of_another_dtype_than_its_parameter_keeps_its_bits(tmp_path: Path) -> None:
    model = nn.Linear(3, 3, dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters())
    expected = {}
    for name, parameter in model.named_parameters():
        wide = {key: torch.randn(parameter.shape) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **wide}
        expected[name] = all_bits(optimizer.state[parameter])
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"].zero_()
    for target in (optimizer, AdamW(model.parameters())):  # moments are there, or have to be made
        load(tmp_path, model=model, optimizer=target)
        found = {name: all_bits(target.state[p]) for name, p in model.named_parameters()}
        assert found == expected
        assert target.state[model.weight]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: (m, SGD(m.parameters())), "the optimizer of the checkpoint, AdamW, got SGD"),
        (
            lambda m: (m, AdamW([{"params": [p]} for p in m.parameters()])),
            "expected 1 parameter groups, got 6",
        ),
        (lambda m: (m, AdamW(m.norm.parameters())), "expected 6 parameters, got 2: only the checkpoint has"),
        (
            lambda m: (nn.Linear(4, 4), None),
            r"expected 2 tensors, got 9: missing weight, bias; unknown first\.bias",
        ),
    ],
)
def test_another_model_or_optimizer_is_rejected_and_nothing_changed(
    tmp_path: Path, change: Callable[[Net], tuple[nn.Module, Any]], message: str
) -> None:
    model, optimizer = made(0)
    train(model, optimizer, range(1))
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    other, fresh = change(made(1)[0])
    before = all_bits(other.state_dict())
    with pytest.raises(CheckpointRejected, match=message):
        load(tmp_path, model=other, optimizer=fresh)
    assert all_bits(other.state_dict()) == before
    assert fresh is None or not fresh.state


def test_models_alone_from_nowhere_are_left_with_a_warning(tmp_path: Path) -> None:
    model, _ = made(0)
    with pytest.warns(UserWarning, match="no checkpoint in .*: the models keep the values that they have"):
        assert load(tmp_path, model=model).step == 0


def test_what_a_wrapper_trains_is_given_as_the_wrapper(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    model = DataParallel(net)
    optimizer = SGD(net.parameters(), lr=0.1)
    save(tmp_path, step=1, net=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="'net' is not the wrapper that trains it"):
        load(tmp_path, net=net, optimizer=optimizer)
    model.close()
    assert load(tmp_path, net=net, optimizer=optimizer).step == 1


def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    model, optimizer = made(0)
    optimizer.param_groups[0]["schedule"] = print
    for objects, words in (
        ({"model": model, "optimizer": optimizer}, r"state\.groups: .*print"),
        ({"scheduler": object()}, r"no model to save or load in .*: pass objects by name, model=model"),
    ):
        with pytest.raises(ValueError, match=words):
            save(tmp_path, step=1, **objects)
    assert os.listdir(tmp_path) == []


def test_all_objects_come_back_and_none_may_be_forgotten_but_models_alone_may_be_used(tmp_path: Path) -> None:
    model, optimizer = made(0)
    plan = StepLR(optimizer, step_size=2)
    train(model, optimizer, range(3))
    plan.step()
    save(tmp_path, step=3, model=model, optimizer=optimizer, plan=plan)
    other, fresh = made(1)
    again = StepLR(fresh, step_size=2)
    for objects in ({"optimizer": fresh}, {"optimizer": fresh, "schedule": again}, {"plan": again}):
        with pytest.raises(CheckpointRejected, match=r"has different objects|has an optimizer"):
            load(tmp_path, model=other, **objects)
    assert load(tmp_path, net=other).step == 3
    assert all_bits(other.state_dict()) == all_bits(model.state_dict()) and not fresh.state
    load(tmp_path, model=other, optimizer=fresh, plan=again)
    assert again.state_dict() == plan.state_dict()


def test_a_changed_numerical_configuration_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = made(0)
    save(tmp_path, step=1, model=model)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert load(tmp_path, model=model).differences == ("deterministic: false in the checkpoint, true now",)


def test_rejected_newer_checkpoints_are_reported(tmp_path: Path) -> None:
    model, _ = made(0)
    save(tmp_path, step=1, model=model)
    (save(tmp_path, step=2, model=model) / "manifest.json").unlink()
    with pytest.warns(UserWarning, match=r"instep.load went back to step 1 in \S+: ") as warned:
        resumed = load(tmp_path, model=model)
    assert resumed.step == 1
    assert "step-00000002/manifest.json: cannot be read" in resumed.rejected[0]
    assert resumed.rejected[0] in str(warned[0].message)
    assert warned[0].filename == __file__


def wrap(kind: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    if kind == "replicated":
        return DataParallel(module), torch.optim.SGD(module.parameters(), lr=0.1)
    model = fully_shard(module, stage=int(kind))
    return model, ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("kind", ["replicated", "2", "3"])
def test_a_checkpoint_that_is_named_by_its_epoch_goes_on_with_other_random_numbers(
    tmp_path: Path, kind: str
) -> None:
    """The keys of dropout count declared steps, whatever number the user's ``step`` is."""

    def trained(epochs: range, directory: Path | None) -> Tensor:
        model, optimizer = wrap(kind)
        if directory is not None:
            load(directory, model=model, optimizer=optimizer)
        for epoch in epochs:
            for _ in range(3):
                for _ in model.micro_batches(2):
                    model(torch.ones(2, 4)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if directory is not None:
                save(directory, step=epoch + 1, model=model, optimizer=optimizer)
        weights = full_state_dict(model)["0.weight"]
        model.close()
        return weights

    trained(range(1), tmp_path)
    assert torch.equal(trained(range(1, 2), tmp_path), trained(range(2), None))


def test_a_checkpoint_without_a_count_of_declared_steps_has_that_of_its_step(tmp_path: Path) -> None:
    """As a plain module saves it."""
    model, optimizer = wrap("replicated")
    save(tmp_path, step=7, model=model.module, optimizer=optimizer)
    load(tmp_path, model=model, optimizer=optimizer)
    assert model.next_step == 7
    model.close()
