"""What a report says: verdicts from figures alone, the table, the words for a ratio."""

from __future__ import annotations

import json
from dataclasses import asdict

from instep.verify.gradient_report import GradientFigures, GradientRow, Reference, Report, joined, make_report


def report_of(*rows: GradientRow) -> Report:
    return Report(rows, 2, "bucketed", True)


def test_the_table_shows_twenty_and_counts_the_rest() -> None:
    rows = [GradientRow(f"layer.{i}.weight", i > 21, 1.0 if i <= 21 else 0.0, 2.0, "", 0) for i in range(30)]
    text = str(report_of(*rows))
    assert text.startswith(
        "22 of 30 gradients on 2 rank(s) (bucketed, ordered) are not those of one process\n"
    )
    assert text.count("layer.") == 20 and "\n  and 10 more, 2 of them wrong\n" in text


def reference(norm: float = 1.0, **changes: object) -> Reference:
    fields = {"present": True, "rank_norm": norm, "tolerance": 1e-5, "rounding": 1e-7, "own": False}
    return Reference("weight", norm=norm, **{**fields, **changes})


def row_of(reference: Reference, *figures: GradientFigures, others: int = 0) -> GradientRow:
    """The row of a parameter with ``figures`` of its copies, beside ``others`` right parameters of norm 1."""
    references = [reference, *[Reference(str(i), True, 1.0, 1.0, 1e-5, 1e-7, False) for i in range(others)]]
    copies = [[mine, *[GradientFigures(0, True, 0.0, 1.0, 1.0)] * others] for mine in figures]
    names = {"strategy": "flat", "ordered": True, "differing": (), "differing_buffers": ()}
    report = make_report(references, copies, len(figures), **names)
    return next(row for row in report.rows if row.name == "weight")


def test_the_worst_rank_speaks_for_a_parameter():
    right, wrong = GradientFigures(0, True, 0.0, 1.0, 1.0), GradientFigures(7, True, 0.5, 1.5, 1.5)
    row = row_of(reference(), right, wrong, right)
    assert (row.rank, row.ok, row.error, row.ratio) == (7, False, 0.5, 1.5)


def test_a_copy_in_pieces_has_the_figures_of_the_whole_and_the_rank_of_the_worst_piece():
    # r = (3, 4, 0), d = (3, 8, 0): the second piece is twice as long.
    pieces = [
        GradientFigures(4, True, 0.0, 3.0, 9.0),
        GradientFigures(5, True, 4.0, 8.0, 32.0),
        GradientFigures(6, True, 0.0, 0.0, 0.0),
    ]
    assert joined(pieces) == GradientFigures(5, True, 4.0, 73**0.5, 41.0)
    row = row_of(reference(norm=5.0), joined(pieces))
    assert (row.rank, row.ok, row.error, row.note) == (5, False, 0.8, "another direction")
    nan = float("nan")
    assert joined([*pieces, GradientFigures(7, True, nan, nan, nan)]).rank == 7


def test_rounding_is_no_fault_and_a_lost_gradient_is_one_however_small_it_is():
    """A gradient that is zero by mathematics is rounding alone, by the size of the others."""
    tiny = reference(norm=1e-9)
    assert row_of(tiny, GradientFigures(0, True, 2e-9, 1e-9, -1e-18), others=3).ok
    assert not row_of(reference(norm=1e-6), GradientFigures(0, True, 2e-6, 1e-6, -1e-12), others=3).ok
    assert not row_of(tiny, GradientFigures(0, True, 1e-9, 0.0, 0.0), others=3).ok
    assert not row_of(tiny, GradientFigures(0, False, 1e-9, 0.0, 0.0), others=3).ok


def test_addends_that_cancel_round_by_their_own_size():
    figures = GradientFigures(0, True, 3e-7, 3e-7, 0.0)
    assert row_of(reference(norm=1e-8, rank_norm=1.0), figures).ok
    assert not row_of(reference(norm=1e-8, rank_norm=1e-8), figures).ok


def test_what_one_process_has_not_is_a_fault_unless_it_is_zero():
    nothing = reference(norm=0.0, present=False)
    assert row_of(nothing, GradientFigures(0, False, 0.0, 0.0, 0.0)).note == "unused"
    assert row_of(nothing, GradientFigures(0, True, 0.0, 0.0, 0.0)).ok
    assert not row_of(nothing, GradientFigures(0, True, 1.0, 1.0, 0.0)).ok


def test_figures_that_are_not_numbers_are_faults():
    nan = float("nan")
    assert not row_of(reference(), GradientFigures(0, True, nan, nan, nan)).ok
    assert not row_of(reference(norm=nan), GradientFigures(0, True, nan, 1.0, nan)).ok


def test_ratios_have_names_only_where_directions_agree():
    def text(factor: float, product: float, world_size: int) -> str:
        figures = GradientFigures(0, True, abs(factor - 1) + 1e-3, factor, product)
        return row_of(reference(), *[figures] * world_size).ratio_text()

    assert text(4.0, 4.0, 4) == "4.000 = world size"
    assert text(9.0, 9.0, 3) == "9.000 = world size squared"
    assert text(0.25, 0.25, 4) == "0.250 = 1 / world size"
    assert text(2.5, 2.5, 2) == "2.500"
    assert text(2.0, 1.0, 2) == "2.000: another direction"


def test_a_report_goes_through_json():
    row = GradientRow("weight", False, float("inf"), None, "zero in one process", 0)
    found = json.loads(json.dumps(report_of(row).to_dict(), allow_nan=False))
    assert found["ok"] is False and found["world_size"] == 2
    assert found["rows"] == [{**asdict(row), "error": None}]
