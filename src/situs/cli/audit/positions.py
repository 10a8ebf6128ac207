"""How much a model knows and gives away of position: its vectors, its features, its answers, its blocks; one page.

For example: situs audit positions runs/mp3 --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.model_args import ImageArgs, open_from
from situs.cli.result import asked, present


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """What a model knows of position."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = 64
    """At most this many images, chosen at random and the same every time; half fit the readers, half are read."""

    batch: int = 16
    """Images at a time."""

    ratios: Annotated[tuple[float, ...], Parameter(metavar="γ,γ,…")] = (0.15, 0.5, 0.9)
    """Shares of the patches to shuffle; the verdict speaks of the first."""

    equivariance: bool = True
    """Measure whether the blocks treat tokens as a set; in float64, which takes a while for a large model."""


def run(args: Args) -> None:
    """Audits, prints the verdict, and writes the page."""
    from situs.audit.positions import audit_positions

    present(audit_positions(open_from(args), **asked(args)), args.out)
