"""The state hash sees every bit that training carries on, and nothing of who holds it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from instep.net.process_group import alone
from instep.reduce.blocks import BLOCK_ELEMENTS
from instep.state.hash import DIGEST_BYTES, SharedHash, block_digests
from instep.state.shards import MODEL, Shard
from tests import state_oracle
from tests.state_oracle import Entry, state_entries


class Tied(nn.Module):
    """Two names for one weight, a kept buffer, a dropped one, and the two buffers of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("dropped", torch.ones(2), persistent=False)


def trained(step: int = 1) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(step):
        model.head(model.norm(model.embed(torch.arange(5)))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_digests(entries: Iterable[Entry], step: int) -> tuple[str, dict[str, str]]:
    shards = [Shard.whole(MODEL + name, x, order=(i, "")) for i, (name, x) in enumerate(entries)]
    return SharedHash(alone()).digests(shards, step)


def state_sha256(entries: Iterable[Entry], step: int) -> str:
    return state_digests(entries, step)[0]


def state_of(x: Tensor, name: str = "w", step: int = 0) -> str:
    return state_sha256([(name, x)], step)


def test_the_hash_is_what_its_definition_says():
    entries = state_entries(*trained())
    assert state_digests(entries, 3) == state_oracle.state_digests(entries, 3)


def test_a_state_has_one_hash_whoever_loads_it():
    model, optimizer = trained(2)
    again, its_optimizer = trained(1)
    assert state_sha256(state_entries(again, its_optimizer), 2) != state_sha256(
        state_entries(model, optimizer), 2
    )
    again.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())
    assert state_sha256(state_entries(again, its_optimizer), 2) == state_sha256(
        state_entries(model, optimizer), 2
    )


@pytest.mark.parametrize("tensors", ["parameters", "buffers", "moments"])
def test_one_bit_of_any_part_changes_the_hash(tensors):
    model, optimizer = trained()
    before = state_sha256(state_entries(model, optimizer), 1)
    chosen = {
        "parameters": model.head.bias,
        "buffers": model.norm.running_var,
        "moments": optimizer.state[model.embed.weight]["exp_avg_sq"],
    }[tensors]
    with torch.no_grad():
        chosen.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    assert state_sha256(state_entries(model, optimizer), 1) != before


def test_what_is_not_carried_on_does_not_count():
    model, optimizer = trained()
    before = state_sha256(state_entries(model, optimizer), 1)
    model.dropped.fill_(7)
    model.head.bias.grad = torch.ones(5)
    assert state_sha256(state_entries(model, optimizer), 1) == before


X = torch.arange(6.0)


@pytest.mark.parametrize(
    ("other", "name", "step"),
    [
        (X.nextafter(torch.tensor(9.0)), "w", 0),
        (X.double(), "w", 0),
        (X.view(torch.int32), "w", 0),
        (X.view(2, 3), "w", 0),
        (X[:5], "w", 0),
        (X.flip(0), "w", 0),
        (X, "v", 0),
        (X, "w", 1),
        (torch.cat([-X[:1], X[1:]]), "w", 0),
    ],
    ids=["one ulp", "dtype", "kind", "shape", "length", "order", "name", "step", "sign of zero"],
)
def test_the_hash_tells_apart(other, name, step):
    assert state_of(X) == state_of(X.clone())
    assert state_of(other, name, step) != state_of(X)


def test_the_order_and_the_borders_of_entries_count():
    a, b = torch.zeros(2), torch.ones(3)
    assert state_sha256([("a", a), ("b", b)], 0) != state_sha256([("b", b), ("a", a)], 0)
    assert state_sha256([("a", a), ("b", b[:0])], 0) != state_sha256([("a", a)], 0)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x])[: len(x)],
        lambda x: torch.cat([x[:1], x])[1:],
        lambda x: nn.Parameter(x),
    ],
    ids=["transposed in memory", "part of another", "at another address", "a parameter"],
)
def test_where_and_how_a_tensor_lies_in_memory_does_not_count(view: Callable[[Tensor], Tensor]):
    x = torch.randn(70, 90)
    assert state_of(view(x)) == state_of(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_nans_count_as_one(dtype):
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    quiet = torch.tensor([1.0, torch.nan, -0.0], dtype=dtype)
    other = quiet.clone()
    other.view(integers)[1] += 1  # another payload
    assert other.isnan().tolist() == [False, True, False]
    assert other.view(integers).tolist() != quiet.view(integers).tolist()
    assert state_of(other) == state_of(quiet)
    assert state_of(quiet.nan_to_num(1.0)) != state_of(quiet)
    assert state_of(torch.where(quiet == 0, torch.zeros((), dtype=dtype), quiet)) != state_of(quiet)


def test_a_digest_is_the_sha256_of_a_block_in_logical_order():
    x = torch.randn(3, BLOCK_ELEMENTS // 2)
    numbers = [number for row in x.tolist() for number in row]
    blocks = [numbers[:BLOCK_ELEMENTS], numbers[BLOCK_ELEMENTS:]]
    expected = b"".join(hashlib.sha256(struct.pack(f"={len(b)}f", *b)).digest() for b in blocks)
    assert block_digests(x.t().contiguous().t()) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_digests_of_slices_on_block_edges_are_those_of_the_whole(dtype):
    x = torch.randint(2, (3 * BLOCK_ELEMENTS + 17,)).to(dtype)
    whole = block_digests(x)
    assert len(whole) == 4 * DIGEST_BYTES
    for edge in (0, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS, 3 * BLOCK_ELEMENTS):
        assert block_digests(x[:edge]) + block_digests(x[edge:]) == whole


def test_scalars_and_empty_tensors_have_a_hash():
    assert len(block_digests(torch.tensor(3))) == DIGEST_BYTES
    assert block_digests(torch.empty(0, 4)) == b""
    assert state_of(torch.empty(0, 4)) != state_of(torch.empty(4, 0))


def test_the_digests_of_tensors_name_the_one_that_changed():
    model, optimizer = trained()
    entries = state_entries(model, optimizer)
    before, parts = state_digests(entries, 1)
    with torch.no_grad():
        model.head.bias[4] = model.head.bias[4].nextafter(torch.tensor(9.0))
    after, changed = state_digests(entries, 1)
    assert after != before
    assert [name for name in parts if parts[name] != changed[name]] == ["head.bias"]


def test_bytes_without_a_sum_are_hashed_too():
    x = torch.tensor([1.0, torch.nan, 2.0]).to(torch.float8_e4m3fn)
    assert state_of(x) == state_of(x.clone()) != state_of(x[:2])
