"""Where a model's heads look: maps over images, by relative offset, and entropy layer by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.model_args import ImageArgs
from situs.cli.result import measuring


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """Where a model's heads look."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = 64
    """So many of the images, chosen at random and the same every time."""

    layer: int | None = None
    """The layer whose maps are laid over images, 1 for the first; the last where nothing is said."""

    show: int = 6
    """How many images are shown."""


run = measuring("situs.analyze.attention.analyze_attention")
