"""How well a pretrained run knows where its patches were: DropPos's grid of γ × γ_pos, MP3's accuracy over η.

For example: situs evaluate position runs/mp3 --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.result import MeasureArgs, measuring


@dataclass(frozen=True, kw_only=True)
class Args(MeasureArgs):
    """Position accuracy of a run with a position head."""

    ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="SHARE,…")] = None
    """MP3's η or DropPos's γ; by default 0, .25, .5, .75 (and .9 for MP3)."""

    position_ratios: Annotated[tuple[float, ...] | None, Parameter(metavar="SHARE,…")] = None
    """DropPos's γ_pos; by default .25, .5, .75 and .95."""

    anchor_ratio: Annotated[float | None, Parameter(metavar="SHARE")] = None
    """MP3: share of the patches that are told their place, 0 to ask without hints; by default as in the training."""


run = measuring("situs.measure.position.head.evaluate_position")
