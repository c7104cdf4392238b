"""Running statistics that are applied later have the bits that torch's kernels write at once."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from instep.errors import Desync
from instep.reduce.running import BufferChange, Changes, Rule, apply, from_bytes, to_bytes
from instep.step.watched_norms import Recording, find_norms
from tests.parity import bits, numbers

WIDTH = 257
NARROW = torch.bfloat16
LAYOUTS = {
    "rows": lambda x: x[:, :, 0, 0].contiguous(),
    "lines": lambda x: x[..., 0].contiguous(),
    "images": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "volumes, channels last": lambda x: x.unsqueeze(4).contiguous(memory_format=torch.channels_last_3d),
    "cut out": lambda x: x[..., :2, :2],
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "channels last, without a format": lambda x: x[..., 0].transpose(1, 2).contiguous().transpose(1, 2),
}
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64),
    "bfloat16": (NARROW, NARROW),
    "bfloat16, statistics in float32": (NARROW, torch.float32),
}
LOOSE = {"cut out", "transposed", "channels last, without a format"}
# Of loose inputs torch sums more bits of a variance than bfloat16 keeps.
TRIED = [(x, d) for x, d in product(LAYOUTS, DTYPES) if not (d == "bfloat16" and x in LOOSE)]


class Norm(nn.modules.batchnorm._BatchNorm):
    """Batch norm in any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def inputs(micro_batch: int, layout: str, dtype: torch.dtype) -> Tensor:
    x = 3 * numbers(5, WIDTH, 4, 3, key=f"inputs {micro_batch}") + 1
    return LAYOUTS[layout](x.to(dtype))


def record(module: nn.Module, *batches: Tensor) -> Changes:
    """What forwards of ``module`` would change."""
    recording = Recording(find_norms(module.named_modules())[0])
    with recording.open(shown=True):
        for batch in batches:
            module(batch)
    return recording.changes()


def assert_same_buffers(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, x), (_, y) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(bits(x), bits(y)), name


@pytest.mark.parametrize("momentum", [0.1, 0.37, 1, 0.0, None])
@pytest.mark.parametrize(("layout", "dtypes"), TRIED)
def test_what_is_applied_later_has_the_bits_of_the_kernel(
    layout: str, dtypes: str, momentum: float | None
) -> None:
    of_input, of_buffers = DTYPES[dtypes]
    ours, theirs = (Norm(WIDTH, momentum=momentum, dtype=of_buffers) for _ in range(2))
    changes = {}
    for i in (2, 0, 1):
        changes[i] = record(ours, inputs(i, layout, of_input))
    assert_same_buffers(ours, Norm(WIDTH, momentum=momentum, dtype=of_buffers))
    apply(find_norms(ours.named_modules())[1], changes)
    for i in range(3):
        theirs(inputs(i, layout, of_input))
    assert_same_buffers(ours, theirs)


def test_of_instances_too() -> None:
    ours, theirs = (nn.InstanceNorm2d(WIDTH, momentum=0.3, track_running_stats=True) for _ in range(2))
    batches = [inputs(i, "images", torch.float32)[: 2 + i] for i in range(3)]
    apply(find_norms(ours.named_modules())[1], {i: record(ours, batch) for i, batch in enumerate(batches)})
    for batch in batches:
        theirs(batch)
    assert_same_buffers(ours, theirs)


def test_forwards_in_any_order_and_number() -> None:
    """The second norm has another momentum, and fewer forwards than the first; they share a counter."""
    ours, theirs = (nn.ModuleList([nn.BatchNorm1d(WIDTH), Norm(WIDTH, momentum=None)]) for _ in range(2))
    for module in (ours, theirs):
        module[1].num_batches_tracked = module[0].num_batches_tracked
    batches = [inputs(i, "rows", torch.float32) for i in range(6)]

    def forwards(module: nn.ModuleList, first: int) -> None:
        for which, batch in zip((0, 0, 1), batches[first:], strict=False):
            module[which](batch)

    recording = Recording(find_norms(ours.named_modules())[0])
    changes = {}
    for i in range(2):
        with recording.open(shown=True):
            forwards(ours, 3 * i)
        changes[i] = recording.changes()
        forwards(theirs, 3 * i)
    apply(find_norms(ours.named_modules())[1], changes)
    assert_same_buffers(ours, theirs)


def test_statistics_that_are_not_finite_are_what_torch_makes_of_them() -> None:
    batch = inputs(0, "channels last, without a format", torch.float32)
    batch[:, 0] = torch.inf
    batch[:, 1] = torch.nan
    batch[:, 2] = 3e38
    batch[:, 3] = -0.0
    ours, theirs = Norm(WIDTH), Norm(WIDTH)
    for x in (batch, batch.contiguous()):
        apply(find_norms(ours.named_modules())[1], {0: record(ours, x)})
        theirs(x)
    for x, y in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_changes_arrive_as_they_were_sent() -> None:
    module = nn.ModuleList([Norm(3), Norm(2, momentum=None), nn.InstanceNorm1d(4, track_running_stats=True)])
    norms, buffers = find_norms(module.named_modules())
    recording = Recording(norms)
    with recording.open(shown=True):
        for norm in module:
            norm(numbers(2, norm.num_features, 5, key="sent").transpose(0, 2).transpose(0, 2))
    sent = {7: recording.changes(), 3: recording.changes()}
    found = from_bytes(to_bytes(sent), buffers, "rank 1")
    assert list(found) == [7, 3]
    for index, changes in sent.items():
        assert [change for change, _ in found[index]] == [change for change, _ in changes]
        for (_, x), (_, y) in zip(found[index], changes, strict=True):
            assert torch.equal(bits(x), bits(y))


@pytest.mark.parametrize(
    "wrong",
    [
        BufferChange(Rule.SUM_IN_T, (0, 5), 0.1),
        BufferChange(Rule.SUM_IN_T, (0, -1), 0.1),
        BufferChange(Rule.SUM_IN_T, (), 0.1),
        BufferChange(Rule.SUM_IN_T, (0, 0), 0.1),
        BufferChange(Rule.SUM_IN_T, (0,), None, (7,)),
        BufferChange(Rule.SUM_IN_T, (0, 1), None, (2,)),
        BufferChange(Rule.SUM_IN_T, (0,), 0.1, (), -1),
        BufferChange(Rule.SUM_IN_T, (0,), "0.1"),  # type: ignore[arg-type]
    ],
)
def test_changes_of_other_buffers_are_refused(wrong: BufferChange) -> None:
    buffers = find_norms(Norm(3).named_modules())[1]
    good = BufferChange(Rule.SUM_IN_T, (0, 1), 0.1)
    data = to_bytes({0: [(good, torch.ones(6))]})
    assert from_bytes(data, buffers, "rank 1")[0][0][0] == good
    for length in (0, 3, 6):
        with pytest.raises(Desync, match="rank 1 sent running statistics of other buffers"):
            from_bytes(to_bytes({0: [(wrong, torch.ones(length))]}), buffers, "rank 1")
    for cut in (data[:3], data[:20], data[:-1], b""):
        with pytest.raises(Desync):
            from_bytes(cut, buffers, "rank 1")
