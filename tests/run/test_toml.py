"""What TOML gives back of settings, and in which words what means nothing is refused."""

import enum
import random
import re
import tomllib
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from instep.recipes import text_config
from instep.recipes.text_config import Config, merge
from instep.replicate.strategies import STRATEGIES, WRAPPERS
from instep.run.toml import load_toml, scalars, to_toml


def changed(**topics: object) -> Config:
    """The default recipe with settings changed: ``changed(steps=3, batch={"micro_size": 2})``."""
    return merge(text_config.default(), topics, source="test")


def random_config(draw: random.Random) -> Config:
    """A config, valid or not, with every kind of value that TOML has to carry."""
    return changed(
        steps=draw.randrange(10**12),
        timeout_s=draw.uniform(1e-9, 1e9),
        resume=draw.choice([True, False]),
        run_dir="".join(draw.choices("a/\\\"'\t\x7fé🙂 #=", k=9)),
        optim={"lr": 10.0 ** draw.randrange(-9, 17), "betas": [draw.random(), draw.random()]},
        parallel={"strategy": draw.choice([*STRATEGIES, *WRAPPERS])},
    )


@pytest.mark.parametrize("seed", range(20))
def test_toml_gives_back_what_was_written(seed):
    config = random_config(random.Random(seed))
    assert merge(text_config.tiny(), tomllib.loads(to_toml(config)), source="test") == config


@dataclass(frozen=True)
class Decay:
    """Settings two tables deep."""

    every: int = 3


@dataclass(frozen=True)
class Optim:
    """A topic that has another one in its midst."""

    lr: float = 0.5
    decay: Decay = field(default_factory=Decay)
    name: str = "sgd"


@dataclass(frozen=True)
class Own:
    """A script's settings, with a topic in their midst."""

    steps: int = 7
    optim: Optim = field(default_factory=Optim)
    note: str = "a"


def test_a_setting_that_follows_a_topic_does_not_become_one_of_the_topic():
    written = tomllib.loads(to_toml(Own()))
    assert written == {
        "steps": 7,
        "note": "a",
        "optim": {"lr": 0.5, "name": "sgd", "decay": {"every": 3}},
    }
    assert merge(Own(note="b"), written, source="test") == Own()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nlayer = 3", "unknown key 'model.layer': did you mean 'model.layers'?"),
        ("[modle]\nlayers = 3", "unknown key 'modle': did you mean 'model'?"),
        ("layers = 3", "unknown key 'layers': did you mean 'model.layers'?"),
        ("zzz = 3", "unknown key 'zzz'"),
        ("model = 3", "model: expected a table, got int 3"),
        ("steps = 2.5", "steps: expected int, got float 2.5"),
        ("steps = true", "steps: expected int, got bool True"),
        ("resume = 1", "resume: expected bool, got int 1"),
        ("data = 1", "data: expected str, got int 1"),
        ("[optim]\nname = 1", "optim.name: expected one of adamw, sgd, got int 1"),
        ("[optim]\nbetas = [0.9]", "optim.betas: expected an array of 2 floats, got list [0.9]"),
        ("[optim]\nbetas = [0.9, 'x']", "optim.betas: expected float, got str 'x'"),
        ("[optim]\nbetas = 0.9", "optim.betas: expected an array of 2 floats, got float 0.9"),
        (
            "[model]\npreset = 'smal'",
            "model.preset: expected a size among small, medium, large, xl, 2.7B, got 'smal'",
        ),
        ("steps = ", "Invalid value"),
    ],
)
def test_toml_that_means_nothing_is_refused_with_file_and_key(tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}"):
        merge(text_config.default(), load_toml(path), source=str(path))


def test_a_file_that_is_no_text_is_refused_with_its_name(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=f"^{path}: "):
        load_toml(path)


def test_whole_numbers_are_floats_where_floats_are_meant():
    assert changed(optim={"lr": 1}).optim == replace(text_config.default().optim, lr=1.0)
    assert isinstance(changed(optim={"lr": 1}).optim.lr, float)


class Size(enum.Enum):
    SMALL = "small"


@dataclass(frozen=True)
class Odd:
    rates: list[float]
    size: Size
    width: np.int64
    share: np.float32


def test_lists_enumerations_and_numbers_of_numpy_are_plain_ones() -> None:
    odd = Odd([0.5, 0.25], Size.SMALL, np.int64(8), np.float32(0.5))
    assert scalars(odd) == {"rates.0": 0.5, "rates.1": 0.25, "size": "small", "width": 8, "share": 0.5}
    assert tomllib.loads(to_toml(odd)) == {"rates": [0.5, 0.25], "size": "small", "width": 8, "share": 0.5}


def test_what_is_no_setting_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"rates: expected a number, a word or a path, .* got \[1\]"):
        scalars(replace(Odd([], Size.SMALL, np.int64(8), np.float32(0)), rates=[[1]]))
