"""What ``verify`` has found: figures per parameter, a verdict, and the likely cause. Pure.

d is the gradient that a rank ended with, r the one that one process computes, l the gradient of one rank's
batch alone, W the number of ranks. Norms are over all elements of a parameter, also where d is in slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from instep.errors import InstepError

ROWS_SHOWN = 20
NAMED = 3  # parameters in an error message
SIMPLE = 1e-3  # how near to a simple number a ratio has to be, to be called by its name

UNUSED = "unused"
NOTHING = "nothing came"
OWN = "this rank's own"
FLIPPED = "sign flipped"
NOT_FINITE = "not finite in one process either"


@dataclass(frozen=True)
class Reference:
    """One parameter in one process: |r|, the mean over ranks of |l|, and how near d has to be to r.

    ``tolerance`` is relative to |r|; ``rounding`` is the relative error of one addition. ``own``: rank 0
    ended with the gradient of its own batch.
    """

    name: str
    present: bool
    norm: float
    rank_norm: float
    tolerance: float
    rounding: float
    own: bool


@dataclass(frozen=True)
class GradientFigures:
    """One parameter in one copy of d, or a piece of it: |d - r|, |d| and the inner product of d and r.

    ``rank`` is the one that has it; of a copy in pieces, the one whose piece is the farthest from r.
    """

    rank: int
    present: bool
    distance: float
    norm: float
    product: float


@dataclass(frozen=True)
class GradientRow:
    """One parameter, as the rank has it whose gradient, or whose piece of it, is the worst.

    ``error`` is |d - r| / |r|. ``ratio`` is |d| / |r|, negative if d points the other way, and None where r
    is zero. ``note`` says what the ratio stands for, if it is a simple one.
    """

    name: str
    ok: bool
    error: float
    ratio: float | None
    note: str
    rank: int

    def ratio_text(self) -> str:
        """As in "2.000 = world size" and "0.000: nothing came"."""
        if self.ratio is None:
            return self.note
        between = " = " if "world size" in self.note else ": "
        return f"{self.ratio:.3f}{between if self.note else ''}{self.note}"


@dataclass(frozen=True)
class Report:
    """Whether the distributed gradient is that of one process; ``model.verify`` gives all ranks the same one.

    Attributes:
        rows: a ``GradientRow`` for each trainable parameter, the worst first.
        world_size: the number of ranks.
        strategy: how the gradients travelled.
        ordered: whether they were added in the fixed order.
        differing: names of parameters whose *values* are not the same on all ranks.
        differing_buffers: the same of buffers; they may differ, but explain gradients that do.

    Example:
        >>> model = instep.DataParallel(model)
        >>> report = model.verify((x, y), lambda model, batch: loss_function(model(batch[0]), batch[1]))
        >>> report.raise_for_error()
        >>> report.ok, report.cause, report.to_dict()["world_size"]
        (True, '', 1)
        >>> print(report)
        all 6 gradients on 1 rank(s) (bucketed, ordered) are those of one process
          parameter  error  rank  ratio to one process
        ...
    """

    rows: tuple[GradientRow, ...]
    world_size: int
    strategy: str
    ordered: bool
    differing: tuple[str, ...] = ()
    differing_buffers: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Every gradient is that of one process, and every parameter is the same on all ranks."""
        return not self.differing and all(row.ok for row in self.rows)

    @property
    def cause(self) -> str:
        """What is probably wrong, and what to do about it; "" if all is well."""
        return "" if self.ok else _cause(self)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; what is not finite is None there."""
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            row["error"] = row["error"] if math.isfinite(row["error"]) else None
        return {"ok": self.ok, "cause": self.cause, **asdict(self), "rows": rows}

    def raise_for_error(self) -> None:
        """Raise unless ``ok``.

        Raises:
            InstepError: it names the worst parameters with their figures, the likely cause and the fix.
        """
        if self.ok:
            return
        bad = [row for row in self.rows if not row.ok]
        worst = [
            f"{row.name!r} on rank {row.rank} (error {row.error:.1e}, ratio {row.ratio_text()})"
            for row in bad[:NAMED]
        ]
        worst += [f"{len(bad) - NAMED} more"] * (len(bad) > NAMED)
        raise InstepError(f"{_headline(self)}{': ' if worst else ''}{'; '.join(worst)}. {self.cause}")

    def __str__(self) -> str:
        shown = self.rows[:ROWS_SHOWN]
        width = max([len("parameter"), *(len(row.name) for row in shown)])
        lines = [_headline(self), f"  {'parameter':{width}}  {'error':>7}  rank  ratio to one process"]
        for row in shown:
            mark = " " if row.ok else "!"
            error = "-" if row.note == UNUSED else f"{row.error:.1e}"
            lines.append(f"{mark} {row.name:{width}}  {error:>7}  {row.rank:>4}  {row.ratio_text()}")
        if rest := self.rows[ROWS_SHOWN:]:
            bad = sum(not row.ok for row in rest)
            lines.append(f"  and {len(rest)} more, {f'{bad} of them wrong' if bad else 'all right'}")
        return "\n".join([*lines, *([self.cause] if self.cause else [])])


def make_report(
    references: Sequence[Reference],
    copies: Sequence[Sequence[GradientFigures]],
    world_size: int,
    *,
    strategy: str,
    ordered: bool,
    differing: Sequence[str],
    differing_buffers: Sequence[str],
) -> Report:
    """The report of ``copies[c][i]``: parameter i in copy c of the gradient; rank 0 has, or shares, c = 0."""
    whole = math.sqrt(sum(reference.norm**2 for reference in references))
    rows = []
    for i, reference in enumerate(references):
        first = _row(reference, copies[0][i], whole, world_size)
        if first.ok:  # its own gradient may be the right one: all ranks may have passed the same batch
            reference = replace(reference, own=False)
        by_copy = [_row(reference, found[i], whole, world_size) for found in copies]
        rows.append(min(by_copy, key=_badness))
    rows.sort(key=_badness)
    return Report(tuple(rows), world_size, strategy, ordered, tuple(differing), tuple(differing_buffers))


def joined(pieces: Sequence[GradientFigures]) -> GradientFigures:
    """The figures of a parameter from those of its pieces."""
    worst = max(pieces, key=lambda x: math.inf if math.isnan(x.distance) else x.distance)
    return GradientFigures(
        worst.rank,
        any(x.present for x in pieces),
        math.hypot(*(x.distance for x in pieces)),
        math.hypot(*(x.norm for x in pieces)),
        sum(x.product for x in pieces),
    )


def _row(reference: Reference, figures: GradientFigures, whole: float, world_size: int) -> GradientRow:
    rank, r, d = figures.rank, reference.norm, figures.norm
    # The sum over the ranks rounds by its addends, which may cancel. And a gradient that is zero by
    # mathematics (a bias before a norm) is all rounding, as large as the others' is.
    allowed = reference.tolerance * r + reference.rounding * (4 * reference.rank_norm + whole)
    lost = r > 0 and (not figures.present or d == 0)
    ok = figures.distance <= allowed and not lost  # not so for NaN
    error = figures.distance / r if r > 0 else (0.0 if figures.distance == 0 else math.inf)
    if not (reference.present or figures.present):
        return GradientRow(reference.name, True, 0.0, None, UNUSED, rank)
    if not math.isfinite(r):
        return GradientRow(reference.name, False, math.nan, None, NOT_FINITE, rank)
    if r == 0:
        return GradientRow(
            reference.name, ok, error, None, "both zero" if d == 0 else "zero in one process", rank
        )
    if not math.isfinite(d):
        return GradientRow(reference.name, False, error, None, "not finite", rank)
    ratio = math.copysign(d / r, figures.product)
    if lost:
        note = NOTHING
    elif ok:
        note = ""
    elif reference.own and world_size > 1:
        note = OWN
    else:
        parallel = abs(figures.product) >= (1 - SIMPLE**2) * d * r
        note = _simple(ratio, world_size) if parallel else "another direction"
    return GradientRow(reference.name, ok, error, abs(ratio) if lost else ratio, note, rank)


def _simple(ratio: float, world_size: int) -> str:
    """What a gradient that is ``ratio`` times the right one has probably been multiplied by."""
    if ratio < 0:
        return FLIPPED
    names = {
        1.0: "",
        float(world_size): "world size",
        1 / world_size: "1 / world size",
        float(world_size**2): "world size squared",
        1 / world_size**2: "1 / world size squared",
    }
    return next((name for x, name in names.items() if math.isclose(ratio, x, rel_tol=SIMPLE)), "")


def _badness(row: GradientRow) -> tuple[bool, float]:
    return row.ok, -math.inf if math.isnan(row.error) else -row.error


def _headline(report: Report) -> str:
    total, bad = len(report.rows), sum(not row.ok for row in report.rows)
    how = f"{report.strategy}, {'ordered' if report.ordered else 'not ordered'}"
    where = f"{report.world_size} rank(s) ({how})"
    if bad:
        return f"{bad} of {total} gradients on {where} are not those of one process"
    return f"all {total} gradients on {where} are those of one process"


def _cause(report: Report) -> str:
    notes = [row.note for row in report.rows if not row.ok]
    if report.differing:
        named = "; ".join(report.differing[:NAMED])
        more = f"; and {len(report.differing) - NAMED} more" if len(report.differing) > NAMED else ""
        return (
            f"the ranks hold different models: {named}{more}. Load the same checkpoint everywhere, or wrap "
            "with init_sync=True to take rank 0's values"
        )
    if NOT_FINITE in notes:
        return "the loss or its gradient is not finite: look at the batch and the weights, not at the ranks"
    if NOTHING in notes:
        return (
            "a gradient is lost before the exchange: look for a hook that zeroes or drops it, or for a "
            "forward that detaches the parameter or leaves it out when the model is wrapped"
        )
    if any("world size" in note and not note.startswith("1 /") for note in notes):
        return (
            "something multiplies by the world size what instep has averaged already: let the loss be a mean "
            "over this rank's batch, and scale neither it nor .grad by the world size"
        )
    if any(note.startswith("1 /") for note in notes):
        return (
            "something divides by the world size what instep has averaged already: let the loss be a mean "
            "over this rank's batch, and scale neither it nor .grad by the world size"
        )
    if OWN in notes:
        return "it never went through the exchange: wrap the module after its last parameter was made"
    if report.differing_buffers:
        named = "; ".join(report.differing_buffers[:NAMED])
        return f"forward may depend on buffers that differ: {named}. Pass broadcast_buffers=True"
    if FLIPPED in notes or (notes and "another direction" not in notes):
        return (
            "something scales these gradients in the distributed step alone: look for a hook on the parameter"
        )
    return (
        "forward is not the same function twice: look for random numbers from outside of torch's default "
        "generators, state that is no buffer, kernels that are not deterministic, or another CPU or GPU on "
        "one of the ranks (then pass a larger rtol)"
    )
