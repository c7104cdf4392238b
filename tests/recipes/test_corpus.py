"""Text: what is read, what is held out, and the windows that are cut."""

import hashlib
import os
from pathlib import Path

import pytest
import torch

from instep.recipes.corpus import ByteText, next_tokens, open_text, read_corpus


def test_windows_share_one_byte_with_the_next() -> None:
    text = ByteText(b"abcdefghij", context=3)
    assert len(text) == 3
    assert [bytes(window.tolist()) for window in text.windows([0, 1, 2])] == [b"abcd", b"defg", b"ghij"]


@pytest.mark.parametrize(("num_bytes", "num_windows"), [(4, 1), (6, 1), (7, 2), (9, 2), (10, 3)])
def test_a_rest_shorter_than_a_window_is_unused(num_bytes: int, num_windows: int) -> None:
    assert len(ByteText(bytes(num_bytes), context=3)) == num_windows


def test_windows_come_in_the_order_asked_for_as_aligned_int64() -> None:
    text = ByteText(bytes(range(256)), context=7)
    for indices in ([5], [3, 1, 3], list(range(len(text)))):
        windows = text.windows(indices)
        assert windows.shape == (len(indices), 8)
        assert windows.dtype == torch.int64
        assert windows.data_ptr() % 64 == 0
        assert windows[:, 0].tolist() == [7 * i for i in indices]
    windows.zero_()
    assert text.windows([1]).tolist() == [list(range(7, 15))]


def test_a_window_outside_is_refused() -> None:
    with pytest.raises(IndexError, match="0 <= index < 3 windows, got 3"):
        ByteText(b"abcdefghij", context=3).windows([3])


def test_the_digest_is_of_the_corpus() -> None:
    assert ByteText(b"abcdefghij", context=3).sha256 == hashlib.sha256(b"abcdefghij").hexdigest()


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


def test_blocks_are_held_out_from_the_whole_length_of_the_corpus(tmp_path: Path) -> None:
    file = tmp_path / "ramp"
    file.write_bytes(b"".join(bytes([i]) * 1000 for i in range(250)))
    train, rest = open_text(file, context=15, held_out=0.1)
    assert rest.tokens.double().mean().item() == pytest.approx(train.tokens.double().mean().item(), rel=0.05)
    assert rest.tokens.min() < 25
    assert rest.tokens.max() >= 225


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


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_targets_are_the_next_tokens_in_memory_of_their_own(batch: int) -> None:
    windows = torch.randint(256, (batch, 9))
    inputs, targets = next_tokens(windows)
    assert torch.equal(inputs, windows[:, :8])
    assert torch.equal(targets, windows[:, 1:])
    for half in (inputs, targets):
        assert half.is_contiguous()
        assert half.data_ptr() % 64 == 0
        assert half.untyped_storage().data_ptr() != windows.untyped_storage().data_ptr()
