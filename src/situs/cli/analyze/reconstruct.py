"""Puzzles that an MP3 or DropPos run solves: each patch where the model puts it, at several ratios; two-image mixes.

For example: situs analyze reconstruct runs/mp3 --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.model_args import FewImagesArgs
from situs.cli.result import measuring


@dataclass(frozen=True, kw_only=True)
class Args(FewImagesArgs):
    """Puzzles that an MP3 or DropPos run solves."""

    ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="SHARE,…")] = None
    """MP3's η or DropPos's γ; by default the papers' 0, .25, .5 and .75."""

    position_ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="SHARE,…")] = None
    """DropPos's γ_pos; by default .75 and the paper's .95."""

    anchor_ratio: Annotated[float | None, Parameter(metavar="SHARE")] = None
    """MP3: share of the patches that are told their place, 0 to ask without hints; by default as in the training."""

    show: int = 6
    """How many images are shown."""

    pairs: int = 2
    """MP3: how many pairs of images are mixed."""


run = measuring("situs.measure.reconstruct.analyze_reconstruct")
