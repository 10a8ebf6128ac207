"""How alike the features of two places are, in one image and in two: whether a model's features keep their position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.model_args import ImageArgs, open_from
from situs.cli.result import asked, present


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """Correlation between places."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = 64
    """So many of the images, chosen at random and the same every time."""
    depth: str = "norm"
    """The maps to draw: of "embedding", a block's number, or "norm", the model's end."""


def run(args: Args) -> None:
    """Runs the images through the model, prints the means of every depth, and writes the page."""
    from situs.analyze.correlation import analyze_correlation

    present(analyze_correlation(open_from(args), **asked(args)), args.out)
