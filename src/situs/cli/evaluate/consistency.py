"""What shuffled patches do to a classifier: top-1, Diff.Norm and consistency over γ, mask told and not told.

For example: situs evaluate consistency runs/ft --ratios 0,.15,.5 --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.result import MeasureArgs, measuring


@dataclass(frozen=True, kw_only=True)
class Args(MeasureArgs):
    """Consistency under shuffled patches."""

    ratios: Annotated[tuple[float, ...], Parameter(metavar="γ,γ,…")] = (0.0, 0.03, 0.09, 0.15, 0.27, 0.5, 0.75, 0.9)
    """Shares of the patches to shuffle."""

    grid: Annotated[tuple[int, int] | None, Parameter(metavar="ROWS,COLUMNS")] = None
    """For a network without tokens (ResNet): the patches to shuffle; else the run's, 14 × 14 or 8 × 8."""


run = measuring("situs.measure.consistency.evaluate_consistency")
