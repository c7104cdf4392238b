"""What a report says, and compare alone: what is wrong on one rank is named; batches as bytes."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from instep.mesh.mesh import Mesh
from instep.verify.batch import pack, unpack
from instep.verify.comparison import compare
from instep.verify.gradient_report import (
    NOT_FINITE,
    RANKS_DIFFER,
    GradientFigures,
    GradientRow,
    Report,
    Tolerance,
    joined,
    make_report,
)
from instep.verify.subject import GradientPiece, Value
from tests.parity import numbers, world_of_one
from tests.world import world


def report_of(*rows: GradientRow) -> Report:
    return Report(rows, 2, "bucketed", True)


def test_the_table_shows_twenty_and_counts_the_rest() -> None:
    rows = [GradientRow(f"layer.{i}.weight", i > 21, 1.0 if i <= 21 else 0.0, 2.0, "", 0) for i in range(30)]
    text = str(report_of(*rows))
    assert text.startswith("22 of 30 gradients on 2 ranks (bucketed, ordered) are not those of one process\n")
    assert text.count("layer.") == 20 and "\n  and 10 more, 2 of them wrong\n" in text


def row_of(*copies: GradientFigures, tolerance: float = 1e-5, others: int = 0) -> GradientRow:
    """The row of a parameter with figures of its ``copies``, beside ``others`` right parameters of norm 1."""
    tolerances = [Tolerance(name, tolerance, 1e-7) for name in ["weight", *map(str, range(others))]]
    right = GradientFigures(0, 0.0, 1.0, 1.0, 1.0, 1.0)
    figures = [[[mine], *[[right]] * others] for mine in copies]
    report = make_report(tolerances, figures, len(copies), strategy="flat", ordered=True, differing=())
    return next(row for row in report.rows if row.name == "weight")


def figures(
    distance: float,
    norm: float,
    product: float,
    reference: float = 1.0,
    part_norm: float | None = None,
    rank: int = 0,
) -> GradientFigures:
    return GradientFigures(
        rank, distance, norm, reference, reference if part_norm is None else part_norm, product
    )


def test_the_worst_rank_speaks_for_a_parameter_and_where_ranks_differ_it_says_so() -> None:
    right, wrong = figures(0.0, 1.0, 1.0), figures(0.5, 1.5, 1.5, rank=7)
    row = row_of(right, wrong, right)
    assert (row.rank, row.ok, row.error, row.ratio, row.note) == (7, False, 0.5, 1.5, RANKS_DIFFER)
    assert row_of(wrong, wrong).note == ""


def test_pieces_have_the_figures_of_the_whole_and_the_rank_of_the_worst() -> None:
    # r = (3, 4, 0), d = (3, 8, 0): the second piece is twice as long.
    pieces = [
        GradientFigures(4, 0.0, 3.0, 3.0, 3.0, 9.0),
        GradientFigures(5, 4.0, 8.0, 4.0, 4.0, 32.0),
        GradientFigures(6, 0.0, 0.0, 0.0, 0.0, 0.0),
    ]
    assert joined(pieces) == GradientFigures(5, 4.0, 73**0.5, 5.0, 5.0, 41.0)
    row = row_of(joined(pieces))
    assert (row.rank, row.ok, row.error, row.note) == (5, False, 0.8, "another direction")
    nan = float("nan")
    assert joined([*pieces, GradientFigures(7, nan, nan, 1.0, 1.0, nan)]).rank == 7


def test_rounding_is_no_fault_and_a_lost_gradient_is_one_however_small_it_is() -> None:
    """A gradient that is zero by mathematics is rounding alone, by the size of the others."""
    assert row_of(figures(2e-9, 1e-9, -1e-18, reference=1e-9), others=3).ok
    assert not row_of(figures(2e-6, 1e-6, -1e-12, reference=1e-6), others=3).ok
    assert not row_of(figures(1e-9, 0.0, 0.0, reference=1e-9), others=3).ok


def test_addends_that_cancel_round_by_their_own_size() -> None:
    assert row_of(figures(3e-7, 3e-7, 0.0, reference=1e-8, part_norm=1.0)).ok
    assert not row_of(figures(3e-7, 3e-7, 0.0, reference=1e-8)).ok


def test_what_one_process_does_not_have_is_a_fault_unless_it_is_zero() -> None:
    assert row_of(figures(0.0, 0.0, 0.0, reference=0.0)).note == "zero or unused"
    row = row_of(figures(1.0, 1.0, 0.0, reference=0.0))
    assert not row.ok and row.ratio_text() == "zero in one process"


def test_figures_that_are_not_numbers_are_faults() -> None:
    nan = float("nan")
    assert row_of(figures(nan, nan, nan)).ratio_text() == "not finite"
    assert row_of(figures(nan, 1.0, nan, reference=nan)).note == NOT_FINITE


def test_ratios_have_names_only_where_directions_agree() -> None:
    def text(factor: float, product: float, world_size: int) -> str:
        return row_of(*[figures(abs(factor - 1) + 1e-3, factor, product)] * world_size).ratio_text()

    assert text(4.0, 4.0, 4) == "4.000 = world size"
    assert text(0.25, 0.25, 4) == "0.250 = 1 / world size"
    assert text(2.5, 2.5, 2) == "2.500"
    assert text(2.0, 1.0, 2) == "2.000: another direction"


def test_a_report_goes_through_json() -> None:
    row = GradientRow("weight", False, float("inf"), None, "zero in one process", 0)
    found = json.loads(json.dumps(report_of(row).to_dict(), allow_nan=False))
    assert found["ok"] is False and found["world_size"] == 2
    assert found["rows"] == [{**asdict(row), "error": None}]


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "batch",
    [
        torch.tensor(2.5),
        {
            "x": torch.ones(2, 3, dtype=torch.bfloat16),
            "n": 3,
            "deep": [(torch.zeros(0), None), "s", True, 0.5],
        },
        (
            torch.arange(6).view(2, 3).t(),
            torch.tensor([True, False]),
            torch.complex(torch.ones(2), torch.ones(2)).conj(),
        ),
    ],
)
def test_a_batch_comes_back_as_it_was(batch: Any) -> None:
    again = unpack(*pack(batch), CPU)
    leaves, others = flat(batch), flat(again)
    assert len(leaves) == len(others) > 0
    for x, y in zip(leaves, others, strict=True):
        assert type(x) is type(y)
        assert torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, Tensor) else x == y


def flat(x: Any) -> list[Any]:
    if isinstance(x, dict):
        return [x.keys(), *(leaf for part in x.values() for leaf in flat(part))]
    if isinstance(x, list | tuple):
        return [type(x), *(leaf for part in x for leaf in flat(part))]
    return [x]


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ({1: torch.ones(1)}, "batch has the key 1"),
        ({"x": [SimpleNamespace()]}, r"batch\['x'\]\[0\] is a SimpleNamespace"),
        (torch.eye(2).to_sparse(), "batch is no dense tensor"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(batch: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        pack(batch)


NAMES = ("first", "second")
PARTS = [[numbers(6, 4, key=f"{name} {part}") for name in NAMES] for part in range(3)]
PARAMETERS = {name: torch.zeros(6, 4) for name in NAMES}


def gradient(position: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (sum(part[position].double() for part in PARTS) / len(PARTS)).to(dtype)


def shard(position: int, rank: int, ours: Tensor | None) -> GradientPiece:
    """Three of the six rows."""
    of = lambda x: x[3 * rank : 3 * rank + 3]  # noqa: E731
    return GradientPiece(position, of, lambda: None if ours is None else of(ours))


def whole(position: int, ours: Tensor | None) -> GradientPiece:
    return GradientPiece(position, lambda x: x, lambda: ours)


def compared(mesh: Mesh, copy: int, pieces: list[GradientPiece], **changes: Any) -> Report:
    parts = [(f"part {i}", lambda part=part: (1, part)) for i, part in enumerate(PARTS)]
    told = {"values": (), "step": lambda: None, "parts": parts, "rtol": None, "floor": 0.0, **changes}
    group = mesh.world.group
    return compare(group, PARAMETERS, copy, pieces, strategy="flat", ordered=True, **told)


def wrong(report: Report) -> list[tuple[str, int, str]]:
    return [(row.name, row.rank, row.note) for row in report.rows if not row.ok]


@world(2)
def test_copies_that_are_right_pass_and_one_that_is_not_is_named_with_its_rank(mesh: Mesh) -> None:
    assert compared(mesh, mesh.rank, [whole(i, gradient(i)) for i in range(2)]).ok
    changed = gradient(1) * (1 + mesh.rank)
    report = compared(mesh, mesh.rank, [whole(0, gradient(0)), whole(1, changed)])
    assert wrong(report) == [("second", 1, RANKS_DIFFER)] and report.rows[0].ratio == pytest.approx(2.0)
    assert "change .grad on all ranks in the same way" in report.cause


@world(2)
def test_shards_are_one_copy_and_the_rank_of_the_wrong_one_is_named(mesh: Mesh) -> None:
    assert compared(mesh, 0, [shard(i, mesh.rank, gradient(i)) for i in range(2)]).ok
    changed = gradient(1) * (1 + mesh.rank)
    report = compared(mesh, 0, [shard(0, mesh.rank, gradient(0)), shard(1, mesh.rank, changed)])
    assert [row[:2] for row in wrong(report)] == [("second", 1)]
    assert 0 < report.rows[0].error < 1  # a part of it is right


@world(2)
def test_a_parameter_may_be_on_one_rank_only(mesh: Mesh) -> None:
    assert compared(mesh, 0, [whole(mesh.rank, gradient(mesh.rank))]).ok
    report = compared(mesh, 0, [whole(mesh.rank, None if mesh.rank else gradient(0))])
    assert wrong(report) == [("second", 1, "missing")]


@world(4)
def test_values_that_differ_from_those_of_another_copy_are_named(mesh: Mesh) -> None:
    copy, place = divmod(mesh.rank, 2)
    x = torch.zeros(3)
    x[1] = mesh.rank == 3
    pieces = [whole(i, gradient(i)) for i in range(2)]
    report = compared(mesh, copy, pieces, values=[Value("first", 3 * place, x)])
    assert report.differing == ("'first' has other values on rank 3 than on rank 1",) and not report.ok
    assert "the ranks hold different models: 'first'" in report.cause


def test_weights_of_parts_count_and_the_tolerance_is_that_of_the_dtype_or_as_given() -> None:
    one = world_of_one()
    heavy = [("a", lambda: (3, PARTS[0])), ("b", lambda: (0, PARTS[1]))]
    mean = [(x.double() + y.double()).div(3).float() for x, y in zip(PARTS[0], PARTS[1], strict=True)]
    assert compared(one, 0, [whole(i, x) for i, x in enumerate(mean)], parts=heavy).ok
    near = [whole(i, gradient(i) * (1 + 1e-4)) for i in range(2)]
    assert not compared(one, 0, near).ok
    assert compared(one, 0, near, rtol=1e-3).ok and compared(one, 0, near, floor=1e-3).ok
