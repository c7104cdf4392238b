"""The text recipe: what is read and held out, losses as means over bytes, optimizers that keep their bits."""

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.mesh.mesh import Mesh
from instep.recipes import text_config
from instep.recipes.corpus import ByteText, open_text, read_corpus
from instep.recipes.text import held_out_loss, losses_of, optimizer_class, parameter_groups
from instep.recipes.text_config import OptimConfig
from tests.parity import bits, numbers, world_of_one
from tests.world import world

CPU = torch.device("cpu")
CONTEXT = 7
CORPUS = bytes(i * i % 251 for i in range(1 + 30 * CONTEXT))


class Bigram(nn.Module):
    """The logits of the next byte are a row of a table; in training they would be others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(numbers(256, 256, key="bigram"))
        self.head = SimpleNamespace(out=None)  # of a GPT, which may be cut

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x] * (2.0 if self.training else 1.0)


def by_hand(model: Bigram, text: bytes) -> float:
    """Mean surprise of each byte after the one before it."""
    table = model.table.detach().double().log_softmax(1)
    pairs = [(text[i], text[i + 1]) for i in range(len(text) - 1)]
    return -sum(table[a, b].item() for a, b in pairs) / len(pairs)


def held_out(mesh: Mesh, num_windows: int, micro_size: int = 4, model: nn.Module | None = None) -> float:
    config = text_config.tiny()
    config = replace(
        config,
        eval=replace(config.eval, windows=num_windows),
        batch=replace(config.batch, micro_size=micro_size),
    )
    model = model or Bigram()
    return held_out_loss(model, model, ByteText(CORPUS, CONTEXT), config, mesh)


def test_the_loss_of_text_is_the_mean_surprise_of_a_byte():
    model = Bigram().eval()
    windows = ByteText(CORPUS, CONTEXT).windows([3, 4])
    loss = losses_of(model, windows, text_config.tiny(), CPU).mean()
    assert loss.item() == pytest.approx(by_hand(model, CORPUS[3 * CONTEXT : 5 * CONTEXT + 1]), rel=1e-6)


@pytest.mark.parametrize("num_windows", [30, 1000])
def test_the_held_out_loss_of_all_windows_is_that_of_the_text(num_windows):
    assert held_out(world_of_one(), num_windows) == pytest.approx(by_hand(Bigram(), CORPUS), rel=1e-6)


@pytest.mark.parametrize("micro_size", [1, 3, 4, 64])
def test_a_last_batch_that_is_smaller_has_a_smaller_weight(micro_size):
    chosen = [0, 3, 6, 9, 12, 15, 18, 21, 24, 27]  # ten of thirty
    windows = [CORPUS[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in chosen]
    expected = math.fsum(by_hand(Bigram(), window) for window in windows) / len(windows)
    assert held_out(world_of_one(), 10, micro_size) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_windows", [1, 10, 30])
@world(3)
def test_three_ranks_find_the_held_out_loss_of_one(mesh: Mesh, num_windows: int) -> None:
    assert held_out(mesh, num_windows) == held_out(world_of_one(), num_windows)


def made(weights: list[nn.Parameter], config: OptimConfig) -> Optimizer:
    kind, options = optimizer_class(config)
    return kind(parameter_groups(nn.ParameterList(weights), config.weight_decay), **options)


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(numbers(*shape, key=f"{shape}")) for shape in shapes]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_vectors_are_not_decayed(name):
    matrix, vector = parameters((2, 3), (3,))
    before = [p.detach().clone() for p in (matrix, vector)]
    optimizer = made([matrix, vector], OptimConfig(name=name, lr=0.5, weight_decay=0.1))
    for p in (matrix, vector):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(matrix, before[0] * (1 - 0.5 * 0.1))
    assert torch.equal(vector, before[1])


def stepped(whole: Tensor, sizes: list[int], optim: OptimConfig) -> Tensor:
    """``whole`` after three steps in which its slices of ``sizes`` are parameters of their own."""
    slices = [nn.Parameter(part) for part in whole.clone().split(sizes)]
    optimizer: Optimizer = made(slices, optim)
    for step in range(3):
        gradients = numbers(len(whole), key=f"gradient {step}").split(sizes)
        for p, gradient in zip(slices, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
    return torch.cat([p.detach() for p in slices])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_parameter_has_the_same_bits_however_it_is_sliced(name):
    optim = OptimConfig(name=name, lr=0.02, weight_decay=0.0)
    whole = numbers(16 * 20, key="whole")
    expected = stepped(whole, [16 * 20], optim)
    for sizes in ([160, 160], [16, 288, 16], [16] * 20, [112, 96, 112]):
        assert torch.equal(bits(stepped(whole, sizes, optim)), bits(expected)), sizes


def test_windows_share_one_byte_with_the_next() -> None:
    text = ByteText(b"abcdefghij", context=3)
    assert len(text) == 3
    assert [bytes(window.tolist()) for window in text.windows([0, 1, 2])] == [b"abcd", b"defg", b"ghij"]


@pytest.mark.parametrize("num_bytes", [1_920, 64_000, 3_200_000])
@pytest.mark.parametrize("held_out", [0.05, 0.2, 0.5])
def test_the_splits_share_no_byte_and_lose_none(tmp_path: Path, num_bytes: int, held_out: float) -> None:
    # each 4-byte word is its own number; these sizes give blocks that are whole words
    words = torch.arange(num_bytes // 4, dtype=torch.int32)
    file = tmp_path / "numbers"
    file.write_bytes(words.numpy().tobytes())
    train, rest = (part.tokens.view(torch.int32) for part in open_text(file, context=15, held_out=held_out))
    assert torch.equal(torch.cat([train, rest]).sort().values, words)
    assert len(rest) / len(words) == pytest.approx(held_out, rel=0.25)


def test_without_a_path_the_standard_library_is_read() -> None:
    train, rest = open_text(None, context=64)
    assert 4e6 < train.tokens.numel() + rest.tokens.numel() < 20e6
    assert b"import " in train.tokens.numpy().tobytes()
    size = train.tokens.numel() + rest.tokens.numel()
    assert train.name.endswith(
        f" standard library (95% of its {size:,} bytes; a loss of ln 256 = 5.5 is guessing)"
    )
    assert rest.name.endswith(f" standard library (5% of its {size:,} bytes, held out)")
    assert train.sha256 == open_text(None, context=64).train.sha256


def test_a_folder_is_read_in_the_order_of_relative_paths(tmp_path: Path) -> None:
    for name in ("b/z", "b.txt", "a", "c/deep/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>" * 20)
    expected = "".join(f"<{name}>" * 20 for name in ("a", "b.txt", "b/z", "c/deep/x"))
    assert read_corpus(tmp_path) == (f"data folder {tmp_path}", expected.encode())


def test_a_folder_is_read_without_what_is_hidden_binary_or_outside(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / ".git").mkdir(parents=True)
    (folder / "text").write_bytes(b"text" * 50)
    (folder / ".hidden").write_bytes(b"hidden")
    (folder / ".git" / "config").write_bytes(b"config")
    (folder / "image").write_bytes(b"\x89PNG\0\0")
    outside.write_bytes(b"secret")
    (folder / "link-out").symlink_to(outside)
    (folder / "link-again").symlink_to(folder / "text")
    (folder / "link-nowhere").symlink_to(folder / "nothing")
    os.mkfifo(folder / "pipe")
    assert read_corpus(folder)[1] == b"text" * 50


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [
        (0, "data file .* is empty, expected at least"),
        (64, r"data file .* has 64 bytes, expected at least context\(64\) \+ 1 = 65 bytes for one window"),
        (300, r"5% of its 300 bytes, held out\) is empty, expected at least context\(64\) \+ 1 = 65"),
    ],
)
def test_a_text_too_short_is_refused_with_both_numbers(tmp_path: Path, num_bytes: int, message: str) -> None:
    file = tmp_path / "short"
    file.write_bytes(bytes(num_bytes))
    with pytest.raises(ValueError, match=message):
        open_text(file, context=64)


def test_a_missing_path_and_what_is_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        open_text(tmp_path / "nothing", context=64)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="which is neither"):
        open_text(tmp_path / "pipe", context=64)
