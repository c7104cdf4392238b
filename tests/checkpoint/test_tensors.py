"""One file of tensors: bits, ties, and headers that lie. Read it is as part of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
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


def raw(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of the format, written by hand."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_bit_pattern_of_a_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    patterns = patterns % 2 if dtype == torch.bool else patterns
    tensors = {"all": patterns.view(dtype), "scalar": patterns.view(dtype)[1000].clone()}
    assert all_bits(trip(tmp_path, tensors)) == all_bits(tensors)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(2, 0, 3),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[::5],
        torch.arange(4.0).expand(3, 4),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.complex(torch.ones(3), torch.ones(3)).conj(),
        nn.Parameter(torch.ones(2, 2)),
    ],
    ids=[
        "0-dim",
        "empty",
        "no rows",
        "transposed",
        "strided",
        "expanded",
        "channels last",
        "conjugate",
        "parameter",
    ],
)
def test_a_tensor_of_any_shape_and_stride_comes_back_contiguous(tmp_path: Path, tensor: Tensor) -> None:
    back = trip(tmp_path, {"x": tensor})["x"]
    assert bits(back) == bits(tensor.resolve_conj())
    assert back.is_contiguous()


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    assert trip(tmp_path, {}) == {}


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


def test_either_name_of_a_tie_is_enough_to_read_it(tmp_path: Path) -> None:
    shared = torch.randn(4)
    write(tmp_path / MODEL_FILE, {"embed": shared, "head": shared})
    for name in ("embed", "head"):
        assert bits(read(tmp_path, layout_of({name: shared}))[name]) == bits(shared)


def test_both_names_of_a_tie_have_to_be_of_its_shape(tmp_path: Path) -> None:
    shared = torch.randn(4)
    write(tmp_path / MODEL_FILE, {"embed": shared, "head": shared})
    for embed, head, wrong in ((shared, torch.ones(5), "head"), (torch.ones(5), shared, "embed")):
        with pytest.raises(CheckpointRejected, match=rf"{wrong}: expected float32\[5\], got float32\[4\]"):
            read(tmp_path, layout_of({"embed": embed, "head": head}))


def test_safetensors_own_loader_understands_our_ties(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    first, second = tied(), tied()
    write(tmp_path / MODEL_FILE, first.state_dict())
    load_model(second, tmp_path / MODEL_FILE)
    assert all_bits(second.state_dict()) == all_bits(first.state_dict())


def test_views_that_overlap_without_being_ties_come_back_as_they_were(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    views = {"whole": flat, "part": flat[2:7], "tail": flat[5:], "square": flat[:4].view(2, 2)}
    assert all_bits(trip(tmp_path, views)) == all_bits(views)


def test_neighbours_in_one_bucket_are_not_taken_for_ties(tmp_path: Path) -> None:
    bucket = torch.arange(10.0)
    views = {"a": bucket[:4], "b": bucket[4:], "empty": bucket[4:4]}
    assert all_bits(trip(tmp_path, views)) == all_bits(views)
    assert contents(tmp_path / MODEL_FILE).ties == {}


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (torch.eye(2).to_sparse(), "got a torch.sparse_coo tensor"),
        (torch.empty(2, device="meta"), "got a meta tensor"),
        (torch.ones(2, dtype=torch.complex128), "safetensors has no torch.complex128"),
    ],
)
def test_a_tensor_that_cannot_be_written_is_named(tmp_path: Path, tensor: Tensor, error: str) -> None:
    with pytest.raises(ValueError, match=f"weight: .*{error}"):
        write(tmp_path / MODEL_FILE, {"weight": tensor})


def test_what_is_no_tensor_is_named(tmp_path: Path) -> None:
    not_tensors: Any = {"weight": [1.0]}
    with pytest.raises(TypeError, match="weight: expected a tensor, got list"):
        write(tmp_path / MODEL_FILE, not_tensors)


HEADER = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()


def test_the_hand_written_file_of_these_tests_is_sound(tmp_path: Path) -> None:
    (tmp_path / MODEL_FILE).write_bytes(raw(HEADER, bytes(8)))
    assert contents(tmp_path / MODEL_FILE).layout == {"x": ((2,), torch.float32)}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x00",
        raw(HEADER, bytes(8), length=2**64 - 1),
        raw(HEADER, bytes(8), length=2**63),
        raw(HEADER, bytes(8), length=len(HEADER) + 9),
        raw(HEADER, bytes(8), length=0),
        raw(HEADER, bytes(7)),
        raw(HEADER, bytes(9)),
        raw(b"\xff" * 20),
        raw(b"[" * 5000),
        raw(HEADER.replace(b"[2]", b"[18446744073709551615, 2]"), bytes(8)),
        raw(HEADER.replace(b"[0, 8]", b"[8, 0]"), bytes(8)),
        raw(HEADER.replace(b"[0, 8]", b"[0, 800000000000]"), bytes(8)),
        raw(HEADER.replace(b"[0, 8]", b"[-1, 8]"), bytes(8)),
        raw(HEADER.replace(b"F32", b"F99"), bytes(8)),
        raw(HEADER.replace(b"F32", b"F8_E8M0").replace(b"[2]", b"[8]"), bytes(8)),
    ],
    ids=lambda data: f"{data[:8].hex()} {data[8:60].decode('latin1')!r} {len(data)}",
)
def test_a_file_whose_header_lies_is_rejected(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MODEL_FILE).write_bytes(data)
    for attempt in (lambda: contents(tmp_path / MODEL_FILE), lambda: read(tmp_path, {})):
        with pytest.raises(CheckpointRejected, match=r"model\.safetensors: "):
            attempt()


def test_a_header_over_the_limit_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / MODEL_FILE, "wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)  # a hole: takes no space
    with pytest.raises(CheckpointRejected, match="expected a header of at most 16777216 bytes"):
        contents(tmp_path / MODEL_FILE)


def test_missing_and_unknown_names_are_counted_and_named(tmp_path: Path) -> None:
    write(tmp_path / MODEL_FILE, {"a": torch.ones(1), "old": torch.ones(1)})
    expected = layout_of({name: torch.ones(1) for name in ("a", "b.weight", "b.bias")})
    with pytest.raises(
        CheckpointRejected, match=r"expected 3 tensors, got 2: missing b\.weight, b\.bias; unknown old"
    ):
        read(tmp_path, expected)


@pytest.mark.parametrize("other", [torch.ones(3, 2), torch.ones(6), torch.ones(2, 3).double()])
def test_another_shape_or_dtype_is_named_on_both_sides(tmp_path: Path, other: Tensor) -> None:
    write(tmp_path / MODEL_FILE, {"weight": other})
    with pytest.raises(CheckpointRejected, match=r"weight: expected float32\[2, 3\], got float"):
        read(tmp_path, layout_of({"weight": torch.ones(2, 3)}))
