"""What ``verify`` reports: figures per parameter, a verdict and the likely cause. Pure.

d is the gradient that a rank has after the exchange, r the one that one process computes, l the gradient of
one part of the reference (a rank's batch, or a micro-batch). Norms are over all elements of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from instep.errors import InstepError, counted

ROWS_SHOWN = 20
NAMED = 3  # parameters in an error message
SIMPLE = 1e-3  # how near to a simple number a ratio has to be, to be called by its name

ZERO = "zero or unused"
MISSING = "missing"
RANKS_DIFFER = "differs between ranks"
TURNED = "another direction"
NOT_FINITE = "not finite in one process either"
SCALED = (
    "something {} by the world size what instep has averaged already: let the loss be a mean over this "
    "rank's batch, and scale neither it nor .grad by the world size"
)
CAUSES = {  # of gradients with a note that contains the key; the first that fits
    NOT_FINITE: "the loss or its gradient is not finite: look at the batch and the weights, not at the ranks",
    MISSING: "a gradient is lost before the exchange: look for a hook that zeroes or drops it, or for a "
    "forward that detaches the parameter or leaves it out when the model is wrapped",
    RANKS_DIFFER: "the ranks have different gradients after the exchange: wrap the module after its last "
    "parameter was made, and change .grad on all ranks in the same way",
    "1 / world size": SCALED.format("divides"),
    "world size": SCALED.format("multiplies"),
    TURNED: "forward is not the same function twice: look for random numbers from outside of torch's default "
    "generators, state that is no buffer, buffers that differ between ranks (broadcast_buffers=False), "
    "kernels that are not deterministic, or another CPU or GPU on one rank (then pass a larger rtol)",
    "": "something scales these gradients in the distributed step only: look for a hook on the parameter",
}


class Tolerance(NamedTuple):
    """The allowed |d - r| of parameter ``name``, relative to |r|; ``rounding`` is that of one addition."""

    name: str
    relative: float
    rounding: float


class GradientFigures(NamedTuple):
    """One parameter, or a piece of one, in one copy of d; 0 is also the norm of what is absent.

    ``rank`` has it; ``distance`` is |d - r|, ``norm`` |d|, ``reference`` |r|, ``part_norm`` the mean of |l|,
    and ``product`` the inner product of d and r.
    """

    rank: int
    distance: float
    norm: float
    reference: float
    part_norm: float
    product: float


@dataclass(frozen=True)
class GradientRow:
    """One parameter on the ``rank`` with the worst gradient.

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
        """As in "2.000 = world size" and "0.000: missing"."""
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
        strategy: how gradients were reduced.
        ordered: whether they were added in the fixed order.
        differing: parameters with other *values* on one rank than on another, in words.

    Example:
        >>> model = instep.DataParallel(model)
        >>> report = model.verify((x, y), lambda model, batch: loss_function(model(batch[0]), batch[1]))
        >>> report.raise_for_error()
        >>> report.ok, report.cause, report.to_dict()["world_size"]
        (True, '', 1)
        >>> print(report)
        all 6 gradients on 1 rank (bucketed, ordered) are those of one process
          parameter  error  rank  ratio to one process
        ...
    """

    rows: tuple[GradientRow, ...]
    world_size: int
    strategy: str
    ordered: bool
    differing: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Every gradient is that of one process, and every parameter is the same on all ranks."""
        return not self.differing and all(row.ok for row in self.rows)

    @property
    def cause(self) -> str:
        """What is probably wrong, and what to do about it; "" if all is well."""
        if self.differing:
            named = "; ".join([*self.differing[:NAMED], *["and others"] * (len(self.differing) > NAMED)])
            return (
                f"the ranks hold different models: {named}. Load the same checkpoint everywhere, or wrap "
                "with init_sync=True to take rank 0's values"
            )
        notes = [row.note for row in self.rows if not row.ok]
        return next((cause for key, cause in CAUSES.items() if any(key in note for note in notes)), "")

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
            error = "-" if row.note == ZERO else f"{row.error:.1e}"
            lines.append(f"{mark} {row.name:{width}}  {error:>7}  {row.rank:>4}  {row.ratio_text()}")
        if rest := self.rows[ROWS_SHOWN:]:
            bad = sum(not row.ok for row in rest)
            lines.append(f"  and {len(rest)} more, {f'{bad} of them wrong' if bad else 'all right'}")
        return "\n".join([*lines, *([self.cause] if self.cause else [])])


def make_report(
    tolerances: Sequence[Tolerance],
    copies: Sequence[Sequence[Sequence[GradientFigures]]],
    world_size: int,
    *,
    strategy: str,
    ordered: bool,
    differing: Sequence[str],
) -> Report:
    """The report of ``copies[c][i]``: the pieces of parameter i in copy c of the gradient."""
    whole = [[joined(pieces) for pieces in by_parameter] for by_parameter in copies]
    total = math.hypot(*(figures.reference for figures in whole[0]))
    rows = []
    for tolerance, by_copy in zip(tolerances, zip(*whole, strict=True), strict=True):
        row = min((_row(tolerance, figures, total, world_size) for figures in by_copy), key=_badness)
        if not row.ok and len({f"{figures.norm:.6e}" for figures in by_copy}) > 1:
            row = replace(row, note=RANKS_DIFFER)
        rows.append(row)
    return Report(tuple(sorted(rows, key=_badness)), world_size, strategy, ordered, tuple(differing))


def joined(pieces: Sequence[GradientFigures]) -> GradientFigures:
    """The figures of a parameter from those of its pieces; ``rank`` has the worst piece."""
    worst = max(pieces, key=lambda x: math.inf if math.isnan(x.distance) else x.distance)
    distance, norm, reference, part_norm = (math.hypot(*(x[i] for x in pieces)) for i in range(1, 5))
    return GradientFigures(worst.rank, distance, norm, reference, part_norm, sum(x.product for x in pieces))


def _row(tolerance: Tolerance, figures: GradientFigures, total: float, world_size: int) -> GradientRow:
    d, r = figures.norm, figures.reference
    # The sum over the parts rounds by its addends, which may cancel. And a gradient that is zero by
    # mathematics (a bias before a norm) is all rounding, as large as the others' is.
    allowed = tolerance.relative * r + tolerance.rounding * (4 * figures.part_norm + total)
    ok = figures.distance <= allowed and not (r > 0 and d == 0)  # not so for NaN
    error = figures.distance / r if r > 0 else (0.0 if figures.distance == 0 else math.inf)
    ratio, note = None, ""
    if not math.isfinite(r):
        error, note = math.nan, NOT_FINITE
    elif r == 0:
        note = ZERO if d == 0 else "zero in one process"
    elif not math.isfinite(d):
        note = "not finite"
    else:
        ratio = math.copysign(d / r, figures.product) if d else 0.0
        if d == 0:
            note = MISSING
        elif abs(figures.product) < (1 - SIMPLE**2) * d * r:
            note = TURNED
        elif world_size > 1:
            names = {world_size: "world size", 1 / world_size: "1 / world size"}
            note = next((name for x, name in names.items() if math.isclose(ratio, x, rel_tol=SIMPLE)), "")
        note = "" if ok else note
    return GradientRow(tolerance.name, ok, error, ratio, note, figures.rank)


def _badness(row: GradientRow) -> tuple[bool, float]:
    return row.ok, -math.inf if math.isnan(row.error) else -row.error


def _headline(report: Report) -> str:
    bad = sum(not row.ok for row in report.rows)
    how = f"({report.strategy}, {'not ' * (not report.ordered)}ordered)"
    which = f"{f'{bad} of' if bad else 'all'} {len(report.rows)} gradients on"
    return f"{which} {counted(report.world_size, 'rank')} {how} are {'not ' * bool(bad)}those of one process"
