"""One file of tensors: bits, ties, and headers that lie. Read it is as part of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.checkpoint.save import MODEL_FILE
from instep.checkpoint.tensors import MAX_HEADER_BYTES, Layout, contents, write
from instep.errors import CheckpointRejected
from instep.state.stored import DTYPES
from tests.checkpoint.states import all_bits, bits, layout_of, read_tensors, vouch


def trip(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    write(path / MODEL_FILE, tensors)
    return read(path, layout_of(tensors))


def read(path: Path, expected: Layout) -> dict[str, Tensor]:
    """The tensors of the file in ``path``, whose manifest has the hash of whatever is in it."""
    vouch(path)
    return read_tensors(path, MODEL_FILE, expected)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_bit_pattern_of_a_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    patterns = patterns % 2 if dtype == torch.bool else patterns
    tensors = {"all": patterns.view(dtype), "scalar": patterns.view(dtype)[1000].clone()}
    assert all_bits(trip(tmp_path, tensors)) == all_bits(tensors)


STRIDED = {
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(0),
    "no rows": torch.empty(2, 0, 3),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "strided": torch.arange(12.0)[::5],
    "expanded": torch.arange(4.0).expand(3, 4),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugate": torch.complex(torch.ones(3), torch.ones(3)).conj(),
    "parameter": nn.Parameter(torch.ones(2, 2)),
}


@pytest.mark.parametrize("tensor", STRIDED.values(), ids=STRIDED)
def test_a_tensor_of_any_shape_and_stride_comes_back_contiguous(tmp_path: Path, tensor: Tensor) -> None:
    back = trip(tmp_path, {"x": tensor})["x"]
    assert bits(back) == bits(tensor.resolve_conj())
    assert back.is_contiguous()


def test_tensors_come_back_aligned_and_in_memory_of_their_own(tmp_path: Path) -> None:
    back = trip(tmp_path, {f"x{n}": torch.ones(n, dtype=torch.int8) for n in (1, 3, 65)})
    assert [tensor.data_ptr() % 64 for tensor in back.values()] == [0, 0, 0]
    (tmp_path / MODEL_FILE).write_bytes(b"")
    assert all(bool((tensor == 1).all()) for tensor in back.values())


def test_a_tie_is_written_once_and_comes_back_as_one_tensor(tmp_path: Path) -> None:
    shared = torch.randn(100, 10)
    back = trip(tmp_path, {"embed": shared, "bias": torch.ones(3), "head": shared.view(100, 10)})
    assert back["embed"] is back["head"]
    assert bits(back["head"]) == bits(shared)
    assert contents(tmp_path / MODEL_FILE).ties == {"head": "embed"}
    assert (tmp_path / MODEL_FILE).stat().st_size < 2 * shared.nbytes


@pytest.mark.parametrize(
    "spans",
    [{"whole": (0, 10), "part": (2, 7), "tail": (5, 10)}, {"a": (0, 4), "b": (4, 10), "empty": (4, 4)}],
)
def test_views_of_one_memory_are_no_ties_and_come_back_as_they_were(
    tmp_path: Path, spans: dict[str, tuple[int, int]]
) -> None:
    flat = torch.arange(10.0)
    views = {name: flat[first:last] for name, (first, last) in spans.items()}
    assert all_bits(trip(tmp_path, views)) == all_bits(views)
    assert contents(tmp_path / MODEL_FILE).ties == {}


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (torch.eye(2).to_sparse(), "got a torch.sparse_coo tensor"),
        (torch.empty(2, device="meta"), "got a meta tensor"),
        (torch.ones(2, dtype=torch.complex128), "safetensors has no torch.complex128"),
        ([1.0], "expected a tensor, got list"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path: Path, tensor: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"weight: .*{error}"):
        write(tmp_path / MODEL_FILE, {"weight": tensor})


def test_a_header_over_the_limit_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / MODEL_FILE, "wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)  # a hole: takes no space
    with pytest.raises(CheckpointRejected, match="expected a header of at most 16777216 bytes"):
        contents(tmp_path / MODEL_FILE)
