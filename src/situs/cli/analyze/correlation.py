"""How alike the features of two places are, in one image and in two: whether a model's features keep their position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.model_args import ImageArgs
from situs.cli.result import measuring


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """Correlation between places."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = 64
    """So many of the images, chosen at random and the same every time."""

    depth: str = "norm"
    """The maps to draw: of "embedding", a block's number, or "norm", the model's end."""


run = measuring("situs.analyze.correlation.analyze_correlation")
